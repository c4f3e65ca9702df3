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
from octavo.kernels.triton_backend.device import multiprocessors
from octavo.kernels.triton_backend.expert_products import LARGEST_SCALE, down, gate_and_up, sum_pairs
from octavo.kernels.triton_backend.expert_routing import BLOCK, place_pairs, round_rows, route
from octavo.kernels.triton_backend.expert_tiles import Tile, choose_tiles

_BLOCK = BLOCK.value
"""Channels that fragment order permutes; inputs of products are padded to a multiple."""
_COLUMNS = 1024
_ROUTED_ROWS = 4
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

    The router's product is the backend ``torch``'s, so both choose the same experts. Pairs of row and resident expert
    are put in order on the device; weights of experts that nobody chose are not read. Scales and inputs that the
    products can bear: ``expert_products``.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"experts, backend triton: rows are {x.dtype}; allowed: torch.bfloat16. Use numerics reference."
        )
    if x.shape[0] == 0:
        return x.float()
    x = x.contiguous()
    rounded, counts = round_inputs(x, w1.shape[0])
    logits = f32_product(x, gate)
    chosen, weights = choose(logits, live, image, bias, bias_vl, counts, first_expert, top_k, route_scale)
    work = place(chosen, counts, *choose_tiles(x.shape[0], top_k, gate.shape[0]))
    hidden = multiply_gate_and_up(rounded, weights, work, w1, s1, w3, s3, limit)
    return sum_results(chosen, multiply_down(hidden, work, w2, s2))


@dataclass(frozen=True, slots=True)
class Work:
    """The pairs of a step in the order of their experts, and how they are cut."""

    order: Tensor
    """Numbers of pairs, those of the first resident expert first: [P] int32; nothing beyond the resident ones."""
    parts: list[tuple[Tile, Tensor, Tensor]]
    """How a tile runs, table of tiles [n, 3] int32 (expert, first place in ``order``, place after the last), and how
    many there are: [1] int32."""


def round_inputs(x: Tensor, resident: int) -> tuple[Tensor, Tensor]:
    """x [R, D] BF16 -> rounded [R, D up to 128] BF16 in fragment order, zeros [resident] int32."""
    rows, channels = x.shape
    padded = -(-channels // _BLOCK) * _BLOCK
    rounded = x.new_empty(rows, padded)
    counts = torch.empty(resident, dtype=torch.int32, device=x.device)
    round_rows[(rows, triton.cdiv(padded, _COLUMNS))](
        x,
        rounded,
        counts,
        channels,
        padded,
        resident,
        COLUMNS=_COLUMNS,
        RESIDENT=triton.next_power_of_2(resident),
    )
    return rounded, counts


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
) -> tuple[Tensor, Tensor]:
    """Local numbers of the experts of each row [R, top_k] int32, -1 if they are not here, and their weights F32.

    logits [R, E] F32; the pairs of each resident expert are added to counts [n] int32.
    """
    rows, experts_in_all = logits.shape
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    route[(triton.cdiv(rows, _ROUTED_ROWS),)](
        logits,
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
        ROWS=_ROUTED_ROWS,
        EXPERTS=triton.next_power_of_2(experts_in_all),
        CHOICES=triton.next_power_of_2(top_k),
        enable_reflect_ftz=False,  # torch's logarithm of small numbers keeps their bits
    )
    return chosen, weights


def place(chosen: Tensor, counts: Tensor, tile: Tile, tail: Tile | None) -> Work:
    """The order of the pairs of ``chosen`` [R, top_k] int32, cut into tiles; counts [n] int32: pairs of each expert."""
    pairs, resident = chosen.numel(), counts.shape[0]
    order = torch.empty_like(chosen).view(-1)
    tiles = chosen.new_empty(min(pairs, pairs // tile.rows + resident), 3)
    tails = chosen.new_empty(min(pairs, resident), 3)
    tile_counts = chosen.new_empty(2)
    place_pairs[(resident,)](
        chosen,
        counts,
        order,
        tiles,
        tails,
        tile_counts,
        pairs,
        resident,
        ROWS=tile.rows,
        TAIL=0 if tail is None else tail.rows,
        CHUNK=min(_MOST_PAIRS_AT_ONCE, triton.next_power_of_2(pairs)),
        RESIDENT=triton.next_power_of_2(resident),
        num_warps=8,
    )
    parts = [(tile, tiles, tile_counts[:1])]
    return Work(order, parts if tail is None else [*parts, (tail, tails, tile_counts[1:])])


def multiply_gate_and_up(
    rounded: Tensor, weights: Tensor, work: Work, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, limit: float
) -> Tensor:
    """Hidden rows of the pairs, rounded and weighted: [P, I up to 128] BF16, a row for each place of the order.

    rounded as :func:`round_inputs` gives it, weights [R, top_k] F32; matrices [n, I, D/2] packed, scales [n, I, D/32].
    """
    inner, channels = w1.shape[1], 2 * w1.shape[2]
    blocks = triton.cdiv(inner, _BLOCK)
    hidden = rounded.new_empty(work.order.shape[0], blocks * _BLOCK)
    for tile, table, count in work.parts:
        launch = tile.gate_and_up
        gate_and_up[_programs(launch.programs, table.shape[0] * blocks, hidden.device)](
            rounded,
            _words(w1),
            _scale_words(s1),
            _words(w3),
            _scale_words(s3),
            work.order,
            weights,
            table,
            count,
            hidden,
            limit,
            top_k=weights.shape[1],
            inputs=channels,
            outputs=inner,
            ROWS=tile.rows,
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
    channels, inner = w2.shape[1], 2 * w2.shape[2]
    results = hidden.new_empty(hidden.shape[0], channels)
    for tile, table, count in work.parts:
        launch = tile.down
        down[_programs(launch.programs, table.shape[0] * triton.cdiv(channels, tile.outputs), hidden.device)](
            hidden,
            _words(w2),
            _scale_words(s2),
            work.order,
            table,
            count,
            results,
            inputs=inner,
            outputs=channels,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
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
    sum_pairs[(rows, triton.cdiv(channels, _COLUMNS))](chosen, results, total, channels, top_k=top_k, COLUMNS=_COLUMNS)
    return total


def _programs(at_once: int, tasks: int, device: torch.device) -> tuple[int]:
    """Enough programs to fill the device; each takes one task after the other."""
    return (min(tasks, at_once * multiprocessors(device)),)


def _words(packed: Tensor) -> Tensor:
    """Eight codes a word: [..., C/2] uint8 -> [..., C/8] int32, the same memory."""
    return packed.contiguous().view(torch.int32)


def _scale_words(scales: Tensor) -> Tensor:
    """Four scales a word where rows have whole words: [..., C/32] uint8 -> [..., C/128] int32, the same memory."""
    return scales.contiguous().view(torch.int32) if scales.shape[-1] % 4 == 0 else scales.contiguous()
