"""Quantised formats of the checkpoint and of the caches (spec/model.md 2 and 3.0).

Three activation formats, each a group of channels with one scale:

========  =====  ========================  ==================  ==============================
name      group  scale                     codes               used for
========  =====  ========================  ==================  ==============================
``q8``    32     power of two (E8M0)       E4M3                linear inputs, window latents
``q4mx``  32     power of two (E8M0)       E2M1                index queries and keys
``q4nv``  16     E4M3                      E2M1                compressed entries
========  =====  ========================  ==================  ==============================

Weights: F8 tiles of 32 x 32 and F4 rows of 32, both with E8M0 scales; Engram table rows in F8 with 32-column scales.
Scales and F4 codes travel as uint8, since few operations accept their own dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_Q8 = 32
GROUP_Q4MX = 32
GROUP_Q4NV = 16
TILE = 32
E4M3_MAX = 448.0
E2M1_MAX = 6.0


def e8m0_to_float(scale: Tensor) -> Tensor:
    """Scale bytes -> 2^(byte - 127), F32, NaN for 255.

    The byte is the exponent of an F32; 2^-127 has none, it is half the smallest normal number. Compilers know integers
    better than the type ``float8_e8m0fnu``.
    """
    exponent = scale.int() << 23
    return (exponent | ((scale == 0).int() << 22) | (scale == 255)).view(torch.float32)


def quantise_q8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., C] with C a multiple of 32 -> codes [..., C] E4M3 and scale bytes [..., C/32] uint8."""
    groups = _groups(x.float(), GROUP_Q8)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    exponent = _exponent_above(amax * (1.0 / E4M3_MAX))
    codes = (groups * _reciprocal(exponent)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (exponent >> 23).to(torch.uint8).squeeze(-1)


def dequantise_q8(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of :func:`quantise_q8`, F32, exact."""
    return (_groups(codes.float(), GROUP_Q8) * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def quantise_q4mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., C] with C a multiple of 32 -> E2M1 codes [..., C] uint8 (one a byte) and scale bytes [..., C/32] uint8."""
    groups = _groups(x.float(), GROUP_Q4MX)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    exponent = _exponent_above(amax * (1.0 / E2M1_MAX))
    codes = _e2m1_codes(groups * _reciprocal(exponent))
    return codes.flatten(-2), (exponent >> 23).to(torch.uint8).squeeze(-1)


def dequantise_q4mx(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of :func:`quantise_q4mx`, F32, exact."""
    return (_groups(e2m1_to_float(codes), GROUP_Q4MX) * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def quantise_q4nv(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., C] with C a multiple of 16 -> E2M1 codes [..., C] uint8 (one a byte) and scales [..., C/16] E4M3."""
    groups = _groups(x.float(), GROUP_Q4NV)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    return _e2m1_codes(groups / scale.float()).flatten(-2), scale.squeeze(-1)


def dequantise_q4nv(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of :func:`quantise_q4nv`, F32, exact."""
    return (_groups(e2m1_to_float(codes), GROUP_Q4NV) * scale.float().unsqueeze(-1)).flatten(-2)


def round_q8(x: Tensor) -> Tensor:
    """Through Q8 and back in ``x``'s dtype; F32 (mode ``plain``) stays as it is."""
    return x if x.dtype == torch.float32 else dequantise_q8(*quantise_q8(x)).to(x.dtype)


def round_q4mx(x: Tensor) -> Tensor:
    """Through Q4mx and back in ``x``'s dtype; F32 (mode ``plain``) stays as it is."""
    return x if x.dtype == torch.float32 else dequantise_q4mx(*quantise_q4mx(x)).to(x.dtype)


def round_q4nv(x: Tensor) -> Tensor:
    """Through Q4nv and back in ``x``'s dtype; F32 (mode ``plain``) stays as it is."""
    return x if x.dtype == torch.float32 else dequantise_q4nv(*quantise_q4nv(x)).to(x.dtype)


def pack_codes(codes: Tensor) -> Tensor:
    """[..., C] one code a byte -> [..., C/2] uint8, the even channel in the low nibble."""
    pairs = _groups(codes, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """[..., C/2] uint8 -> [..., C] uint8, inverse of :func:`pack_codes`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1_to_float(codes: Tensor) -> Tensor:
    """E2M1 codes (one a byte) -> F32 values: 0, 0.5, 1, 1.5, 2, 3, 4, 6 by the low three bits, bit 3 is the sign.

    Sign, exponent and mantissa stand in the places that they have in F16, whose exponent is biased by 15, not by 1. A
    table would have to come from the host.
    """
    placed = ((codes & 7) | ((codes & 8) << 3)).to(torch.int16) << 9
    return placed.view(torch.float16).float() * 2.0**14


def dequantise_tiles(weight: Tensor, scale: Tensor) -> Tensor:
    """F8 weight [out, in] E4M3 with tile scales [ceil(out/32), ceil(in/32)] uint8 -> [out, in] F32, exact."""
    scales = e8m0_to_float(scale).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return weight.float() * scales[: weight.shape[0], : weight.shape[1]]


def dequantise_f4_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """F4 weights [..., out, in/2] packed with scales [..., out, in/32] uint8 -> [..., out, in] F32, exact."""
    return dequantise_q4mx(unpack_codes(weight), scale)


def _groups(x: Tensor, size: int) -> Tensor:
    """[..., C] -> [..., C / size, size]."""
    return torch.unflatten(x, -1, (-1, size))


def _exponent_above(t: Tensor) -> Tensor:
    """Bits of 2^ceil(log2 t) of a positive normal F32, int32: no logarithm rounds this one."""
    return (t.view(torch.int32) + 0x7FFFFF) & 0x7F800000


def _reciprocal(exponent: Tensor) -> Tensor:
    """2^-e from the bits of 2^e, F32; 0 from those of infinity.

    Its product is the exact quotient, while compilers may divide approximately.
    """
    return (0x7F000000 - exponent).clamp_min(0).view(torch.float32)


def _e2m1_codes(x: Tensor) -> Tensor:
    """Round to E2M1, ties to the even code, saturating; the sign in bit 3."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for threshold, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= threshold) if inclusive else (a > threshold)
    return code | (torch.signbit(x).to(torch.uint8) << 3)
