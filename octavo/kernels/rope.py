"""Rotary embedding of the last channels, its two frequency tables, and the latents made with it (spec/model.md 3.4).

Adjacent channels (2i, 2i + 1) form a complex number that is turned by position x frequency_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.kernels.norm import rms
from octavo.kernels.operator import CARRIED, Need, operator
from octavo.kernels.quantise import round_q4mx, round_q8


def plain_frequencies(rope_dim: int, theta: float) -> Tensor:
    """theta^(-2i / rope_dim), [rope_dim / 2] F32: layers that read the window alone."""
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))


def yarn_frequencies(
    rope_dim: int, theta: float, factor: float, beta_fast: float, beta_slow: float, original_positions: int
) -> Tensor:
    """YaRN-stretched frequencies, [rope_dim / 2] F32: layers that read compressed entries.

    Channels that turn more than ``beta_fast`` times within the original context keep their frequency, those under
    ``beta_slow`` are slowed by ``factor``, a linear ramp lies between. Its ends are clamped to the channels there
    are, which only small configs need (spec/model.md 7).
    """

    def channel_of(turns: float) -> float:
        return rope_dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    last = rope_dim // 2 - 1
    low = min(max(math.floor(channel_of(beta_fast)), 0), last)
    high = min(max(math.ceil(channel_of(beta_slow)), 0), last)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = plain_frequencies(rope_dim, theta)
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def turn(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """Turn the last 2 x len(frequencies) channels of x [R, ..., C] by positions [R]; F32 maths, x's dtype back."""
    angles = positions.float().unsqueeze(-1) * frequencies
    # ``polar`` and ``cos`` round differently; this is the official code's, and the same for every row.
    cosine, sine = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).unbind(-1)
    return turn_by(x, cosine, sine, inverse)


def turn_by(x: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> Tensor:
    """Turn the last 2 n channels of x [R, ..., C] by the angles whose cosine and sine are given, [R, n] F32 each."""
    if inverse:
        sine = -sine
    shape = (x.shape[0], *(1,) * (x.dim() - 2), cosine.shape[1])
    cosine, sine = cosine.view(shape), sine.view(shape)
    kept = x.shape[-1] - 2 * cosine.shape[-1]
    real, imaginary = x[..., kept:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1).flatten(-2)
    return torch.cat((x[..., :kept], turned.to(x.dtype)), dim=-1)


@operator(
    arguments={"x": Need.ROWS, "weight": Need.ANY, "positions": Need.ROWS, "frequencies": Need.ANY},
    results=(CARRIED,),
    source="spec/model.md 3.3",
)
def window_latent(x: Tensor, weight: Tensor, positions: Tensor, frequencies: Tensor, epsilon: float) -> Tensor:
    """The single latent that is key and value of the window: Q8(rope(rms(x))), the rotary part included.

    x [R, head_dim] BF16 or F32, weight [head_dim], positions [R] int32 -> [R, head_dim] in x's dtype.
    """
    return round_q8(turn(rms(x, weight, epsilon), positions, frequencies))


@window_latent.fake
def _window_latent(x: Tensor, weight: Tensor, positions: Tensor, frequencies: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    arguments={"x": Need.ROWS, "positions": Need.ROWS, "frequencies": Need.ANY},
    results=(CARRIED,),
    source="spec/model.md 3.7",
)
def index_query(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Indexer queries: Q4mx(rope(x)). x [R, index_heads, index_head_dim] BF16 or F32 -> the same shape and dtype."""
    return round_q4mx(turn(x, positions, frequencies))


@index_query.fake
def _index_query(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    return x.new_empty(x.shape)
