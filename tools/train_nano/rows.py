"""Differentiable counterparts of the operators that act on each row alone: products, norms, streams, experts, Engram.

Each takes the arguments of the operator of the same name, with F32 masters in place of stored weights, and a
:class:`Numerics` that says how much is rounded. Shapes as there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_nano.formats import Format, straight_through
from tools.train_nano.functions import collapse, gate, rms, turn


@dataclass
class Numerics:
    """What is rounded, and the weights of this step after rounding."""

    dtype: torch.dtype
    """Of activations and of most products: BF16, or F32 to compare with mode ``plain``."""
    weights: bool
    """Round weights to their stored formats."""
    activations: bool
    """Round activations where the specification does: linear inputs, latents, entries, index queries and keys."""
    _prepared: dict[int, Tensor] = field(default_factory=dict)
    _angles: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """Cosine, sine and the positions they belong to, which are kept so that their ``id`` is theirs alone."""

    def weight(self, master: Tensor, form: Format, dtype: torch.dtype | None = None) -> Tensor:
        """The master as this step multiplies it; made once a step."""
        key = id(master)
        if key not in self._prepared:
            dtype = self.dtype if dtype is None else dtype
            self._prepared[key] = straight_through(master, form if self.weights else Format.F32, dtype)
        return self._prepared[key]

    def activation(self, x: Tensor, form: Format) -> Tensor:
        return straight_through(x, form, x.dtype) if self.activations else x

    def angles(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions [...] times frequencies [c]: [..., c] F32."""
        key = id(positions), id(frequencies)
        if key not in self._angles:
            angles = positions.float().unsqueeze(-1) * frequencies
            self._angles[key] = angles.cos(), angles.sin(), positions
        return self._angles[key][:2]

    def forget(self) -> None:
        """Masters have changed."""
        self._prepared.clear()
        self._angles.clear()


def linear_f8(numerics: Numerics, x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(numerics.activation(x, Format.Q8), numerics.weight(weight, Format.TILES))


def linear(numerics: Numerics, x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, numerics.weight(weight, Format.BF16))


def linear_f32(numerics: Numerics, x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.float(), numerics.weight(weight, Format.BF16, torch.float32))


def grouped_linear(numerics: Numerics, x: Tensor, weight: Tensor, groups: int) -> Tensor:
    grouped = x.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
    matrices = numerics.weight(weight, Format.TILES).unflatten(0, (groups, -1))
    return torch.bmm(grouped, matrices.transpose(1, 2)).transpose(0, 1).flatten(1)


def rms_norm(numerics: Numerics, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms(x, numerics.weight(weight, Format.BF16), epsilon)


def window_latent(
    numerics: Numerics, x: Tensor, weight: Tensor, positions: Tensor, frequencies: Tensor, epsilon: float
) -> Tensor:
    normed = rms_norm(numerics, x, weight, epsilon)
    turned = turn(normed, *numerics.angles(positions, frequencies), False)
    return numerics.activation(turned, Format.Q8)


def index_query(numerics: Numerics, x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    turned = turn(x, *numerics.angles(positions, frequencies), False)
    return numerics.activation(turned, Format.Q4MX)


def shared_expert(numerics: Numerics, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    x = numerics.activation(x, Format.Q8)
    gate = functional.linear(x, numerics.weight(w1, Format.TILES)).clamp_max(limit)
    up = functional.linear(x, numerics.weight(w3, Format.TILES)).clamp(-limit, limit)
    hidden = numerics.activation(functional.silu(gate) * up, Format.Q8)
    return functional.linear(hidden, numerics.weight(w2, Format.TILES))


def routed_experts(
    numerics: Numerics,
    x: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    limit: float,
) -> Tensor:
    """Sum over experts of weighted outputs: x [R, D], weights [R, E] (zero where not chosen) -> [R, D].

    Every expert computes every row: with few small experts two dense products are faster than sorting rows.
    """
    count, inner, _ = w1.shape
    x = numerics.activation(x, Format.Q8)
    gate = functional.linear(x, numerics.weight(w1, Format.F4_ROWS).flatten(0, 1)).clamp_max(limit)
    up = functional.linear(x, numerics.weight(w3, Format.F4_ROWS).flatten(0, 1)).clamp(-limit, limit)
    hidden = (functional.silu(gate) * up).unflatten(1, (count, inner)) * weights.to(x.dtype).unsqueeze(2)
    hidden = numerics.activation(hidden.flatten(1), Format.Q8)
    down = numerics.weight(w2, Format.F4_ROWS).transpose(0, 1).flatten(1)
    return functional.linear(hidden, down)


def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, route_scale: float) -> Tensor:
    """Weights [R, E] F32, zero where an expert is not chosen; all rows are live."""
    scores = torch.sqrt(functional.softplus(functional.linear(x.float(), gate)))
    chosen = (scores.detach() + bias).topk(top_k, dim=1).indices
    kept = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
    return kept / (kept.sum(1, keepdim=True) + 1e-20) * route_scale


def engram_gate(
    numerics: Numerics,
    streams: Tensor,
    projected: Tensor,
    image: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    epsilon: float,
) -> Tensor:
    both = numerics.weight(q_weight, Format.BF16) * numerics.weight(k_weight, Format.BF16)
    return gate(streams, projected, both, epsilon)


def mhc_collapse(numerics: Numerics, streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return collapse(streams, pre, numerics.weight(weight, Format.BF16), epsilon)
