"""Mixture of experts with weights read packed: F4 to BF16 in registers, products on tensor cores, F32 sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels.experts import experts
from octavo.kernels.operator import ModelWidths
from octavo.kernels.quantise import GROUP_Q4MX
from octavo.kernels.torch_backend.f32_product import f32_product
from octavo.kernels.triton_backend.device import is_hopper
from octavo.kernels.triton_backend.expert_few import multiply_down_and_sum, multiply_gate_and_up_few
from octavo.kernels.triton_backend.expert_launches import COLUMNS, padded_width, programs, scale_words, words
from octavo.kernels.triton_backend.expert_narrow import multiply_down_narrow, multiply_gate_and_up_narrow
from octavo.kernels.triton_backend.expert_products import LARGEST_SCALE, down, gate_and_up, sum_pairs
from octavo.kernels.triton_backend.expert_routing import BLOCK, place_pairs, round_rows, route, score_rows
from octavo.kernels.triton_backend.expert_tiles import (
    MOST_SCORED,
    FewRows,
    Narrow,
    Tile,
    Wide,
    choose_few,
    choose_tiles,
)
from octavo.kernels.triton_backend.expert_wide import (
    multiply_down_wide,
    multiply_gate_and_up_wide,
    round_pairs_in_order,
)
from octavo.kernels.triton_backend.expert_wide_kernel import MORE

_ROUTED_ROWS = 4
"""Of a program; one alone where the router's product comes in parts that it must add first."""
_SCORED_ROWS = 16
_SCORED_EXPERTS = 64
_SCORED_CHANNELS = 256
"""Of a program: all multiprocessors read a part of the router's weights."""
_MOST_PAIRS_AT_ONCE = 8192


def _refuses(widths: ModelWidths) -> str | None:
    for name, width in (
        ("hidden_size", widths.hidden_size),
        ("moe_intermediate_size", widths.moe_intermediate_size),
    ):
        if width % GROUP_Q4MX:
            return f"{name} {width}: allowed are multiples of {GROUP_Q4MX}, the weights of one scale"
    return None


def _refuses_weights(weights: Mapping[str, Tensor]) -> str | None:
    """Scales that would give infinities (``expert_products``). Waits for the device once."""
    scales = {name: scale for name, scale in weights.items() if ".ffn.experts." in name and name.endswith(".scale")}
    largest = torch.stack([scale.max() for scale in scales.values()]).tolist() if scales else []
    for name, byte in zip(scales, largest, strict=True):
        if byte > LARGEST_SCALE:
            return f"{name} has the scale byte {byte}: allowed are bytes up to {LARGEST_SCALE}, which are 2^65"
    return None


