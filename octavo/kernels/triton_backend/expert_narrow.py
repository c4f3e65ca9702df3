"""Launches of the products of ``experts`` in narrow tiles: ``expert_narrow_kernel``, cut as ``expert_tiles`` says."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from octavo.kernels.triton_backend.device import multiprocessors
from octavo.kernels.triton_backend.expert_launches import COLUMNS, programs, scale_words, words
from octavo.kernels.triton_backend.expert_narrow_kernel import layouts, multiply_narrow
from octavo.kernels.triton_backend.expert_products import gate_pairs
from octavo.kernels.triton_backend.expert_tiles import Narrow

_GATING = 8
"""Programs on a multiprocessor, each for one row after the other."""


def multiply_gate_and_up_narrow(
    form: Narrow,
    rounded: Tensor,
    weights: Tensor,
    order: Tensor,
    tiles: Tensor,
    tile_count: Tensor,
    w1: Tensor,
    s1: Tensor,
    w3: Tensor,
    s3: Tensor,
    limit: float,
) -> Tensor:
    """As ``experts.multiply_gate_and_up``, of one table of tiles. D and I are multiples of 128."""
    pairs, inner = order.shape[0], w1.shape[1]
    parts = rounded.new_empty(pairs, 2, inner)
    _multiply(form, rounded, (w1, s1, w3, s3), order, tiles, tile_count, parts, weights.shape[1], by_place=False)
    hidden = rounded.new_empty(pairs, inner)
    grid = min(pairs, _GATING * multiprocessors(hidden.device)), triton.cdiv(inner, COLUMNS)
    gate_pairs[grid](
        parts, weights, order, tiles, tile_count, hidden, limit, channels=inner, COLUMNS=COLUMNS, launch_pdl=True
    )
    return hidden


def multiply_down_narrow(
    form: Narrow, hidden: Tensor, order: Tensor, tiles: Tensor, tile_count: Tensor, w2: Tensor, s2: Tensor
) -> Tensor:
    """As ``experts.multiply_down``, of one table of tiles. D and I are multiples of 128."""
    results = hidden.new_empty(hidden.shape[0], w2.shape[1])
    _multiply(form, hidden, (w2, s2, w2, s2), order, tiles, tile_count, results, 1, by_place=True)
    return results


def _multiply(
    form: Narrow,
    x: Tensor,
    matrices: tuple[Tensor, Tensor, Tensor, Tensor],
    order: Tensor,
    tiles: Tensor,
    tile_count: Tensor,
    results: Tensor,
    top_k: int,
    by_place: bool,
) -> None:
    w_first, s_first, w_second, s_second = matrices
    outputs = w_first.shape[1]
    count = 1 if by_place else 2
    options: dict[str, Any] = layouts(form.rows, form.outputs, form.warps)
    multiply_narrow[programs(form.programs, tiles.shape[0] * count * (outputs // form.outputs), x.device)](
        x,
        words(w_first),
        scale_words(s_first),
        words(w_second),
        scale_words(s_second),
        order,
        tiles,
        tile_count,
        results,
        top_k=top_k,
        inputs=2 * w_first.shape[2],
        outputs=outputs,
        MATRICES=count,
        BY_PLACE=by_place,
        ROWS=form.rows,
        OUTPUTS=form.outputs,
        STAGES=form.stages,
        **options,
        num_warps=form.warps,
        maxnreg=form.registers,
    )
