"""Products with F8 weights that are read once: E4M3 to BF16 in registers, tensor cores, F32 sums.

Weights are the left operand of the tensor cores and go there from registers, so that they are never written anywhere
after they were decoded; rows are the right operand. Each thread holds 16 bytes of a row of weights and decodes them
where they are: places of weights are permuted, not weights. Inputs lie in *fragment order* for that: within 64
channels, channel 16 q + 4 w + 2 p + a stands at place 16 w + 8 a + 2 q + p. Thread q of the four that share a row in
the operand of a tensor core then holds 16 weights in a row, word w for step w.

A code's bits, put where BF16 has sign, exponent and mantissa, are its value times 2^-120. One multiplication by a BF16
gives the scaled weight. That is exact for scales from 2^-124 to 2^7 (bytes 3 to 134); below, the smallest weights lose
bits, above, there is no such factor. The code of NaN counts as 480.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.register_weights import WARP_ROWS, two_values, weight_rows
from octavo.kernels.triton_backend.scales import scale_and_inverse

LARGEST_SCALE = 134
"""Byte of a scale: see above. Larger ones are refused when weights are loaded."""
GROUP = tl.constexpr(32)
"""Weights of a tile, in both directions, and channels of one Q8 scale."""
BLOCK = tl.constexpr(128)
"""Columns that are read at once: a line of memory of each row of weights, and four scales."""
_PART = tl.constexpr(64)
"""Channels over which fragment order permutes."""
_DECODE = tl.constexpr(
    """
    {
        .reg .b32 right, left, right_sign, left_sign;
        shr.u32 right, $2, 4;
        shl.b32 left, $2, 4;
        shl.b32 left_sign, $2, 8;
        and.b32 right, right, 0x07F007F0;
        and.b32 left, left, 0x07F007F0;
        and.b32 right_sign, $2, 0x80008000;
        and.b32 left_sign, left_sign, 0x80008000;
        or.b32 right, right, right_sign;
        or.b32 left, left, left_sign;
        mul.bf16x2 $0, left, $3;
        mul.bf16x2 $1, right, $3;
    }
    """
)
"""Bytes 0 and 2 of a word, then 1 and 3, times the factor."""
_ROUND_PAIR = tl.constexpr(
    """
    {
        .reg .b32 scaled, steps, many, least;
        mov.b32 many, 0x41C041C0;
        mov.b32 least, 0x3EC03EC0;
        mul.bf16x2 scaled, $1, $2;
        and.b32 steps, scaled, 0x7F807F80;
        mul.bf16x2 steps, steps, many;
        max.bf16x2 steps, steps, least;
        add.bf16x2 scaled, scaled, steps;
        sub.bf16x2 scaled, scaled, steps;
        mul.bf16x2 $0, scaled, $3;
    }
    """
)
"""192 steps are 24 times the power of two below, at least 0.375."""


@triton.jit
def decode_words(words: tl.tensor, factors: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """[N, W] int32 of four codes and [N, W] int32 of two equal BF16 factors -> twice [N, W, 2] BF16.

    The former of the two holds bytes 0 and 2, the latter 1 and 3.
    """
    even, odd = tl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r", [words, factors], (tl.int32, tl.int32), is_pure=True, pack=1
    )
    return two_values(even), two_values(odd)


@triton.jit
def fragments(words: tl.tensor, scales: tl.tensor, part: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """64 columns of weights: words [N, 16] int32 and scales [N, 1] int32 -> [N, 64] BF16.

    ``part`` says which half of the 128 columns of the four scales. Rows in the order of an accumulator, columns in
    fragment order.
    """
    outputs: tl.constexpr = words.shape[0]
    byte = (tl.expand_dims(scales, 2) >> (tl.arange(0, 2) * 8 + 16 * part)[None, None, :]) & 255
    factor = ((byte + 120) << 7) * 0x00010001
    factors = tl.reshape(tl.broadcast_to(tl.reshape(factor, [outputs, 2, 1]), [outputs, 2, 8]), [outputs, 16])
    even, odd = decode_words(words, factors)
    parts = tl.reshape(tl.join(even, odd), [outputs // (WARP_ROWS * WARPS), 2, WARPS, 8, 4, 4, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3, 5, 7, 4, 6)), [outputs, _PART])


@triton.jit
def in_fragment_order(x: tl.tensor) -> tl.tensor:
    """[N, C] with C a multiple of 64 -> the same with its columns in fragment order."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    parts = tl.reshape(x, [rows, columns // _PART, 4, 4, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 5, 2, 4)), [rows, columns])


