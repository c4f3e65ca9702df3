"""RMS norm against golden rows and its definition in F64."""

from __future__ import annotations

import torch

from octavo import kernels
from tests.kernels.calls import same_bits
from tests.kernels.cases import EPSILON
from tests.kernels.goldens import tensors

GOLDEN = tensors("kernels")


def test_golden_rows() -> None:
    """A row of zeros among them."""
    assert (GOLDEN["rmsnorm.x"] == 0).all(1).any()
    assert same_bits(kernels.rms_norm(GOLDEN["rmsnorm.x"], GOLDEN["rmsnorm.weight"], EPSILON), GOLDEN["rmsnorm.y"])


def test_f32_rows_are_not_rounded() -> None:
    """Tolerance 1e-6: a mean of 128 squares, one root and two products in F32, each within 2^-24."""
    x, weight = GOLDEN["rmsnorm.x"].float() * 1.001, GOLDEN["rmsnorm.weight"]
    exact = weight.double() * x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPSILON)
    result = kernels.rms_norm(x, weight, EPSILON)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=0)


def test_epsilon_is_added_to_the_mean_square() -> None:
    """Mean square 4, epsilon 5: the row is divided by 3."""
    x = torch.full((1, 32), 2.0)
    weight = torch.full((32,), 6.0, dtype=torch.bfloat16)
    assert kernels.rms_norm(x, weight, 5.0).unique().tolist() == [4.0]
    assert kernels.rms_norm(-x.bfloat16(), weight, 5.0).unique().tolist() == [-4.0]
