"""Launches of the products of ``experts`` in wide tiles: ``expert_wide_kernel``."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.triton_backend.expert_launches import by_rows, hidden_of_parts, programs, scale_words, words
from octavo.kernels.triton_backend.expert_routing import BLOCK, PIECE, round_pairs
from octavo.kernels.triton_backend.expert_tiles import Wide
from octavo.kernels.triton_backend.expert_wide_kernel import (
    CHANNELS,
    HALF,
    ROWS_HELD,
    WORDS_HELD,
    multiply_wide,
)

_ROWS = 2
_COLUMNS = 512
"""That a program of elementwise kernels takes at a time."""


def round_pairs_in_order(x: Tensor, order: Tensor, totals: Tensor) -> Tensor:
    """x [R, D] BF16, contiguous -> rounded [P, D], a row for each place of ``order``, as ``experts.round_inputs``
    rounds it.

    totals as ``place_pairs`` gives it; nothing beyond the resident pairs. D is a multiple of 128.
    """
    rows, channels = x.shape
    rounded = x.new_empty(order.shape[0], channels)
    round_pairs[by_rows(rounded, _ROWS, _COLUMNS)](
        x, order, totals, rounded, top_k=order.shape[0] // rows, channels=channels, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    return rounded


def multiply_gate_and_up_wide(
    form: Wide,
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
    """As ``experts.multiply_gate_and_up``, of rows in order (:func:`round_pairs_in_order`).

    Raises :class:`ValueError` unless D is a multiple of 128 and I one of 256.
    """
    pairs, inner = order.shape[0], w1.shape[1]
    parts = rounded.new_empty(pairs, 2, inner)
    _multiply(form, tiles, totals, order, rounded, (w1, s1), (w3, s3), parts)
    return hidden_of_parts(parts, weights, order, totals, limit, _ROWS, _COLUMNS)


def multiply_down_wide(
    form: Wide, tiles: Tensor, totals: Tensor, hidden: Tensor, order: Tensor, w2: Tensor, s2: Tensor
) -> Tensor:
    """As ``experts.multiply_down``.

    Raises :class:`ValueError` unless I is a multiple of 128 and D one of 256.
    """
    results = hidden.new_empty(hidden.shape[0], w2.shape[1])
    _multiply(form, tiles, totals, order, hidden, (w2, s2), None, results)
    return results


def _multiply(
    form: Wide,
    tiles: Tensor,
    totals: Tensor,
    order: Tensor,
    x: Tensor,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor] | None,
    results: Tensor,
) -> None:
    """One or two matrices with their scales."""
    outputs, inputs = first[0].shape[1], 2 * first[0].shape[2]
    if outputs % CHANNELS.value or inputs % BLOCK.value:
        raise ValueError(
            f"wide tiles of {inputs} inputs and {outputs} outputs: allowed are multiples of {BLOCK.value} and of "
            f"{CHANNELS.value}. Choose tiles for other widths."
        )
    matrices = 1 if second is None else 2
    multiply_wide[programs(1, tiles.shape[0] * matrices * (outputs // CHANNELS.value), x.device)](
        TensorDescriptor.from_tensor(x, [PIECE.value, HALF.value], ROWS_HELD.value),
        _by_channels(first[0]),
        scale_words(first[1]),
        None if second is None else _by_channels(second[0]),
        None if second is None else scale_words(second[1]),
        order,
        tiles,
        totals,
        results,
        inputs=inputs,
        outputs=outputs,
        ROWS=form.rows,
        STAGES=form.stages,
        REGISTERS=form.registers,
        num_warps=4,
    )


def _by_channels(packed: Tensor) -> TensorDescriptor:
    """Of all experts' channels, so many as a tile has by the words of a block of columns."""
    codes = words(packed)
    return TensorDescriptor.from_tensor(
        codes.view(-1, codes.shape[2]), [CHANNELS.value, BLOCK.value // 8], WORDS_HELD.value
    )
