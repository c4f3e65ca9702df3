"""Mixing coefficients of the residual streams, from one F32 product over all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.mhc import mhc_mix, split_mixes
from octavo.kernels.numerics import mean_of_squares


@mhc_mix.implement("torch", compilable=True)
def _mhc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    flat = streams.flatten(1).float()
    mixes = torch.mm(flat, fn.t()) * torch.rsqrt(mean_of_squares(flat) + norm_epsilon)
    return split_mixes(mixes, scale, base, streams.shape[1], iterations, epsilon)
