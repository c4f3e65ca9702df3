"""What stands around products with F8 weights: rows before them, sums of their parts after them, weights in BF16."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.linear_kernels import GROUP, decode_words, in_fragment_order, round_rows_q8
from octavo.kernels.triton_backend.register_weights import gated


@triton.jit
def prepare_rows(
    x: tl.tensor,
    target: tl.tensor,
    channels: tl.int32,
    padded: tl.int32,
    ROUND: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """x [N, channels] BF16 -> target [N, padded] BF16: ROUND says through Q8, FRAGMENTS in fragment order.

    Zero beyond ``channels``. One row and COLUMNS channels a program.
    """
    let_next_start()
    wait_for_ahead()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(x + row * channels + column, mask=column < channels, other=0.0)
    _store_row(target + row * padded, values, column, padded, ROUND, FRAGMENTS)


@triton.jit(do_not_specialize=["splits"])
def sum_parts(
    parts: tl.tensor, target: tl.tensor, splits: tl.int32, size: tl.int32, MOST: tl.constexpr, NUMBERS: tl.constexpr
) -> None:
    """parts [splits, size] F32, added in their order -> target [size] BF16; NUMBERS a program, at most MOST parts."""
    _sum_numbers(parts, target, tl.program_id(0), splits, size, MOST, NUMBERS)


@triton.jit(do_not_specialize=["splits"])
def sum_parts_of_pair(
    first_parts: tl.tensor,
    first_target: tl.tensor,
    second_parts: tl.tensor,
    second_target: tl.tensor,
    splits: tl.int32,
    first_size: tl.int32,
    second_size: tl.int32,
    MOST: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> None:
    """:func:`sum_parts` twice: the first programs add the first parts, those behind them the second ones."""
    programs = tl.cdiv(first_size, NUMBERS)
    second = tl.program_id(0) >= programs
    _sum_numbers(
        tl.where(second, second_parts, first_parts),
        tl.where(second, second_target, first_target),
        tl.program_id(0) - tl.where(second, programs, 0),
        splits,
        tl.where(second, second_size, first_size),
        MOST,
        NUMBERS,
    )


@triton.jit(do_not_specialize=["splits", "rows"])
def gate_parts(
    parts: tl.tensor,
    hidden: tl.tensor,
    limit: tl.float32,
    splits: tl.int32,
    rows: tl.int32,
    inner: tl.int32,
    padded: tl.int32,
    MOST: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """hidden = Q8(silu(gate) x up), clamped: parts [splits, rows, 2, inner], added in their order -> [rows, padded].

    Gate and up are rounded to BF16, as is their product. FRAGMENTS and padding as in :func:`prepare_rows`; at most
    MOST parts.
    """
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < inner
    wait_for_ahead()
    source = parts + row * 2 * inner + column
    gate = tl.load(source, mask=there, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=there, other=0.0).to(tl.float32)
    for split in tl.static_range(1, MOST):
        mask = there & (split < splits)
        place = source + split * rows.to(tl.int64) * 2 * inner
        gate += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(place + inner, mask=mask, other=0.0).to(tl.float32)
    values = gated(gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32), limit).to(tl.bfloat16)
    _store_row(hidden + row * padded, values, column, padded, True, FRAGMENTS)


@triton.jit
def dequantise(
    weight: tl.tensor,
    scales: tl.tensor,
    target: tl.tensor,
    outputs: tl.int32,
    words: tl.int32,
    scale_stride: tl.int32,
    GROUPS: tl.constexpr,
) -> None:
    """weight [outputs, words] int32 with scales [ceil(outputs / 32), scale_stride] uint8 -> target BF16.

    One row of tiles and GROUPS of them a program. A scaled weight is exact, see ``linear_kernels``.
    """
    row = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    word = tl.program_id(0) * (GROUPS * GROUP // 4) + tl.arange(0, GROUPS * GROUP // 4)
    byte = tl.load(scales + tl.program_id(1) * scale_stride + group, mask=group < scale_stride, other=0).to(tl.int32)
    factor = ((byte + 120) << 7) * 0x00010001
    factors = tl.reshape(
        tl.broadcast_to(factor[None, :, None], [GROUP, GROUPS, GROUP // 4]), [GROUP, GROUPS * GROUP // 4]
    )
    there = (row < outputs)[:, None] & (word < words)[None, :]
    place = row[:, None].to(tl.int64) * words + word[None, :]
    even, odd = decode_words(tl.load(weight + place, mask=there, other=0), factors)
    values = tl.reshape(tl.join(even, odd), [GROUP, GROUPS * GROUP])
    column = tl.program_id(0) * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    place = row[:, None].to(tl.int64) * (words * 4) + column[None, :]
    tl.store(target + place, values, mask=(row < outputs)[:, None] & (column < words * 4)[None, :])


@triton.jit
def _sum_numbers(
    parts: tl.tensor,
    target: tl.tensor,
    program: tl.int32,
    splits: tl.int32,
    size: tl.int32,
    MOST: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> None:
    let_next_start()
    place = program.to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    there = place < size
    wait_for_ahead()
    total = tl.load(parts + place, mask=there, other=0.0)
    for split in tl.static_range(1, MOST):
        mask = there & (split < splits)
        total += tl.load(parts + split * size.to(tl.int64) + place, mask=mask, other=0.0)
    tl.store(target + place, total.to(target.dtype.element_ty), mask=there)


@triton.jit
def _store_row(
    target: tl.tensor,
    values: tl.tensor,
    column: tl.tensor,
    padded: tl.int32,
    ROUND: tl.constexpr,
    FRAGMENTS: tl.constexpr,
) -> None:
    row = tl.reshape(values, [1, values.shape[0]])
    if ROUND:
        row = round_rows_q8(row)
    if FRAGMENTS:
        row = in_fragment_order(row)
    tl.store(target + column, tl.reshape(row, [values.shape[0]]), mask=column < padded)
