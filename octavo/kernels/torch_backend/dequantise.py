"""Weights in BF16, in few passes over memory.

A dequantised weight is a code of at most four significant bits times a power of two, so BF16 holds it: E2M1 values
wherever F32 does, E4M3 values from scale byte 3 on (below, the smallest codes fall under 2^-133, the last BF16 step).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quantise import GROUP_Q4MX, TILE, e2m1_to_float, e8m0_to_float, unpack_codes


def bf16_tiles(weight: Tensor, scale: Tensor) -> Tensor:
    """F8 weight [out, in] E4M3 with tile scales [ceil(out/32), ceil(in/32)] uint8 -> [out, in] BF16."""
    values = weight.to(torch.bfloat16)
    scales = e8m0_to_float(scale).to(torch.bfloat16)
    outputs, inputs = weight.shape
    if outputs % TILE or inputs % TILE:
        return values * scales.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:outputs, :inputs]
    tiles = values.view(outputs // TILE, TILE, inputs // TILE, TILE)
    return (tiles * scales[:, None, :, None]).view(outputs, inputs)


def in_bf16(weight: Tensor, scale: Tensor, weight_bf16: Tensor | None) -> Tensor:
    """The weight in BF16 that was given, or else :func:`bf16_tiles`."""
    return bf16_tiles(weight, scale) if weight_bf16 is None else weight_bf16


def bf16_rows(packed: Tensor, scale: Tensor) -> Tensor:
    """F4 weights [..., out, in/2] packed with scales [..., out, in/32] uint8 -> [..., out, in] BF16.

    Each byte looks up its two values, which are one 32-bit word of a table: the largest temporary is as large as the
    result.
    """
    every_byte = torch.arange(256, device=packed.device).to(torch.uint8).unsqueeze(1)
    pairs = e2m1_to_float(unpack_codes(every_byte)).to(torch.bfloat16).view(torch.int32).squeeze(1)
    values = pairs.index_select(0, packed.flatten().int()).view(torch.bfloat16)
    groups = values.view(*scale.shape, GROUP_Q4MX)
    groups.mul_(e8m0_to_float(scale).to(torch.bfloat16).unsqueeze(-1))
    return groups.flatten(-2)