@triton.jit
def add_products(
    total: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    there: tl.tensor,
    block: tl.int32,
    words: tl.int32,
    x: tl.tensor,
    WHOLE: tl.constexpr,
    WORDS_OF_SCALES: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """total [N, ROWS] F32 + 128 columns of weights times x [128, ROWS] BF16 in fragment order.

    weight [N, 1] and scales [N, 1] are pointers to the first word of each row and to its scales; rows of weights have
    ``words`` int32.
    """
    four = _load_scales(scales, there, block, words, WHOLE, WORDS_OF_SCALES)
    low = fragments(_load_words(weight, there, block * 2, words, WHOLE), four, 0, WARPS)
    high = fragments(_load_words(weight, there, block * 2 + 1, words, WHOLE), four, 1, WARPS)
    both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [total.shape[0], BLOCK])
    return add_product(total, both, x)


@triton.jit
def add_product(total: tl.tensor, weights: tl.tensor, x: tl.tensor) -> tl.tensor:
    return tl.dot(weights, x, total)


@triton.jit
def _load_words(weight: tl.tensor, there: tl.tensor, part: tl.int32, words: tl.int32, WHOLE: tl.constexpr) -> tl.tensor:
    """Codes of 64 columns: [N, 16] int32, zeros beyond the matrix.

    WHOLE: all columns of every block that is asked for are in it.
    """
    word = part * 16 + tl.arange(0, 16)
    mask = there[:, None]
    if not WHOLE:
        mask = mask & (word < words)[None, :]
    return tl.load(weight + word[None, :], mask=mask, other=0)


