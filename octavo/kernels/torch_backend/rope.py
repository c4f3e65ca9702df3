"""Rotary embedding by cosine and sine: the reference's ``polar`` is complex, which no compiler takes."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.norm import rms
from octavo.kernels.quantise import round_q4mx, round_q8
from octavo.kernels.rope import index_query, turn_by, window_latent


def turn(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """As ``octavo.kernels.rope.turn``; cosine and sine may differ from its in the last bit."""
    angles = positions.float().unsqueeze(-1) * frequencies
    return turn_by(x, torch.cos(angles), torch.sin(angles), inverse)


@window_latent.implement("torch", compilable=True)
def _window_latent(x: Tensor, weight: Tensor, positions: Tensor, frequencies: Tensor, epsilon: float) -> Tensor:
    return round_q8(turn(rms(x, weight, epsilon), positions, frequencies))


@index_query.implement("torch", compilable=True)
def _index_query(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    return round_q4mx(turn(x, positions, frequencies))
