"""Writing a checkpoint of random weights in the official layout, to try everything without the real one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from octavo.errors import OctavoError, UsageError
from octavo.model.config import ModelConfig
from octavo.model.layout import expected_tensors
from octavo.model.packaged import packaged_file
from octavo.model.presets import preset
from octavo.model.random_weights import fill_random
from octavo.model.shards import INDEX_FILE, TORCH_DTYPES
from octavo.model.writing import write_shards

WRITABLE_PRESETS = ("tiny", "mini")
"""Those small enough for a file; the others are for random weights in memory."""

_CHECKPOINT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors", INDEX_FILE)


def init_checkpoint(
    preset_name: str, path: Path, seed: int, progress: Callable[[int, int], None] | None = None
) -> ModelConfig:
    """Write config, tokenizer, two safetensors files and their index into the directory ``path``; return the config.

    The tensors depend on preset and ``seed`` alone. ``progress(done, total)`` is called with payload bytes. Raises
    :class:`UsageError` for a preset that only fits in memory, for a directory that holds a checkpoint, and for a path
    that cannot be a directory; :class:`OctavoError` if writing fails.
    """
    config = preset(preset_name)
    if preset_name not in WRITABLE_PRESETS:
        size = sum(spec.nbytes for spec in expected_tensors(config).values())
        raise UsageError(
            f"preset {preset_name!r} is {size / 1e9:.0f} GB, too large to write; choose {' or '.join(WRITABLE_PRESETS)}"
        )
    _claim_directory(path)
    try:
        write_shards(path, _shards(config, seed, progress), expected_tensors(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (path / name).write_bytes(packaged_file(preset_name, name))
        # Last, because a directory with a config.json is taken for a checkpoint.
        (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise OctavoError(f"{path}: writing the checkpoint failed ({error}). Remove it before the next try.") from error
    return config


def _claim_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(file.name for pattern in _CHECKPOINT_FILES for file in path.glob(pattern))
    except OSError as error:
        raise UsageError(f"{path}: no directory can be made there ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"{path}: this directory is not writable. Choose another.")
    if present:
        raise UsageError(
            f"{path}: already holds {', '.join(present)}. Choose another directory; nothing is ever overwritten."
        )


def _shards(
    config: ModelConfig, seed: int, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The backbone in the first file; Engram tables, drafts and vision in the second."""
    expected = expected_tensors(config)
    backbone = {name: spec for name, spec in expected.items() if _is_backbone(name)}
    parts = [backbone, {name: spec for name, spec in expected.items() if name not in backbone}]
    done, total = 0, sum(spec.nbytes for spec in expected.values())
    for number, part in enumerate(parts, start=1):
        tensors = {name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for name, spec in part.items()}
        for name, tensor in tensors.items():
            if not name.endswith(".scale"):
                fill_random(name, tensor, tensors.get(name.removesuffix("weight") + "scale"), seed)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
        yield f"model-{number:05}-of-{len(parts):05}.safetensors", tensors


def _is_backbone(name: str) -> bool:
    return ".engram.embed." not in name and name.split(".")[0] in ("embed", "layers", "norm", "head")