@triton.jit
def _load_scales(
    scales: tl.tensor,
    there: tl.tensor,
    block: tl.int32,
    words: tl.int32,
    WHOLE: tl.constexpr,
    WORDS_OF_SCALES: tl.constexpr,
) -> tl.tensor:
    """Scales of 128 columns, four bytes in one word: [N, 1] int32."""
    if WORDS_OF_SCALES:
        mask = there[:, None]
        if not WHOLE:
            mask = mask & (block * (BLOCK // 4) < words)
        return tl.load(scales + block, mask=mask, other=0)
    else:
        word = tl.zeros([there.shape[0], 1], tl.int32)
        for q in tl.static_range(4):
            mask = there[:, None] & ((block * 4 + q) * (GROUP // 4) < words)
            byte = tl.load(scales + block * 4 + q, mask=mask, other=0)
            word = word | (byte.to(tl.int32) << (8 * q))
        return word


@triton.jit
def load_rows(
    x: tl.tensor, here: tl.tensor, block: tl.int32, channels: tl.int32, WHOLE: tl.constexpr, INPUT: tl.constexpr
) -> tl.tensor:
    """128 channels of rows, as the right operand: x [ROWS, 1] pointers to the rows -> [128, ROWS] BF16.

    INPUT is ``prepared`` (in fragment order, whole blocks), ``given`` (as it is) or ``q8`` (to be rounded).
    """
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = here[:, None]
    if not WHOLE:
        there = tl.cdiv(channels, BLOCK) * BLOCK if INPUT == "prepared" else channels
        mask = mask & (column < there)[None, :]
    values = tl.load(x + column[None, :], mask=mask, other=0.0)
    if INPUT == "q8":
        values = round_rows_q8(values)
    if INPUT != "prepared":
        values = in_fragment_order(values)
    return tl.trans(values)


@triton.jit
def round_rows_q8(x: tl.tensor) -> tl.tensor:
    """[N, C] BF16 through Q8 and back, C a multiple of 32: as ``quantise.round_q8``, but zeros have no sign.

    In BF16 throughout: a scaled number is at most 16 steps of E4M3, and sums with 192 steps are rounded to whole ones.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.reshape(x, [rows * (columns // GROUP), GROUP // 2, 2]))
    pairs = tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], tl.int32, is_pure=True, pack=1)
    largest = tl.reduce(pairs & 0x7FFF7FFF, 1, _larger_pair, keep_dims=True)
    one, other = (largest << 16).to(tl.float32, bitcast=True), (largest & 0x7FFF0000).to(tl.float32, bitcast=True)
    amax = tl.maximum(tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL), 1e-4)
    exponent, inverse = scale_and_inverse(amax * (1.0 / 448.0))
    scale = (exponent >> 16) * 0x00010001
    factor = (inverse.to(tl.int32, bitcast=True) >> 16) * 0x00010001
    pairs, scale = tl.broadcast(pairs, scale)
    pairs, factor = tl.broadcast(pairs, factor)
    rounded = tl.inline_asm_elementwise(_ROUND_PAIR, "=r,r,r,r", [pairs, factor, scale], tl.int32, is_pure=True, pack=1)
    return tl.reshape(two_values(rounded), [rows, columns])


@triton.jit
def _larger_pair(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["rows", "scale_stride", "share"])
def multiply(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    target: tl.tensor,
    rows: tl.int32,
    channels: tl.int32,
    row_stride: tl.int32,
    group_stride: tl.int32,
    words: tl.int32,
    scale_stride: tl.int32,
    outputs: tl.int32,
    all_outputs: tl.int32,
    share: tl.int32,
    INPUT: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS_OF_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """target = x W by groups, OUTPUTS channels of ROWS rows and ``share`` blocks of 128 inputs a program, BLOCKS at
    once, which divides share.

    x: ``channels`` of group g start at g x group_stride in each row; see :func:`load_rows` for INPUT. weight
    [all_outputs, words] int32, ``outputs`` rows a group; scales [ceil(all_outputs / 32), scale_stride] int32 (four a
    word) or uint8. target [splits, rows, all_outputs] F32 where inputs are split, or BF16. Grid: tiles of rows,
    (group, tile of outputs), splits.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = tl.cdiv(outputs, OUTPUTS)
    group = tl.program_id(1) // tiles
    first = (tl.program_id(1) - group * tiles) * OUTPUTS
    split = tl.program_id(2)
    here = row < rows
    output = first + weight_rows(OUTPUTS, WARPS)
    there = output < outputs
    output += group * outputs
    source = x + row[:, None].to(tl.int64) * row_stride + group * group_stride
    codes = weight + output[:, None].to(tl.int64) * words
    bytes_of = scales + (output // GROUP)[:, None] * scale_stride
    low = split * share
    high = tl.minimum(low + share, tl.cdiv(channels, BLOCK))
    let_next_start()
    wait_for_ahead()
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(low, high, BLOCKS, num_stages=STAGES):
        for number in tl.static_range(BLOCKS):
            block = step + number
            values = load_rows(source, here, block, channels, WHOLE, INPUT)
            total = add_products(total, codes, bytes_of, there, block, words, values, WHOLE, WORDS_OF_SCALES, WARPS)
    column = first + tl.arange(0, OUTPUTS)
    place = (split.to(tl.int64) * rows + row)[:, None] * all_outputs + group * outputs + column[None, :]
    tl.store(
        target + place, tl.trans(total).to(target.dtype.element_ty), mask=here[:, None] & (column < outputs)[None, :]
    )


@triton.jit(do_not_specialize=["rows", "scale_stride", "share"])
def multiply_two(
    x: tl.tensor,
    first_weight: tl.tensor,
    first_scales: tl.tensor,
    second_weight: tl.tensor,
    second_scales: tl.tensor,
    target: tl.tensor,
    rows: tl.int32,
    channels: tl.int32,
    row_stride: tl.int32,
    words: tl.int32,
    scale_stride: tl.int32,
    outputs: tl.int32,
    share: tl.int32,
    INPUT: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS_OF_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """As :func:`multiply`, two matrices of one shape on the same rows: target [splits, rows, 2, outputs]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * OUTPUTS
    split = tl.program_id(2)
    here = row < rows
    output = first + weight_rows(OUTPUTS, WARPS)
    there = output < outputs
    source = x + row[:, None].to(tl.int64) * row_stride
    codes = output[:, None].to(tl.int64) * words
    bytes_of = (output // GROUP)[:, None] * scale_stride
    low = split * share
    high = tl.minimum(low + share, tl.cdiv(channels, BLOCK))
    let_next_start()
    wait_for_ahead()
    one = tl.zeros([OUTPUTS, ROWS], tl.float32)
    two = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(low, high, BLOCKS, num_stages=STAGES):
        for number in tl.static_range(BLOCKS):
            block = step + number
            values = load_rows(source, here, block, channels, WHOLE, INPUT)
            code, scale = first_weight + codes, first_scales + bytes_of
            one = add_products(one, code, scale, there, block, words, values, WHOLE, WORDS_OF_SCALES, WARPS)
            code, scale = second_weight + codes, second_scales + bytes_of
            two = add_products(two, code, scale, there, block, words, values, WHOLE, WORDS_OF_SCALES, WARPS)
    column = first + tl.arange(0, OUTPUTS)
    place = target + (split.to(tl.int64) * rows + row)[:, None] * (2 * outputs) + column[None, :]
    mask = here[:, None] & (column < outputs)[None, :]
    tl.store(place, tl.trans(one).to(target.dtype.element_ty), mask=mask)
    tl.store(place + outputs, tl.trans(two).to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "scale_stride", "share"])
def multiply_pair(
    x: tl.tensor,
    first_weight: tl.tensor,
    first_scales: tl.tensor,
    first_target: tl.tensor,
    second_weight: tl.tensor,
    second_scales: tl.tensor,
    second_target: tl.tensor,
    rows: tl.int32,
    channels: tl.int32,
    row_stride: tl.int32,
    words: tl.int32,
    scale_stride: tl.int32,
    first_outputs: tl.int32,
    second_outputs: tl.int32,
    share: tl.int32,
    INPUT: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS_OF_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """As :func:`multiply` of one group, two matrices on the same rows: tiles of outputs are the first one's, then the
    second one's, each with a target of its own."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = tl.cdiv(first_outputs, OUTPUTS)
    # Chosen, not branched to: the wait below must come before any branch.
    second = tl.program_id(1) >= tiles
    weight = tl.where(second, second_weight, first_weight)
    scales = tl.where(second, second_scales, first_scales)
    target = tl.where(second, second_target, first_target)
    outputs = tl.where(second, second_outputs, first_outputs)
    first = (tl.program_id(1) - tl.where(second, tiles, 0)) * OUTPUTS
    split = tl.program_id(2)
    here = row < rows
    output = first + weight_rows(OUTPUTS, WARPS)
    there = output < outputs
    source = x + row[:, None].to(tl.int64) * row_stride
    codes = weight + output[:, None].to(tl.int64) * words
    bytes_of = scales + (output // GROUP)[:, None] * scale_stride
    low = split * share
    high = tl.minimum(low + share, tl.cdiv(channels, BLOCK))
    let_next_start()
    wait_for_ahead()
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(low, high, BLOCKS, num_stages=STAGES):
        for number in tl.static_range(BLOCKS):
            block = step + number
            values = load_rows(source, here, block, channels, WHOLE, INPUT)
            total = add_products(total, codes, bytes_of, there, block, words, values, WHOLE, WORDS_OF_SCALES, WARPS)
    column = first + tl.arange(0, OUTPUTS)
    place = (split.to(tl.int64) * rows + row)[:, None] * outputs + column[None, :]
    tl.store(
        target + place, tl.trans(total).to(target.dtype.element_ty), mask=here[:, None] & (column < outputs)[None, :]
    )
