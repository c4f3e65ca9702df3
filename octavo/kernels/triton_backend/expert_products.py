"""Grouped products with packed F4 weights for ``experts``.

Weights are the left operand of the tensor cores and go there from registers, so that they are never written anywhere
after they were decoded; rows are the right operand. Each thread holds 16 bytes of a row of weights, one scale group,
and decodes them where they are: places of weights are permuted, not weights. Inputs lie in fragment order for that
(``expert_routing``), and the rows of a tile are read in the order in which the warps of an accumulator hold them.

A code's bits, put where BF16 has sign, exponent and mantissa, are its value times 2^-126. One multiplication gives the
scaled weight, so its factor must be a BF16: weights are 2^-64 of their value, inputs 2^64 of theirs. That is exact for
scales from 2^-68 to 2^65 (bytes 59 to 192) and inputs below 2^63; smaller weights lose bits or vanish, larger ones
give no finite number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.dependent_launch import wait_for_ahead
from octavo.kernels.triton_backend.expert_routing import BLOCK, GROUP, SHIFT, in_fragment_order, round_q8_groups
from octavo.kernels.triton_backend.register_weights import WARP_ROWS, gated, two_values, weight_rows

LARGEST_SCALE = 192
"""Byte of a scale: see above. Larger ones are refused when weights are loaded."""
_SHORT_STEPS = tl.constexpr(16)
"""Rows of a tile: see :func:`add_product`."""
DECODE = tl.constexpr(
    """
    {
        .reg .b32 upper, a, b, c, d;
        shr.u32 upper, $4, 8;
        and.b32 a, $4, 0x000F000F;
        and.b32 b, $4, 0x00F000F0;
        and.b32 c, upper, 0x000F000F;
        and.b32 d, upper, 0x00F000F0;
        mul.lo.u32 a, a, 4160;
        mul.lo.u32 b, b, 260;
        mul.lo.u32 c, c, 4160;
        mul.lo.u32 d, d, 260;
        and.b32 a, a, 0x81C081C0;
        and.b32 b, b, 0x81C081C0;
        and.b32 c, c, 0x81C081C0;
        and.b32 d, d, 0x81C081C0;
        mul.bf16x2 $0, a, $5;
        mul.bf16x2 $1, b, $5;
        mul.bf16x2 $2, c, $5;
        mul.bf16x2 $3, d, $5;
    }
    """
)
"""Nibbles n and n + 4 of a word, n = 0 .. 3, times the factor: a product places sign and magnitude in one step."""


@triton.jit
def decode_words(words: tl.tensor, factors: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """[N, W] int32 of eight codes and [N, W] int32 of two equal BF16 factors -> four times [N, W, 2] BF16."""
    a, b, c, d = tl.inline_asm_elementwise(
        DECODE, "=r,=r,=r,=r,r,r", [words, factors], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    return two_values(a), two_values(b), two_values(c), two_values(d)


@triton.jit
def fragments(words: tl.tensor, scales: tl.tensor, WARPS: tl.constexpr) -> tl.tensor:
    """128 columns of weights x 2^-64: words [N, 16] int32 and scales [N, 1] int32 (four bytes) -> [N, 128] BF16.

    Rows in the order of an accumulator, columns in fragment order.
    """
    outputs: tl.constexpr = words.shape[0]
    byte = (tl.expand_dims(scales, 2) >> (tl.arange(0, 4) * 8)[None, None, :]) & 255
    factor = (tl.minimum(byte + 62, 255) << 7) * 0x00010001
    factors = tl.reshape(tl.broadcast_to(tl.reshape(factor, [outputs, 4, 1]), [outputs, 4, 4]), [outputs, 16])
    a, b, c, d = decode_words(words, factors)
    values = tl.join(tl.join(a, c), tl.join(b, d))
    parts = tl.reshape(values, [outputs // (WARP_ROWS * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3, 5, 7, 8, 4, 6)), [outputs, BLOCK])


@triton.jit
def add_product(total: tl.tensor, words: tl.tensor, scales: tl.tensor, x: tl.tensor, WARPS: tl.constexpr) -> tl.tensor:
    """total [N, ROWS] F32 + weights (see :func:`fragments`) times x [128, ROWS] BF16.

    Triton lets a product run on into the next iteration, where registers of its operand are written again: the
    assembler then waits after each of its steps. Reading the sum makes it wait once, at the end. Tiles of 16 rows gain
    5 % by that on an H200; those of 64 and 128 lose 10 %, whose steps are long and let other work run beside them.
    """
    product = tl.dot(fragments(words, scales, WARPS), x, total)
    if total.shape[1] <= _SHORT_STEPS:
        product = _read(product)
    return product


@triton.jit
def _read(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def load_words(
    packed: tl.tensor, row: tl.tensor, there: tl.tensor, block: tl.int32, inputs: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """Codes of 128 columns: packed [..., inputs / 8] int32, row [N] int64 -> [N, 16] int32, zeros beyond the matrix.

    WHOLE says that all columns of every block are in the matrix.
    """
    word = block * 16 + tl.arange(0, 16)
    mask = there[:, None]
    if not WHOLE:
        mask = mask & (word < inputs // 8)[None, :]
    return tl.load(packed + row[:, None] * (inputs // 8) + word[None, :], mask=mask, other=0)


@triton.jit
def load_scales(
    scales: tl.tensor, row: tl.tensor, there: tl.tensor, block: tl.int32, inputs: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """Scales of 128 columns, four bytes in one word: [N, 1] int32.

    scales are [..., inputs / 128] int32 where 128 divides inputs, else [..., inputs / 32] uint8.
    """
    if inputs // BLOCK * BLOCK == inputs:
        mask = there[:, None]
        if not WHOLE:
            mask = mask & (block < inputs // BLOCK)
        return tl.load(scales + row[:, None] * (inputs // BLOCK) + block, mask=mask, other=0)
    else:
        word = tl.zeros([row.shape[0], 1], tl.int32)
        for q in tl.static_range(4):
            mask = there[:, None] & (block * 4 + q < inputs // GROUP)
            byte = tl.load(scales + row[:, None] * (inputs // GROUP) + block * 4 + q, mask=mask, other=0)
            word = word | (byte.to(tl.int32) << (8 * q))
        return word


@triton.jit
def gate_and_up(
    rounded: tl.tensor,
    w1: tl.tensor,
    s1: tl.tensor,
    w3: tl.tensor,
    s3: tl.tensor,
    pairs: tl.tensor,
    weights: tl.tensor,
    tiles: tl.tensor,
    totals: tl.tensor,
    hidden: tl.tensor,
    limit: tl.float32,
    top_k: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """hidden = Q8(weight x silu(w1 x) x w3 x), 128 channels of a tile of pairs at a time.

    rounded [R, inputs up to 128] BF16 (see ``round_rows``), w1 and w3 [n, outputs, inputs / 8] int32, s1 and s3 as in
    :func:`load_scales`, pairs, tiles and totals as ``place_pairs`` gives them, weights [R, top_k] F32. hidden
    [P, outputs up to 128] BF16: a row for each place of ``pairs``, in fragment order, x 2^64, zero beyond ``outputs``.
    Gate and up are rounded to BF16 as they come.
    """
    channel_tiles: tl.constexpr = (outputs + BLOCK - 1) // BLOCK
    blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    whole: tl.constexpr = inputs // (BLOCK * BLOCKS) * (BLOCK * BLOCKS) == inputs
    for task in range(tl.program_id(0), tl.load(totals) * channel_tiles, tl.num_programs(0)):
        number = task // channel_tiles
        tile = tiles + number * 3
        first = (task - number * channel_tiles) * BLOCK
        place = tl.load(tile + 1) + tl.arange(0, ROWS)
        here = place < tl.load(tile + 2)
        pair = tl.load(pairs + place, mask=here, other=0)
        channel = first + weight_rows(BLOCK, WARPS)
        there = channel < outputs
        row = tl.load(tile).to(tl.int64) * outputs + channel
        column = tl.arange(0, BLOCK)
        source = rounded + ((pair // top_k)[:, None] * (blocks * BLOCK) + column[None, :])

        gate = tl.zeros([BLOCK, ROWS], tl.float32)
        up = tl.zeros([BLOCK, ROWS], tl.float32)
        for low in tl.range(0, blocks, BLOCKS, num_stages=STAGES):
            for step in tl.static_range(BLOCKS):
                block = low + step
                wanted = here[:, None] if whole else here[:, None] & (block < blocks)
                x = tl.trans(tl.load(source + block * BLOCK, mask=wanted, other=0.0))
                words = load_words(w1, row, there, block, inputs, whole)
                gate = add_product(gate, words, load_scales(s1, row, there, block, inputs, whole), x, WARPS)
                words = load_words(w3, row, there, block, inputs, whole)
                up = add_product(up, words, load_scales(s3, row, there, block, inputs, whole), x, WARPS)

        # Read once more: numbers that are kept over the loop above would have to leave the registers.
        place = tl.load(tile + 1, volatile=True) + tl.arange(0, ROWS)
        here = place < tl.load(tile + 2, volatile=True)
        pair = tl.load(pairs + place, mask=here, other=0, volatile=True)
        weight = tl.load(weights + pair, mask=here, other=0.0)
        product = weight[None, :] * gated(through_bf16(gate), through_bf16(up), limit)
        groups = tl.reshape(through_bf16(product), [BLOCK // GROUP, GROUP, ROWS])
        rows = tl.trans(tl.reshape(round_q8_groups(groups) * SHIFT, [BLOCK, ROWS]))
        ordered = tl.permute(tl.reshape(rows, [ROWS, 4, 4, 2, 2, 2]), (0, 2, 4, 5, 1, 3))
        target = hidden + place.to(tl.int64)[:, None] * (channel_tiles * BLOCK) + first + column[None, :]
        values = tl.reshape(ordered, [ROWS, BLOCK]).to(hidden.dtype.element_ty)
        tl.store(target, values, mask=here[:, None])


@triton.jit
def down(
    hidden: tl.tensor,
    w2: tl.tensor,
    s2: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    totals: tl.tensor,
    results: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """results = w2 hidden, OUTPUTS channels of a tile of pairs at a time.

    hidden, pairs, tiles and totals as in :func:`gate_and_up`, w2 [n, outputs, inputs / 8] int32. results
    [R, top_k, outputs] BF16: only those of resident pairs are written.
    """
    channel_tiles: tl.constexpr = (outputs + OUTPUTS - 1) // OUTPUTS
    blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    whole: tl.constexpr = inputs // (BLOCK * BLOCKS) * (BLOCK * BLOCKS) == inputs
    for task in range(tl.program_id(0), tl.load(totals) * channel_tiles, tl.num_programs(0)):
        number = task // channel_tiles
        tile = tiles + number * 3
        first = (task - number * channel_tiles) * OUTPUTS
        place = tl.load(tile + 1) + tl.arange(0, ROWS)
        here = place < tl.load(tile + 2)
        channel = first + weight_rows(OUTPUTS, WARPS)
        there = channel < outputs
        row = tl.load(tile).to(tl.int64) * outputs + channel
        source = hidden + place.to(tl.int64)[:, None] * (blocks * BLOCK) + tl.arange(0, BLOCK)[None, :]

        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for low in tl.range(0, blocks, BLOCKS, num_stages=STAGES):
            for step in tl.static_range(BLOCKS):
                block = low + step
                wanted = here[:, None] if whole else here[:, None] & (block < blocks)
                x = tl.trans(tl.load(source + block * BLOCK, mask=wanted, other=0.0))
                words = load_words(w2, row, there, block, inputs, whole)
                total = add_product(total, words, load_scales(s2, row, there, block, inputs, whole), x, WARPS)

        pair = tl.load(pairs + place, mask=here, other=0)
        column = first + tl.arange(0, OUTPUTS)
        target = results + pair.to(tl.int64)[:, None] * outputs + column[None, :]
        values = tl.trans(total).to(results.dtype.element_ty)
        tl.store(target, values, mask=here[:, None] & (column < outputs)[None, :])


@triton.jit
def gate_pairs(
    parts: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    totals: tl.tensor,
    hidden: tl.tensor,
    limit: tl.float32,
    channels: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """hidden = Q8(weight x silu(gate) x up): the end of :func:`gate_and_up` for products that were written.

    parts [P, 2, channels] BF16: gate and up of each place of ``pairs``; totals as ``place_pairs`` gives it; weights
    [R, top_k] F32. hidden [P, channels] BF16 in fragment order, x 2^64; channels a multiple of 128. ROWS rows at a
    time and COLUMNS channels a program.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_ahead()
    end = tl.load(totals + 1)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        place = first + tl.arange(0, ROWS)
        wanted = (place < end)[:, None] & (column < channels)[None, :]
        weight = tl.load(weights + tl.load(pairs + place, mask=place < end, other=0), mask=place < end, other=0.0)
        source = parts + (place.to(tl.int64)[:, None] * (2 * channels) + column[None, :])
        gate = tl.load(source, mask=wanted, other=0.0).to(tl.float32)
        up = tl.load(source + channels, mask=wanted, other=0.0).to(tl.float32)
        product = through_bf16(weight[:, None] * gated(gate, up, limit))
        groups = round_q8_groups(tl.reshape(product, [ROWS * (COLUMNS // GROUP), GROUP, 1])) * SHIFT
        ordered = in_fragment_order(tl.reshape(groups, [ROWS, COLUMNS]))
        target = hidden + (place.to(tl.int64)[:, None] * channels + column[None, :])
        tl.store(target, ordered.to(hidden.dtype.element_ty), mask=wanted)


@triton.jit
def sum_pairs(
    chosen: tl.tensor,
    results: tl.tensor,
    total: tl.tensor,
    channels: tl.int32,
    top_k: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """total [R, D] F32 = the results [R, top_k, D] of resident pairs (chosen [R, top_k] >= 0), added in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < channels
    summed = tl.zeros([COLUMNS], tl.float32)
    wait_for_ahead()
    for k in tl.static_range(top_k):
        pair = row * top_k + k
        mine = tl.load(chosen + pair) >= 0
        summed += tl.load(results + pair * channels + column, mask=there & mine, other=0.0).to(tl.float32)
    tl.store(total + row * channels + column, summed, mask=there)


@triton.jit
def through_bf16(x: tl.tensor) -> tl.tensor:
    return x.to(tl.bfloat16).to(tl.float32)
