"""Golden tensors, and the mini checkpoint's weights in the forms that operators take."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens"
_BYTES = (torch.int8, torch.float8_e8m0fnu)


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    """All tensors of a golden file; scale bytes and packed codes as uint8."""
    return _load(GOLDENS / f"{name}.safetensors")


@functools.cache
def description(name: str) -> dict[str, Any]:
    """A golden JSON file."""
    content: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    return content


@functools.cache
def mini_weights() -> dict[str, Tensor]:
    """The mini checkpoint by official tensor name; scale bytes and packed codes as uint8."""
    return {name: t for file in sorted((GOLDENS / "mini").glob("*.safetensors")) for name, t in _load(file).items()}


def mini_pair(name: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of a quantised matrix of the mini checkpoint."""
    weights = mini_weights()
    return weights[f"{name}.weight"], weights[f"{name}.scale"]


def _load(file: Path) -> dict[str, Tensor]:
    return {name: t.view(torch.uint8) if t.dtype in _BYTES else t for name, t in load_file(file).items()}
