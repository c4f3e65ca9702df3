"""Between F32 masters and the stored formats: encode a matrix, and round straight through while training.

The rounding is the engine's own (``octavo.kernels.quantise``); gradients pass as if it were not there. Source:
spec/model.md 2 and 3.0.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.quantise import (
    E4M3_MAX,
    TILE,
    dequantise_q8,
    dequantise_tiles,
    e8m0_to_float,
    pack_codes,
    quantise_q4mx,
    quantise_q4nv,
    quantise_q8,
)

_EXPONENT_BIAS = 127
_SMALLEST_TILE = 1e-6
"""A tile of zeros still needs a scale; weights below this do not matter."""


class Format(enum.Enum):
    """Storage classes of the official layout (spec/model.md 2), and the cache formats of activations."""

    F32 = "F32"
    BF16 = "BF16"
    TILES = "F8 tiles"
    F4_ROWS = "F4 rows"
    F8_ROWS = "F8 rows"
    Q8 = "q8"
    Q4MX = "q4mx"
    Q4NV = "q4nv"


def encode_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] F32 -> E4M3 codes [out, in] and tile scale bytes [ceil(out/32), ceil(in/32)] uint8."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // TILE), -(-inputs // TILE)
    padded = torch.nn.functional.pad(weight, (0, columns * TILE - inputs, 0, rows * TILE - outputs))
    tiles = padded.view(rows, TILE, columns, TILE)
    amax = tiles.abs().amax((1, 3)).clamp_min(_SMALLEST_TILE)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    codes = (tiles / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = codes.view(rows * TILE, columns * TILE)[:outputs, :inputs]
    return codes.contiguous(), (exponent + _EXPONENT_BIAS).to(torch.uint8)


def encode_f4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., out, in] F32 -> packed codes [..., out, in/2] and scale bytes [..., out, in/32], uint8."""
    codes, scale = quantise_q4mx(weight)
    return pack_codes(codes), scale


def rounded(x: Tensor, form: Format) -> Tensor:
    """``x`` as F32 after a trip through ``form``; no gradient."""
    match form:
        case Format.F32:
            return x.float()
        case Format.BF16:
            return x.to(torch.bfloat16).float()
        case Format.TILES:
            return dequantise_tiles(*encode_tiles(x.float()))
        case Format.F4_ROWS | Format.Q4MX:
            codes, scale = quantise_q4mx(x)
            return _scaled(codes, e8m0_to_float(scale))
        case Format.Q8 | Format.F8_ROWS:
            return dequantise_q8(*quantise_q8(x))
        case Format.Q4NV:
            codes, nv_scale = quantise_q4nv(x)
            return _scaled(codes, nv_scale.float())


def _scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """E2M1 codes [..., C] times scales [..., groups], F32: ``dequantise_q4mx`` without a table from the host.

    A magnitude is (2 + last bit) x 2^(exponent - 2) where the exponent is not zero, else half the last bit.
    """
    magnitude = (codes & 7).int()
    exponent = magnitude >> 1
    mantissa = torch.where(exponent > 0, 2 + (magnitude & 1), magnitude & 1).float()
    value = torch.ldexp(mantissa, exponent.clamp_min(1) - 2)
    value = torch.where(codes > 7, -value, value)
    result: Tensor = (value.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return rounded(x, form).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].to(ctx.dtype), None, None


def straight_through(x: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """``x`` rounded through ``form``, in ``dtype``; its gradient is that of the identity."""
    result: Tensor = _StraightThrough.apply(x, form, dtype)  # type: ignore[no-untyped-call]
    return result
