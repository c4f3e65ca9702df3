"""Launches of the products of ``experts`` in narrow tiles: ``expert_narrow_kernel``, cut as ``expert_tiles`` says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.kernels.triton_backend.expert_launches import COLUMNS, hidden_of_parts, programs, scale_words, words
from octavo.kernels.triton_backend.expert_narrow_kernel import layouts, multiply_narrow
from octavo.kernels.triton_backend.expert_routing import BLOCK
from octavo.kernels.triton_backend.expert_tiles import Narrow


def multiply_gate_and_up_narrow(
    form: Narrow,
    tiles: Tensor,
    totals: Tensor,
    rounded: Tensor,
    weights: Tensor,
    order: Tensor,
    w1: Tensor,
    s1: Tensor,
    w3: Tensor,
    s3: Tensor,
    limit: float,
) -> Tensor:
    """As ``experts.multiply_gate_and_up``.

    Raises :class:`ValueError` unless D and I are multiples of 128.
    """
    pairs, inner = order.shape[0], w1.shape[1]
    parts = rounded.new_empty(pairs, 2, inner)
    _multiply(form, tiles, totals, order, rounded, (w1, s1), (w3, s3), weights.shape[1], parts)
    return hidden_of_parts(parts, weights, order, totals, limit, 1, COLUMNS)


def multiply_down_narrow(
    form: Narrow, tiles: Tensor, totals: Tensor, hidden: Tensor, order: Tensor, w2: Tensor, s2: Tensor
) -> Tensor:
    """As ``experts.multiply_down``.

    Raises :class:`ValueError` unless D and I are multiples of 128.
    """
    results = hidden.new_empty(hidden.shape[0], w2.shape[1])
    _multiply(form, tiles, totals, order, hidden, (w2, s2), None, None, results)
    return results


def _multiply(
    form: Narrow,
    tiles: Tensor,
    totals: Tensor,
    order: Tensor,
    x: Tensor,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor] | None,
    top_k: int | None,
    results: Tensor,
) -> None:
    """Matrices with their scales: one of rows by place of ``order``, or two of rows of the step, each chosen ``top_k``
    times."""
    outputs, inputs = first[0].shape[1], 2 * first[0].shape[2]
    if outputs % BLOCK.value or inputs % BLOCK.value:
        raise ValueError(
            f"narrow tiles of {inputs} inputs and {outputs} outputs: allowed are multiples of {BLOCK.value}. Choose "
            "tiles for widths that are not whole."
        )
    matrices = 1 if second is None else 2
    options: dict[str, Any] = layouts(form.outputs, form.warps)
    multiply_narrow[programs(form.programs, tiles.shape[0] * matrices * (outputs // form.outputs), x.device)](
        x,
        words(first[0]),
        scale_words(first[1]),
        None if second is None else words(second[0]),
        None if second is None else scale_words(second[1]),
        order,
        tiles,
        totals,
        results,
        top_k=top_k,
        inputs=inputs,
        outputs=outputs,
        ROWS=form.rows,
        OUTPUTS=form.outputs,
        STAGES=form.stages,
        **options,
        num_warps=form.warps,
        maxnreg=form.registers,
    )
