"""Products of ``experts`` for few rows, where next to nothing is computed and one or two experts' weights are read.

Pairs of row and expert are not put in order: a tile has a column for every row of the step, and columns of rows that
did not choose the tile's expert are zero.

One expert has too few channels for all multiprocessors to read its weights at once. So a tile is *split*: it holds few
channels, and several parts of their inputs one below the other. Its columns are the same parts of the rows' inputs, one
beside the other. Of the product only the blocks on the diagonal are wanted, where a part of the weights meets the same
part of the inputs: their sum is the result. The others cost nothing that is not there anyway, since tensor cores
multiply 16 columns at least.

How weights are read and decoded: ``expert_products``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.expert_products import add_product, through_bf16
from octavo.kernels.triton_backend.expert_routing import BLOCK, GROUP, SHIFT, in_fragment_order
from octavo.kernels.triton_backend.linear_kernels import round_rows_q8
from octavo.kernels.triton_backend.register_weights import gated, weight_rows

COLUMNS = tl.constexpr(16)
"""Of a tile: parts of its split times rows."""


@triton.jit
def diagonal(total: tl.tensor, SPLIT: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """[SPLIT x N, SPLIT x ROWS x copies] F32 -> [N, ROWS]: the sum of the blocks on the diagonal, one copy of each."""
    outputs: tl.constexpr = total.shape[0] // SPLIT
    copies: tl.constexpr = total.shape[1] // (SPLIT * ROWS)
    column = tl.arange(0, total.shape[1])
    wanted = (tl.arange(0, total.shape[0]) // outputs)[:, None] == (column // (ROWS * copies))[None, :]
    if copies > 1:
        wanted = wanted & (column % copies == 0)[None, :]
    # A choice, not a product with zero: NaN of one row's inputs stays in its columns.
    kept = tl.reshape(tl.where(wanted, total, 0.0), [SPLIT, outputs, SPLIT, ROWS, copies])
    return tl.sum(tl.sum(tl.sum(kept, axis=4), axis=2), axis=0)


@triton.jit
def load_split_words(
    packed: tl.tensor, row: tl.tensor, there: tl.tensor, block: tl.tensor, inputs: tl.constexpr
) -> tl.tensor:
    """As ``load_words``, but row n has its own block, ``block[n]`` of [N] int32: [N, 16] int32."""
    word = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = there[:, None] & (word < inputs // 8)
    return tl.load(packed + row[:, None] * (inputs // 8) + word, mask=mask, other=0)


@triton.jit
def load_split_scales(
    scales: tl.tensor, row: tl.tensor, there: tl.tensor, block: tl.tensor, inputs: tl.constexpr
) -> tl.tensor:
    """As ``load_scales``, but row n has its own block, ``block[n]`` of [N] int32: [N, 1] int32."""
    if inputs // BLOCK * BLOCK == inputs:
        mask = there & (block < inputs // BLOCK)
        return tl.load(scales + row * (inputs // BLOCK) + block, mask=mask, other=0)[:, None]
    else:
        word = tl.zeros([row.shape[0], 1], tl.int32)
        for q in tl.static_range(4):
            mask = there & (block * 4 + q < inputs // GROUP)
            byte = tl.load(scales + row * (inputs // GROUP) + block * 4 + q, mask=mask, other=0)[:, None]
            word = word | (byte.to(tl.int32) << (8 * q))
        return word


@triton.jit
def load_split_rows(source: tl.tensor, here: tl.tensor, step: tl.int32) -> tl.tensor:
    """128 inputs of each column: source [N] pointers to the first input of a column's part, in fragment order.

    -> [N, 128] BF16, zero where ``here`` [N] is false.
    """
    return tl.load((source[:, None] + step * BLOCK) + tl.arange(0, BLOCK)[None, :], mask=here[:, None], other=0.0)


@triton.jit
def work_of_rows(
    chosen: tl.tensor, rows: tl.int32, top_k: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.int32]:
    """Which experts there are: chosen [rows, top_k] int32 as ``route`` gives it, at most ROWS rows and CHOICES choices.

    -> the same [ROWS, CHOICES], with -1 where there is nothing; the same flat; for the first pair of each expert the
    expert's number among the chosen ones, from 1 on, else 0; how many there are.
    """
    row = tl.arange(0, ROWS)
    choice = tl.arange(0, CHOICES)
    mask = (row < rows)[:, None] & (choice < top_k)[None, :]
    mine = tl.load(chosen + row[:, None] * top_k + choice[None, :], mask=mask, other=-1)
    flat = tl.reshape(mine, [ROWS * CHOICES])
    pair = tl.arange(0, ROWS * CHOICES)
    earlier = (flat[:, None] == flat[None, :]) & (pair[None, :] < pair[:, None])
    first = (flat >= 0) & (tl.max(earlier.to(tl.int32), axis=1) == 0)
    number = tl.cumsum(first.to(tl.int32), axis=0)
    return mine, flat, tl.where(first, number, 0), tl.sum(first.to(tl.int32))


@triton.jit
def of_every_part(of_rows: tl.tensor, SPLIT: tl.constexpr) -> tl.tensor:
    """[ROWS] -> [SPLIT x ROWS]: a column's value is its row's."""
    rows: tl.constexpr = of_rows.shape[0]
    return tl.reshape(tl.broadcast_to(of_rows[None, :], [SPLIT, rows]), [SPLIT * rows])


@triton.jit(do_not_specialize=["rows"])
def gate_and_up_few(
    rounded: tl.tensor,
    w1: tl.tensor,
    s1: tl.tensor,
    w3: tl.tensor,
    s3: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    hidden: tl.tensor,
    limit: tl.float32,
    rows: tl.int32,
    top_k: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    CHOICES: tl.constexpr,
    SPLIT: tl.constexpr,
    PLACES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """hidden = weight x silu(w1 x) x w3 x, PLACES / SPLIT channels of all pairs of an expert at a time.

    rounded, weights and matrices as in ``gate_and_up``, chosen [rows, top_k] int32 as ``route`` gives it, rows at most
    16 / SPLIT. hidden [rows, top_k, outputs up to 128] BF16, for resident pairs alone, zero beyond ``outputs``; not
    rounded.
    """
    ROWS: tl.constexpr = COLUMNS // SPLIT
    width: tl.constexpr = PLACES // SPLIT
    padded: tl.constexpr = (outputs + BLOCK - 1) // BLOCK * BLOCK
    tiles: tl.constexpr = padded // width
    blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    share: tl.constexpr = (blocks + SPLIT - 1) // SPLIT
    let_next_start()
    wait_for_ahead()
    mine, flat, number, count = work_of_rows(chosen, rows, top_k, ROWS, CHOICES)
    place = weight_rows(PLACES, WARPS)
    part = place // width
    column = tl.arange(0, COLUMNS)
    column_part = column // ROWS
    choice = tl.arange(0, CHOICES)
    row = tl.arange(0, ROWS)
    for task in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        which = task // tiles
        first = (task - which * tiles) * width
        expert = tl.sum(tl.where(number == which + 1, flat, 0))
        here = tl.max((mine == expert).to(tl.int32), axis=1) > 0
        pair = row * top_k + tl.max(tl.where(mine == expert, choice[None, :], 0), axis=1)
        channel = first + place % width
        there = channel < outputs
        matrix_row = expert.to(tl.int64) * outputs + channel
        source = rounded + (column % ROWS * (blocks * BLOCK) + column_part * (share * BLOCK))
        wanted = of_every_part(here, SPLIT)

        gate = tl.zeros([PLACES, COLUMNS], tl.float32)
        up = tl.zeros([PLACES, COLUMNS], tl.float32)
        for step in tl.range(0, share, num_stages=STAGES):
            block = part * share + step
            x = tl.trans(load_split_rows(source, wanted & (column_part * share + step < blocks), step))
            words = load_split_words(w1, matrix_row, there, block, inputs)
            gate = add_product(gate, words, load_split_scales(s1, matrix_row, there, block, inputs), x, WARPS)
            words = load_split_words(w3, matrix_row, there, block, inputs)
            up = add_product(up, words, load_split_scales(s3, matrix_row, there, block, inputs), x, WARPS)

        gate = diagonal(gate, SPLIT, ROWS)
        up = diagonal(up, SPLIT, ROWS)
        weight = tl.load(weights + pair, mask=here, other=0.0)
        product = through_bf16(weight[None, :] * gated(through_bf16(gate), through_bf16(up), limit))
        at = first + tl.arange(0, width)
        target = hidden + pair[None, :] * padded + at[:, None]
        tl.store(target, product.to(hidden.dtype.element_ty), mask=tl.broadcast_to(here[None, :], [width, ROWS]))


@triton.jit
def down_and_sum(
    hidden: tl.tensor,
    w2: tl.tensor,
    s2: tl.tensor,
    chosen: tl.tensor,
    sums: tl.tensor,
    top_k: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    CHOICES: tl.constexpr,
    SPLIT: tl.constexpr,
    PLACES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """sums = w2 Q8(hidden), summed over a row's resident experts in the order of its choices; each rounded to BF16.

    hidden as :func:`gate_and_up_few` gives it, chosen [R, top_k] int32, w2 [n, outputs, inputs / 8] int32 -> sums
    [R, outputs] F32. A program takes a row and PLACES / SPLIT channels: rows that chose one expert read its weights
    each for itself. Grid: tiles of channels, rows.
    """
    width: tl.constexpr = PLACES // SPLIT
    blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    share: tl.constexpr = (blocks + SPLIT - 1) // SPLIT
    wait_for_ahead()
    row = tl.program_id(1)
    first = tl.program_id(0) * width
    place = weight_rows(PLACES, WARPS)
    part = place // width
    column_part = tl.arange(0, SPLIT)
    channel = first + place % width
    there = channel < outputs
    choice = tl.arange(0, CHOICES)
    mine = tl.load(chosen + row * top_k + choice, mask=choice < top_k, other=-1)
    number = tl.where(mine >= 0, tl.cumsum((mine >= 0).to(tl.int32), axis=0), 0)
    summed = tl.zeros([width, 1], tl.float32)
    for which in range(tl.sum((mine >= 0).to(tl.int32))):
        expert = tl.sum(tl.where(number == which + 1, mine, 0))
        pair = row * top_k + tl.sum(tl.where(number == which + 1, choice, 0))
        matrix_row = expert.to(tl.int64) * outputs + channel
        source = hidden + (pair * (blocks * BLOCK) + column_part * (share * BLOCK))

        total = tl.zeros([PLACES, COLUMNS], tl.float32)
        for step in tl.range(0, share, num_stages=STAGES):
            block = part * share + step
            values = load_split_rows(source, column_part * share + step < blocks, step)
            x = tl.trans(_copied(_rounded(values)))
            words = load_split_words(w2, matrix_row, there, block, inputs)
            total = add_product(total, words, load_split_scales(s2, matrix_row, there, block, inputs), x, WARPS)
        summed += through_bf16(diagonal(total, SPLIT, 1))

    at = first + tl.arange(0, width)
    tl.store(sums + row * outputs + at[:, None], summed, mask=(at < outputs)[:, None])


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """[N, 128] BF16 through Q8, x 2^64, in fragment order."""
    values = (round_rows_q8(x).to(tl.float32) * SHIFT).to(tl.bfloat16)
    return in_fragment_order(values)


@triton.jit
def _copied(x: tl.tensor) -> tl.tensor:
    """[N, 128] -> [16, 128]: each row so often that there are as many as a tile has columns."""
    rows: tl.constexpr = x.shape[0]
    copies: tl.constexpr = COLUMNS // rows
    return tl.reshape(tl.broadcast_to(x[:, None, :], [rows, copies, BLOCK]), [COLUMNS, BLOCK])
