"""RMS norm (spec/model.md 3.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.numerics import mean_of_squares
from octavo.kernels.operator import CARRIED, Need, operator


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """w x / sqrt(mean(x^2) + epsilon) over the last axis, in F32, rounded once to x's dtype."""
    normed = x.float() * torch.rsqrt(mean_of_squares(x) + epsilon)
    return (weight.float() * normed).to(x.dtype).contiguous()


@operator(
    arguments={"x": Need.ROWS, "weight": Need.ANY}, results=(CARRIED,), source="spec/model.md 3.0", compilable=True
)
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of every row: x [R, C] BF16 or F32, weight [C] -> [R, C] in x's dtype."""
    return rms(x, weight, epsilon)


@rms_norm.fake
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)
