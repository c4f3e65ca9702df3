"""Weights for the judge: the stored bytes of a checkpoint as exact fp64 values, decoded here alone (spec/model.md 2).

Nothing of the engine's own decoding is used, so that an error in it cannot hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All weights of the safetensors files in ``path`` by official name, fp64."""
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored.update(load_file(file))
    return dequantise(stored)


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp64 values of every ``weight`` in ``stored``; the ``.scale`` siblings are used up.

    Codes and scales may have their float8 dtype or be bit patterns (uint8, int8).
    """
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        if scale is None:
            assert tensor.dtype in (torch.bfloat16, torch.float32), f"{name}: {tensor.dtype} without a scale"
            weights[name] = tensor.double()
            continue
        factors = 2.0 ** (_bytes(scale).double() - 127)
        if ".ffn.experts." in name:
            values = _unpack_f4(_bytes(tensor))
            factors = factors.repeat_interleave(32, 1)
        else:
            values = _E4M3[_bytes(tensor)]
            factors = factors.repeat_interleave(32, 1)[:, : values.shape[1]]
            if not name.endswith(".engram.embed.weight"):
                factors = factors.repeat_interleave(32, 0)[: values.shape[0]]
        assert factors.shape == values.shape, f"{name}: scale {list(scale.shape)} does not fit {list(values.shape)}"
        weights[name] = values * factors
        assert weights[name].isfinite().all(), f"{name}: not finite"
    return weights


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).long()


def _unpack_f4(packed: Tensor) -> Tensor:
    """``[out, in/2]`` bytes -> ``[out, in]``: the low nibble is the even column."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return torch.where(codes >= 8, -magnitudes[codes & 7], magnitudes[codes & 7])


def _decode_e4m3(byte: int) -> float:
    """Sign, four exponent bits biased by 7, three of mantissa; no infinities, all ones is NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_E4M3 = torch.tensor([_decode_e4m3(byte) for byte in range(256)], dtype=torch.float64)
