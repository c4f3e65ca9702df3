"""What training rounds to is what the engine reads."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.quantise import (
    dequantise_f4_rows,
    dequantise_q4mx,
    dequantise_q4nv,
    dequantise_q8,
    dequantise_tiles,
    quantise_q4mx,
    quantise_q4nv,
    quantise_q8,
)
from tools.train_nano.formats import Format, encode_f4_rows, encode_tiles, rounded, straight_through


def values(*shape: int) -> torch.Tensor:
    """Over many magnitudes, zeros included."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, x)


@pytest.mark.parametrize("form", list(Format))
def test_rounded(form: Format) -> None:
    x = values(64, 96)
    official = {
        Format.F32: x,
        Format.BF16: x.bfloat16().float(),
        Format.TILES: dequantise_tiles(*encode_tiles(x)),
        Format.F4_ROWS: dequantise_f4_rows(*encode_f4_rows(x)),
        Format.F8_ROWS: dequantise_q8(*quantise_q8(x)),
        Format.Q8: dequantise_q8(*quantise_q8(x)),
        Format.Q4MX: dequantise_q4mx(*quantise_q4mx(x)),
        Format.Q4NV: dequantise_q4nv(*quantise_q4nv(x)),
    }
    assert torch.equal(rounded(x, form), official[form])
    assert torch.equal(rounded(rounded(x, form), form), rounded(x, form)), "a second trip changes nothing"


def test_tiles_are_close_and_scaled_by_tile() -> None:
    """E4M3 has three bits behind the leading one, and the largest value of a tile uses the upper half of its range."""
    x = values(70, 40)
    codes, scale = encode_tiles(x)
    assert codes.shape == x.shape and scale.shape == (3, 2)
    assert codes[:32, :32].float().abs().max() > 200
    back = dequantise_tiles(codes, scale)
    large = x.abs() > x.abs().amax() / 64
    assert ((back - x).abs() / x.abs())[large].max() <= 1 / 16
    assert not torch.equal(back, x)


def test_gradient_passes() -> None:
    x = values(4, 32).requires_grad_()
    y = straight_through(x, Format.Q8, torch.float32)
    direction = values(4, 32)
    (gradient,) = torch.autograd.grad((y * direction).sum(), x)
    assert torch.equal(gradient, direction) and not torch.equal(y, x)