@experts.implement(
    "triton",
    devices=frozenset({"cuda"}),
    dtype=torch.float32,
    refuses=_refuses,
    refuses_weights=_refuses_weights,
)
def experts_triton(
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
    """As the reference on BF16 rows, but the sum over experts is F32: [R, D] F32, a partial sum.

    The router's product has F32 sums, as the backend ``torch``'s has; of many rows it is the same. Pairs of row and
    resident expert are put in order on the device unless they are few; weights of experts that nobody chose are not
    read. Scales and inputs that the products can bear: ``expert_products``.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"experts, backend triton: rows are {x.dtype}; allowed: torch.bfloat16. Use numerics reference."
        )
    if x.shape[0] == 0:
        return x.float()
    x = x.contiguous()
    rows, resident = x.shape[0], w1.shape[0]
    way = choose_few(rows) or choose_tiles(rows, top_k, gate.shape[0], (x.shape[1], w1.shape[1]), is_hopper(x.device))
    if isinstance(way, Wide):
        counts = torch.zeros(resident, dtype=torch.int32, device=x.device)
        logits = f32_product(x, gate)
    elif rows <= MOST_SCORED:
        rounded, logits, counts = round_and_score(x, gate, resident)
    else:
        rounded, counts = round_inputs(x, resident)
        logits = f32_product(x, gate)
    routing = live, image, bias, bias_vl, counts, first_expert, top_k, route_scale
    chosen, weights = choose(logits, *routing, count=not isinstance(way, FewRows))
    if isinstance(way, FewRows):
        hidden = multiply_gate_and_up_few(way, rounded, chosen, weights, w1, s1, w3, s3, limit)
        return multiply_down_and_sum(way, hidden, chosen, w2, s2)
    work = place(chosen, counts, way)
    if isinstance(way, Wide):
        rounded = round_pairs_in_order(x, work.order, work.totals)
    hidden = multiply_gate_and_up(rounded, weights, work, w1, s1, w3, s3, limit)
    del rounded  # in order of the pairs it is as large as their results, which may lie there
    return sum_results(chosen, multiply_down(hidden, work, w2, s2))


@dataclass(frozen=True, slots=True)
class Work:
    """The pairs of a step in the order of their experts, and how they are cut."""

    tile: Narrow | Wide | Tile
    order: Tensor
    """Numbers of pairs, those of the first resident expert first: [P] int32; nothing beyond the resident ones."""
    tiles: Tensor
    """[n, 3] int32: expert, first place in ``order``, place after the last."""
    totals: Tensor
    """[2] int32: how many tiles and how many pairs there are."""


def round_inputs(x: Tensor, resident: int) -> tuple[Tensor, Tensor]:
    """x [R, D] BF16 -> rounded [R, D up to 128] BF16 in fragment order, zeros [resident] int32."""
    rows, channels = x.shape
    padded = padded_width(channels)
    rounded = x.new_empty(rows, padded)
    counts = torch.empty(resident, dtype=torch.int32, device=x.device)
    round_rows[(rows, triton.cdiv(padded, COLUMNS))](
        x,
        rounded,
        counts,
        channels,
        padded,
        resident,
        COLUMNS=COLUMNS,
        RESIDENT=triton.next_power_of_2(resident),
    )
    return rounded, counts


def round_and_score(x: Tensor, gate: Tensor, resident: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`round_inputs`, and between its two results the router's product in parts: [S, R, E] F32.

    gate [E, D] BF16. For few rows alone: each part is written and read again.
    """
    rows, channels = x.shape
    experts_in_all = gate.shape[0]
    padded = padded_width(channels)
    splits = triton.cdiv(channels, _SCORED_CHANNELS)
    rounded = x.new_empty(rows, padded)
    parts = torch.empty(splits, rows, experts_in_all, dtype=torch.float32, device=x.device)
    counts = torch.empty(resident, dtype=torch.int32, device=x.device)
    score_rows[(triton.cdiv(experts_in_all, _SCORED_EXPERTS) + 1, splits, triton.cdiv(rows, _SCORED_ROWS))](
        x,
        gate.contiguous(),
        rounded,
        parts,
        counts,
        rows,
        channels,
        padded,
        experts_in_all,
        resident,
        ROWS=_SCORED_ROWS,
        EXPERTS=_SCORED_EXPERTS,
        CHANNELS=_SCORED_CHANNELS,
        RESIDENT=triton.next_power_of_2(resident),
    )
    return rounded, parts, counts


def choose(
    logits: Tensor,
    live: Tensor,
    image: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    counts: Tensor,
    first_expert: int,
    top_k: int,
    route_scale: float,
    count: bool = True,
) -> tuple[Tensor, Tensor]:
    """Local numbers of the experts of each row [R, top_k] int32, -1 if they are not here, and their weights F32.

    logits [R, E] F32, or [S, R, E] in parts that add up to them; counts [n] int32, to which ``count`` adds the pairs of
    each resident expert.
    """
    parts = logits if logits.dim() == 3 else logits.unsqueeze(0)
    splits, rows, experts_in_all = parts.shape
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=parts.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=parts.device)
    at_once = _ROUTED_ROWS if splits == 1 else 1
    route[(triton.cdiv(rows, at_once),)](
        parts,
        live.contiguous().view(torch.uint8),
        image.contiguous().view(torch.uint8),
        bias,
        bias if bias_vl is None else bias_vl,
        counts,
        chosen,
        weights,
        rows,
        experts_in_all,
        counts.shape[0],
        first_expert,
        route_scale,
        top_k=top_k,
        vision=bias_vl is not None,
        ROWS=at_once,
        EXPERTS=triton.next_power_of_2(experts_in_all),
        CHOICES=triton.next_power_of_2(top_k),
        PARTS=splits,
        COUNT=count,
        enable_reflect_ftz=False,  # torch's logarithm of small numbers keeps their bits
        launch_pdl=True,
    )
    return chosen, weights


