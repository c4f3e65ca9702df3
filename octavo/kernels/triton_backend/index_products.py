"""Products of index queries and keys on tensor cores, from pool to score.

A tile is some keys, the left factor; the columns of the right one are the heads of one or several rows. Keys are asked
for where each thread will multiply them, so that nothing moves between threads from the pool to the product.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

SHIFT = tl.constexpr(64)
"""Unpacked keys are 2^64 too small and queries 2^64 too large: then one product in BF16 scales a code."""

UNPACK = tl.constexpr("""{
.reg .b32 factor, value, sign;
mad.lo.u32 factor, $9, 0x00800080, 0;
shl.b32 value, $8, 6; and.b32 value, value, 0x01c001c0;
shl.b32 sign, $8, 12; and.b32 sign, sign, 0x80008000;
or.b32 value, value, sign; mul.bf16x2 value, value, factor; mov.b32 {$0, $1}, value;
shl.b32 value, $8, 2; and.b32 value, value, 0x01c001c0;
shl.b32 sign, $8, 8; and.b32 sign, sign, 0x80008000;
or.b32 value, value, sign; mul.bf16x2 value, value, factor; mov.b32 {$2, $3}, value;
shr.u32 value, $8, 2; and.b32 value, value, 0x01c001c0;
shl.b32 sign, $8, 4; and.b32 sign, sign, 0x80008000;
or.b32 value, value, sign; mul.bf16x2 value, value, factor; mov.b32 {$4, $5}, value;
shr.u32 value, $8, 6; and.b32 value, value, 0x01c001c0;
and.b32 sign, $8, 0x80008000;
or.b32 value, value, sign; mul.bf16x2 value, value, factor; mov.b32 {$6, $7}, value;
}""")
"""Eight codes and the exponent of a factor -> the values BF16 of nibbles 0, 4, 1, 5, 2, 6, 3, 7."""

WEIGH = tl.constexpr("""{
.reg .b32 pair;
cvt.rn.relu.bf16x2.f32 pair, $3, $2;
mul.bf16x2 pair, pair, $4;
shl.b32 $0, pair, 16;
and.b32 $1, pair, 0xffff0000;
}""")
"""Two products F32 and two weights BF16 -> two weighted products, rounded to BF16 before and after weighting."""


@triton.jit
def queries_of(
    query,
    row,
    mine,
    heads: tl.constexpr,
    channels: tl.constexpr,
    packed: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Queries as a right factor with columns (head, row): of even and odd channels, where keys are packed."""
    column = tl.arange(0, HEADS * ROWS)
    head = column // ROWS
    of_row = tl.gather(row, column % ROWS, 0)
    given = (head < heads) & (tl.gather(mine.to(tl.int32), column % ROWS, 0) > 0)
    base = query + (of_row.to(tl.int64) * heads + head) * channels
    channel = tl.arange(0, CHANNELS)
    known = given[:, None] & (channel < channels)[None, :]
    q = tl.load(base[:, None] + channel[None, :], mask=known, other=0.0)
    if packed:
        # From (group, word, nibble div 4, nibble mod 4) to the order in which keys are unpacked.
        q = (q.to(tl.float32) * 2.0**SHIFT).to(q.dtype)
        q = tl.reshape(q, (HEADS * ROWS, CHANNELS // 32, 4, 2, 4))
        q = tl.reshape(tl.permute(q, (0, 1, 4, 2, 3)), (HEADS * ROWS, CHANNELS))
    return tl.trans(q)


@triton.jit
def weights_of(weights, row, mine, scale, heads: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Scaled weights [HEADS x ROWS] of the columns of :func:`queries_of`, in their own dtype."""
    head = tl.arange(0, HEADS)
    at = weights + row.to(tl.int64)[None, :] * heads + head[:, None]
    w = tl.load(at, mask=(head < heads)[:, None] & mine[None, :], other=0.0)
    return tl.reshape((w.to(tl.float32) * scale).to(w.dtype), (HEADS * ROWS,))


@triton.jit
def _keys(half: tl.constexpr, packed: tl.constexpr, KEYS: tl.constexpr):
    """Which keys of a tile are loaded together: all, or, if packed, the first or last 8 of every 16.

    Then a thread unpacks just what it holds of the left factor of a product.
    """
    if packed:
        key = tl.arange(0, KEYS // 2)
        return key // 8 * 16 + half * 8 + key % 8
    else:
        return tl.arange(0, KEYS)


@triton.jit
def block_numbers(
    tile,
    half: tl.constexpr,
    chosen,
    stream,
    own_list: tl.constexpr,
    packed: tl.constexpr,
    block_size: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Block numbers of keys of a tile where these come from a list."""
    place = tile * KEYS + _keys(half, packed, KEYS)
    if own_list:
        return tl.load(chosen + place // block_size, mask=place < stream, other=0)
    else:
        return place


@triton.jit
def pages_of(
    tile,
    half: tl.constexpr,
    block,
    table,
    stream,
    length,
    own_list: tl.constexpr,
    packed: tl.constexpr,
    block_size: tl.constexpr,
    page_entries: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(place in the page, page) of keys of a tile, int32; what lies beyond the stream has a place of page 0.

    KEYS is a multiple of ``page_entries``, so that tiles begin where pages do.
    """
    key = _keys(half, packed, KEYS)
    known = tile * KEYS + key < stream
    if own_list:
        entry = block * block_size + key % block_size
        page = tl.load(table + entry // page_entries, mask=known & (entry < length), other=0)
        return entry % page_entries, page
    else:
        page = tl.load(table + tile * (KEYS // page_entries) + key // page_entries, mask=known, other=0)
        return key % page_entries, page


@triton.jit
def stored_keys(
    keys,
    place,
    page,
    channels: tl.constexpr,
    page_entries: tl.constexpr,
    packed: tl.constexpr,
    aligned: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """What the pool holds of keys: values [keys, CHANNELS], or of each group its four words [keys, 4], and the scales.

    Scales are a word too, [keys, 1]; keys whose words are ``aligned`` are of 128 channels. Nothing is masked but padded
    channels: the scores of what lies beyond the stream count for nothing.
    """
    if packed:
        width: tl.constexpr = channels // 2 + channels // 32
        unit: tl.constexpr = 4 if aligned else 1
        source = keys
        if aligned:
            source = keys.to(tl.pointer_type(tl.int32), bitcast=True)
        base = (page.to(tl.int64) * (page_entries * width // unit) + place * (width // unit))[:, None]
        at = source + (base + tl.arange(0, 4)[None, :] * (4 // unit))
        return (
            _word(at, 0, channels, aligned),
            _word(at, 1, channels, aligned),
            _word(at, 2, channels, aligned),
            _word(at, 3, channels, aligned),
            _scales(source + base + channels // 2 // unit, channels, aligned),
        )
    else:
        channel = tl.arange(0, CHANNELS)
        base = (keys + page.to(tl.int64) * (page_entries * channels) + place * channels)[:, None]
        if channels == CHANNELS:
            value = tl.load(base + channel[None, :])
        else:
            value = tl.load(base + channel[None, :], mask=(channel < channels)[None, :], other=0.0)
        return value, value, value, value, value


@triton.jit
def _word(at, group: tl.constexpr, channels: tl.constexpr, aligned: tl.constexpr):
    """Four bytes of a group as an int32; 0 where there is no such group."""
    if group * 32 >= channels:
        return tl.zeros(at.shape, tl.int32)
    elif aligned:
        return tl.load(at + group * 4)
    else:
        at += group * 16
        low = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
        return low | (tl.load(at + 2).to(tl.int32) << 16) | (tl.load(at + 3).to(tl.int32) << 24)


@triton.jit
def _scales(at, channels: tl.constexpr, aligned: tl.constexpr):
    """The scale bytes of up to four groups as an int32."""
    if aligned:
        return tl.load(at)
    else:
        scales = tl.zeros(at.shape, tl.int32)
        for group in tl.static_range(channels // 32):
            scales |= tl.load(at + group).to(tl.int32) << (8 * group)
        return scales


@triton.jit
def _unpack(word_0, word_1, word_2, word_3, scales):
    """Words [keys, 4] of four groups and their scale bytes -> [keys, 4, 32] BF16, 2^SHIFT too small.

    Bits of the last index, from the highest: nibble div 4, nibble mod 2, nibble div 2 mod 2, group mod 2, group div 2.
    The three low bits of an E2M1 code, put on the lowest exponent bits, mean 2^126 times less.
    """
    a = _nibbles(word_0, (scales & 255) + (126 - SHIFT))
    b = _nibbles(word_1, ((scales >> 8) & 255) + (126 - SHIFT))
    c = _nibbles(word_2, ((scales >> 16) & 255) + (126 - SHIFT))
    d = _nibbles(word_3, ((scales >> 24) & 255) + (126 - SHIFT))
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _nibbles(word, exponent):
    """[keys, 4] -> values [keys, 4, 2, 2, 2] of the nibbles by their number div 4, mod 2, div 2 mod 2."""
    a, e, b, f, c, g, d, h = unpack_words(word, exponent)
    even = tl.join(tl.join(a, e), tl.join(b, f))
    return tl.join(even, tl.join(tl.join(c, g), tl.join(d, h)))


@triton.jit
def unpack_words(word, exponent):
    """Eight codes a word, int32, and the exponent of their factor -> the values of nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
    return tl.inline_asm_elementwise(
        UNPACK,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [word, exponent],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _interleave(upper, lower, KEYS: tl.constexpr):
    """Both halves of the keys, [KEYS / 2, 4, 2, 2, 2, 2, 2] each -> [KEYS, 128], in the order of queries."""
    found = tl.reshape(tl.join(upper, lower), (KEYS // 16, 8, 4, 2, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(found, (0, 8, 1, 7, 6, 5, 4, 2, 3)), (KEYS, 128))


@triton.jit
def score_codes(found, q, w, ROWS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr):
    """Codes [KEYS, ROWS] int32 of the scores of a tile: BF16 after product, weighting and sum (spec/model.md 3.7)."""
    products = tl.dot(found, q, input_precision="ieee")
    score = tl.sum(tl.reshape(weigh(products, w), (KEYS, HEADS, ROWS)), axis=1)
    bits = score.to(tl.int32, bitcast=True)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def weigh(products, w):
    """Products [KEYS, columns] F32, clamped at zero, times weights [columns] BF16: F32, rounded to BF16 twice."""
    return tl.inline_asm_elementwise(
        WEIGH, "=r,=r,r,r,r", [products, w[None, :]], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def found_keys(
    word_0,
    word_1,
    word_2,
    word_3,
    scales,
    word_4,
    word_5,
    word_6,
    word_7,
    second_scales,
    KEYS: tl.constexpr,
):
    """Words and scales of both halves of a tile's keys -> [KEYS, 128], channels in the order of :func:`queries_of`."""
    upper = _unpack(word_0, word_1, word_2, word_3, scales)
    lower = _unpack(word_4, word_5, word_6, word_7, second_scales)
    return _interleave(upper, lower, KEYS)
