"""Checkpoints for tests: files written byte by byte, so that they can be wrong, or huge and empty."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from octavo.model.config import ModelConfig
from octavo.model.layout import TensorSpec, expected_tensors
from octavo.model.shards import INDEX_FILE, TORCH_DTYPES


def header_bytes(entries: dict[str, object]) -> bytes:
    """Length and JSON of a safetensors header, padded so that the data begins at a multiple of 8."""
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, specs: dict[str, TensorSpec], payload: bytes | None) -> None:
    """A valid file of ``specs``; its data repeats ``payload``, or is a hole that takes no space."""
    entries: dict[str, object] = {}
    end = 0
    for name, spec in specs.items():
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    with path.open("wb") as file:
        file.write(header_bytes(entries))
        begin = file.tell()
        if payload is not None:
            for first in range(0, end, len(payload)):
                file.write(payload[: min(len(payload), end - first)])
        file.truncate(begin + end)


def write_checkpoint(
    path: Path, config: ModelConfig, file_of: Callable[[str], str], payload: bytes | None = None
) -> None:
    """The layout of ``config`` in the files that ``file_of`` gives for each tensor name."""
    path.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in expected_tensors(config).items():
        files.setdefault(file_of(name), {})[name] = spec
    for file, specs in files.items():
        write_tensors(path / file, specs, payload)
    write_index(path, {name: file for file, specs in files.items() for name in specs})
    (path / "config.json").write_text(json.dumps(config.to_dict()))


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def released_file(name: str) -> str:
    """One file for each layer and draft stage, Engram tables in the last two, 48 in all, as in the release."""
    if ".engram.embed." in name:
        number = 47 if name.startswith("layers.1.") else 48
    elif match := re.match(r"(layers|mtp)\.(\d+)\.", name):
        number = int(match[2]) + (2 if match[1] == "layers" else 42)
    else:
        number = {"embed": 1, "head": 45, "norm": 45}.get(name.split(".")[0], 46)
    return f"model-{number:05}-of-00048.safetensors"


def parameter_tensors(
    config: ModelConfig,
    wanted: Callable[[str], bool],
    experts: range | None = None,
    draft_experts: range | None = None,
) -> dict[str, Tensor]:
    """Uninitialised parameters, as a model would hold them, for the official tensors that are ``wanted``.

    Routed experts are stacked; Engram tables are left out.
    """
    text = config.text_config
    experts = experts if experts is not None else range(text.n_routed_experts)
    draft_experts = draft_experts if draft_experts is not None else range(text.dspark_n_routed_experts)
    parameters: dict[str, Tensor] = {}
    for name, spec in expected_tensors(config).items():
        if ".engram.embed." in name or not wanted(name):
            continue
        dtype = TORCH_DTYPES[spec.dtype]
        match = re.fullmatch(r"((layers|mtp)\.\d+\.ffn\.experts)\.\d+\.(w\d\.\w+)", name)
        if match is None:
            parameters[name] = torch.empty(spec.shape, dtype=dtype)
        else:
            count = len(experts if match[2] == "layers" else draft_experts)
            stack = f"{match[1]}.{match[3]}"
            if stack not in parameters:
                parameters[stack] = torch.empty(count, *spec.shape, dtype=dtype)
    return parameters
