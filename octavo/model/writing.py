"""Writing tensors as the official checkpoint stores them: safetensors files, and the index that names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.model.layout import TensorSpec
from octavo.model.shards import INDEX_FILE, TORCH_DTYPES

_STORED_DTYPES = {**TORCH_DTYPES, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


def write_shards(
    path: Path, shards: Iterable[tuple[str, Mapping[str, Tensor]]], specs: Mapping[str, TensorSpec]
) -> None:
    """Write (file, tensors by official name) one after another into the directory ``path``, and then the index.

    Tensors have the parameter types of ``octavo.model.weights``; every tensor of ``specs`` is in one of the files.
    Raises :class:`OSError` or :class:`safetensors.SafetensorError` if writing fails.
    """
    weight_map: dict[str, str] = {}
    for file, tensors in shards:
        stored = {name: tensor.view(_STORED_DTYPES[specs[name].dtype]).contiguous() for name, tensor in tensors.items()}
        save_file(stored, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(spec.nbytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