def place(chosen: Tensor, counts: Tensor, tile: Narrow | Wide | Tile) -> Work:
    """The order of the pairs of ``chosen`` [R, top_k] int32, cut into tiles; counts [n] int32: pairs of each expert."""
    pairs, resident = chosen.numel(), counts.shape[0]
    order = torch.empty_like(chosen).view(-1)
    tiles = chosen.new_empty(min(pairs, pairs // tile.rows + resident), 3)
    totals = chosen.new_empty(2)
    place_pairs[(resident,)](
        chosen,
        counts,
        order,
        tiles,
        totals,
        pairs,
        resident,
        ROWS=tile.rows,
        MORE=MORE.value if isinstance(tile, Wide) else 0,
        CHUNK=min(_MOST_PAIRS_AT_ONCE, triton.next_power_of_2(pairs)),
        RESIDENT=triton.next_power_of_2(resident),
        num_warps=8,
    )
    return Work(tile, order, tiles, totals)


def multiply_gate_and_up(
    rounded: Tensor, weights: Tensor, work: Work, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, limit: float
) -> Tensor:
    """Hidden rows of the pairs, rounded and weighted: [P, I up to 128] BF16, a row for each place of the order.

    rounded as :func:`round_inputs` gives it, of wide tiles as ``expert_wide.round_pairs_in_order`` does; weights
    [R, top_k] F32; matrices [n, I, D/2] packed, scales [n, I, D/32].
    """
    given = work.tiles, work.totals, rounded, weights, work.order, w1, s1, w3, s3, limit
    if isinstance(work.tile, Narrow):
        return multiply_gate_and_up_narrow(work.tile, *given)
    if isinstance(work.tile, Wide):
        return multiply_gate_and_up_wide(work.tile, *given)
    inner, channels = w1.shape[1], 2 * w1.shape[2]
    padded = padded_width(inner)
    hidden = rounded.new_empty(work.order.shape[0], padded)
    launch = work.tile.gate_and_up
    gate_and_up[programs(launch.programs, work.tiles.shape[0] * (padded // BLOCK.value), hidden.device)](
        rounded,
        words(w1),
        scale_words(s1),
        words(w3),
        scale_words(s3),
        work.order,
        weights,
        work.tiles,
        work.totals,
        hidden,
        limit,
        top_k=weights.shape[1],
        inputs=channels,
        outputs=inner,
        ROWS=work.tile.rows,
        BLOCKS=launch.blocks,
        WARPS=launch.warps,
        STAGES=launch.stages,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    return hidden


def multiply_down(hidden: Tensor, work: Work, w2: Tensor, s2: Tensor) -> Tensor:
    """What the experts give for the pairs: [P, D] BF16 by number of pair; nothing for those that are not resident.

    hidden as :func:`multiply_gate_and_up` gives it; w2 [n, D, I/2] packed, scales [n, D, I/32].
    """
    given = work.tiles, work.totals, hidden, work.order, w2, s2
    if isinstance(work.tile, Narrow):
        return multiply_down_narrow(work.tile, *given)
    if isinstance(work.tile, Wide):
        return multiply_down_wide(work.tile, *given)
    channels, inner = w2.shape[1], 2 * w2.shape[2]
    results = hidden.new_empty(hidden.shape[0], channels)
    launch = work.tile.down
    tasks = work.tiles.shape[0] * triton.cdiv(channels, work.tile.outputs)
    down[programs(launch.programs, tasks, hidden.device)](
        hidden,
        words(w2),
        scale_words(s2),
        work.order,
        work.tiles,
        work.totals,
        results,
        inputs=inner,
        outputs=channels,
        ROWS=work.tile.rows,
        OUTPUTS=work.tile.outputs,
        BLOCKS=launch.blocks,
        WARPS=launch.warps,
        STAGES=launch.stages,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    return results


def sum_results(chosen: Tensor, results: Tensor) -> Tensor:
    """The results [P, D] of the pairs that are resident (chosen [R, top_k] >= 0), added in their order: [R, D] F32."""
    (rows, top_k), channels = chosen.shape, results.shape[1]
    total = torch.empty(rows, channels, dtype=torch.float32, device=results.device)
    sum_pairs[(rows, triton.cdiv(channels, COLUMNS))](
        chosen, results, total, channels, top_k=top_k, COLUMNS=COLUMNS, launch_pdl=True
    )
    return total
