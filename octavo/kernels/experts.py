"""Mixture of experts: router, routed experts, shared expert, and their sum (spec/model.md 3.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.numerics import blocked_matmul, exact_matmul, largest, silu, softplus, sum_in_order
from octavo.kernels.operator import CARRIED, DeadRows, Gives, Need, Returns, operator
from octavo.kernels.quantise import dequantise_f4_rows, dequantise_tiles, round_q8

_GROUP_WEIGHTS = 1 << 20
"""Weights of one matrix that are dequantised at once: small experts share calls, and no bit depends on it."""


@operator(
    arguments={
        "x": Need.EVERY,
        "live": Need.EVERY,
        "image": Need.EVERY,
        "gate": Need.ANY,
        "bias": Need.ANY,
        "bias_vl": Need.ANY,
        "w1": Need.ANY,
        "s1": Need.ANY,
        "w2": Need.ANY,
        "s2": Need.ANY,
        "w3": Need.ANY,
        "s3": Need.ANY,
    },
    results=(Returns(Gives.PARTIAL, DeadRows.ZERO),),
    source="spec/model.md 3.10",
)
def experts(
    x: Tensor,
    live: Tensor,
    image: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    w1: Tensor,
    s1: Tensor,
    w2: Tensor,
    s2: Tensor,
    w3: Tensor,
    s3: Tensor,
    first_expert: int,
    top_k: int,
    route_scale: float,
    limit: float,
) -> Tensor:
    """Route every row over all E experts and sum the outputs of the resident ones: [R, D] F64, a partial sum.

    x [R, D] BF16 or F32, live and image [R] bool; gate [E, D] BF16, used as F32; bias and bias_vl [E] F32 (bias_vl
    serves image rows, None without vision). Resident are experts first_expert .. first_expert + n - 1, packed F4: w1
    and w3 [n, I, D/2], w2 [n, D, I/2] uint8 with scales s1, s3 [n, I, D/32], s2 [n, D, I/32] uint8. A routed output is
    rounded to x's dtype; the sum over experts and ranks is F64. Every expert sees every row (static shapes); experts
    are dequantised in small groups, at true shapes one at a time.
    """
    chosen, weights = route(x, live, image, gate, bias, bias_vl, top_k, route_scale)
    rounded = round_q8(x)
    total = x.new_zeros(x.shape, dtype=torch.float64)
    group = max(1, _GROUP_WEIGHTS // (w1.shape[1] * x.shape[1]))
    for low in range(0, w1.shape[0], group):
        part = slice(low, low + group)
        numbers = torch.arange(first_expert, first_expert + w1.shape[0], device=x.device)[part]
        mine = chosen == numbers[:, None, None]
        weight = sum_in_order(list(torch.where(mine, weights, 0.0).unbind(2)))
        outputs = _expert(
            rounded,
            dequantise_f4_rows(w1[part], s1[part]),
            dequantise_f4_rows(w2[part], s2[part]),
            dequantise_f4_rows(w3[part], s3[part]),
            limit,
            weight,
        )
        total += torch.where(mine.any(2, keepdim=True), outputs.double(), 0.0).sum(0)
    return total


@experts.fake
def _experts(
    x: Tensor,
    live: Tensor,
    image: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    w1: Tensor,
    s1: Tensor,
    w2: Tensor,
    s2: Tensor,
    w3: Tensor,
    s3: Tensor,
    first_expert: int,
    top_k: int,
    route_scale: float,
    limit: float,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float64)


@operator(
    arguments={
        "x": Need.ROWS,
        "w1": Need.ANY,
        "s1": Need.ANY,
        "w2": Need.ANY,
        "s2": Need.ANY,
        "w3": Need.ANY,
        "s3": Need.ANY,
        "both_bf16": Need.ANY,
        "w2_bf16": Need.ANY,
    },
    results=(CARRIED,),
    source="spec/model.md 3.10",
)
def shared_expert(
    x: Tensor,
    w1: Tensor,
    s1: Tensor,
    w2: Tensor,
    s2: Tensor,
    w3: Tensor,
    s3: Tensor,
    limit: float,
    both_bf16: Tensor | None = None,
    w2_bf16: Tensor | None = None,
) -> Tensor:
    """The expert that every row passes, weight 1, F8: x [R, D] -> [R, D] in x's dtype.

    w1 and w3 [I, D], w2 [D, I] E4M3 with tile scales uint8. ``both_bf16`` [2 I, D] are the scaled w1 and, below, w3;
    ``w2_bf16`` the scaled w2.
    """
    return _expert(
        round_q8(x), dequantise_tiles(w1, s1), dequantise_tiles(w2, s2), dequantise_tiles(w3, s3), limit, None
    )


@shared_expert.fake
def _shared_expert(
    x: Tensor,
    w1: Tensor,
    s1: Tensor,
    w2: Tensor,
    s2: Tensor,
    w3: Tensor,
    s3: Tensor,
    limit: float,
    both_bf16: Tensor | None = None,
    w2_bf16: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    arguments={"reduced": Need.ROWS, "shared": Need.ROWS},
    results=(CARRIED,),
    source="spec/model.md 3.10",
    compilable=True,
)
def combine(reduced: Tensor, shared: Tensor) -> Tensor:
    """Routed sum [R, D] plus the shared expert's [R, D], one cast to the latter's dtype.

    ``reduced`` is summed over ranks, F64 or F32 as the backend of ``experts`` gives it.
    """
    return (reduced + shared).float().to(shared.dtype).contiguous()


@combine.fake
def _combine(reduced: Tensor, shared: Tensor) -> Tensor:
    return shared.new_empty(shared.shape)


def route(
    x: Tensor,
    live: Tensor,
    image: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    top_k: int,
    route_scale: float,
) -> tuple[Tensor, Tensor]:
    """Experts of each row and their weights, see :func:`choose_experts`. Arguments as in :func:`experts`."""
    return choose_experts(blocked_matmul(x.float(), gate.float()), live, image, bias, bias_vl, top_k, route_scale)


def choose_experts(
    logits: Tensor,
    live: Tensor,
    image: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    top_k: int,
    route_scale: float,
) -> tuple[Tensor, Tensor]:
    """Experts of each row [R, top_k] int64 (-1 on dead rows) and their weights [R, top_k] F32, best score first.

    logits [R, E] F32 are the products with the gate. Scores are sqrt(softplus(logits)); the bias takes part in the
    choice alone. The other arguments as in :func:`experts`.
    """
    scores = torch.sqrt(softplus(logits))
    offset = bias if bias_vl is None else torch.where(image.unsqueeze(1), bias_vl, bias)
    chosen = largest(scores + offset, top_k)
    weights = scores.gather(1, chosen)
    total = sum_in_order(list(weights.unbind(1))) + 1e-20
    weights = weights / total.unsqueeze(1) * route_scale
    return torch.where(live.unsqueeze(1), chosen, -1), torch.where(live.unsqueeze(1), weights, 0.0)


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) x up in F32, the gate clamped above and the other half on both sides."""
    return silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)


def _expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """Experts on quantised rows: w2 (weight x silu(w1 x) x w3 x), clamped; ``weight`` [..., R] goes in before w2.

    x [R, D]; matrices [..., out, in] F32 -> [..., R, D].
    """
    hidden = gated(exact_matmul(x, w1).to(x.dtype), exact_matmul(x, w3).to(x.dtype), limit)
    if weight is not None:
        hidden = weight.unsqueeze(-1) * hidden
    return exact_matmul(round_q8(hidden.to(x.dtype)), w2).to(x.dtype)
