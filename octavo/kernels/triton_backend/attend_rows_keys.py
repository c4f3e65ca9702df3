"""Keys and queries for ``attend_rows_hopper``: a group of four warps copies them, or unpacks entries, into its buffers.

Plain keys are copied and counted in as their copies end. Packed entries are loaded a tile ahead, eight channels in a
word, since loops carry a byte in a register of its own. They become exact BF16 values: two tables of bytes give those
of a value without sign, and a product by the scale does the rest.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from octavo.kernels.triton_backend.attend_hopper import CHANNELS, HEADS, KEYS
from octavo.kernels.triton_backend.key_places import NOWHERE

HALF = gl.constexpr(256)
"""Channels of one buffer, and of a group of warps that consumes."""
COPYING_THREADS = gl.constexpr(128)
BUFFER = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_BUFFER_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
"""The same bytes as ``BUFFER``, two channels a word."""
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Of rows in BF16: 16 bytes a thread, 128 contiguous bytes of four rows a warp."""
_BLOCK = gl.constexpr(64)
"""Channels of these 128 bytes: a query turns in whole blocks."""
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""Of the even or the odd channels of a block; pairs lie in one thread."""
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [32, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
"""Of words of codes, a quarter of the channels: 16 bytes a thread; eight lanes lie in eight rows, so that their stores
meet no bank twice."""
_FOURS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [32, 0, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4],
    )
)
"""The same words by four: two groups of 16 channels, whose scales are two bytes."""
_SCALES = gl.constexpr(gl.SliceLayout(2, _FOURS))
_TO_VALUES = gl.constexpr(
    """{
    .reg .b32 m, h, l, s, f;
    and.b32 m, $4, 0x77777777;
    prmt.b32 h, 0x3F3F3F00, 0x40404040, m;
    prmt.b32 l, 0xC0800000, 0xC0804000, m;
    prmt.b32 s, 0x40404040, 0x40404040, $4;
    mad.lo.u32 h, s, 2, h;
    prmt.b32 $0, l, h, 0x5140;
    prmt.b32 $1, l, h, 0x7362;
    shr.u32 m, m, 16;
    shr.u32 f, $4, 16;
    prmt.b32 h, 0x3F3F3F00, 0x40404040, m;
    prmt.b32 l, 0xC0800000, 0xC0804000, m;
    prmt.b32 s, 0x40404040, 0x40404040, f;
    mad.lo.u32 h, s, 2, h;
    prmt.b32 $2, l, h, 0x5140;
    prmt.b32 $3, l, h, 0x7362;
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $5;
    mul.rn.bf16x2 $3, $3, $5;
    }"""
)
"""A word of eight codes and the opposite of their scale, twice in BF16 -> eight channels in BF16, two a register.

Of four codes at a time: high bytes, low bytes, and 0x40 where a code has no sign (a selector with its highest bit set
copies the highest bit of a byte, which is 0). Twice that is the sign of the opposite value, hence the scale's.
"""
_TO_FACTOR = gl.constexpr(
    """{
    .reg .b32 f, g;
    mov.b32 g, 0xFB80FB80;
    prmt.b32 f, $1, 0, $2;
    shl.b32 f, f, 4;
    mul.rn.bf16x2 $0, f, g;
    }"""
)
"""A byte that a selector copies, an E4M3 scale not below zero -> its opposite, twice in BF16.

Its bits, moved to those of BF16, are a value 2^120 times smaller. The code of NaN, 127, counts as 480; ``publish`` does
not write it.
"""


@gluon.jit
def pairs_of(row, used, positions):
    """Pairs of tiles that hold a row's keys; none of a dead row."""
    held = gl.where(gl.load(positions + row) >= 0, gl.load(used + row), 0)
    return (held + 2 * KEYS - 1) // (2 * KEYS)


@gluon.jit
def produce(
    buffers,
    barriers,
    row_keys,
    query,
    latents,
    entries,
    turns,
    rows,
    first_head,
    heads: gl.constexpr,
    turning: gl.constexpr,
    window_places: gl.constexpr,
    places: gl.constexpr,
    entry_unit: gl.constexpr,
    unit: gl.constexpr,
    packed: gl.constexpr,
):
    """Each row's query, turned, and its keys in order, as soon as their places are free.

    What a tile needs is loaded behind the last fence of the one before: a fence waits for loads that are under way.
    """
    q_shared = buffers[0]
    k_shared = buffers[1]
    full = barriers[0]
    free = barriers[1]
    asked = barriers[3]
    distances = row_keys[0]
    used = row_keys[2]
    positions = row_keys[3]
    copied = gl.arange(0, KEYS, gl.SliceLayout(1, _COPIED))
    coded = gl.arange(0, KEYS, gl.SliceLayout(1, _CODES))
    channel = gl.arange(0, HALF, gl.SliceLayout(0, _COPIED))
    within = gl.expand_dims(copied, 1) * CHANNELS + gl.expand_dims(channel, 0)
    done = 0
    turn = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        pairs = pairs_of(row, used, positions)
        tiles = 2 * pairs
        row_distances = distances + row.to(gl.int64) * places
        row_turns = turns + row.to(gl.int64) * (2 * turning)
        if pairs > 0:
            plain_high = gl.minimum(tiles, window_places // KEYS) if packed else tiles
            ahead = _distances(row_distances, 0, copied, places)
            mbarrier.wait(asked.index(1), (turn & 1) ^ 1)
            first = query + (row.to(gl.int64) * heads + first_head) * CHANNELS
            async_copy.async_copy_global_to_shared(q_shared.index(0), first + within)
            async_copy.async_copy_global_to_shared(q_shared.index(1), first + HALF + within)
            async_copy.commit_group()
            for tile in range(plain_high):
                half = (tile & 1) * 2
                phase = ((done + tile // 2) & 1) ^ 1
                key = gl.expand_dims(latents + ahead * unit, 1) + gl.expand_dims(channel, 0)
                wanted = gl.expand_dims(ahead != NOWHERE, 1) & gl.expand_dims(channel >= 0, 0)
                mbarrier.wait(free.index(half), phase)
                async_copy.async_copy_global_to_shared(k_shared.index(half), key, wanted)
                async_copy.mbarrier_arrive(full.index(half), increment_count=False)
                async_copy.commit_group()
                mbarrier.wait(free.index(half + 1), phase)
                async_copy.async_copy_global_to_shared(k_shared.index(half + 1), key + HALF, wanted)
                async_copy.mbarrier_arrive(full.index(half + 1), increment_count=False)
                async_copy.commit_group()
                ahead = _distances(row_distances, tile + 1, copied, places)
                if tile == 1:
                    # The query, behind which four halves of keys were begun.
                    async_copy.wait_group(4)
                    for block in gl.static_range((CHANNELS - 2 * turning) // _BLOCK, CHANNELS // _BLOCK):
                        part = q_shared.index(block // 4).slice(block % 4 * _BLOCK, _BLOCK, dim=1)
                        part.store(_turned(part.load(_COPIED), row_turns, block * _BLOCK, turning))
                    fence_async_shared()
                    mbarrier.arrive(asked.index(0))
            if packed:
                low: gl.constexpr = window_places // KEYS
                distance = _distances(row_distances, low, coded, places)
                codes0, scales0 = _load(entries, distance, entry_unit, 0)
                codes1, scales1 = _load(entries, distance, entry_unit, 1)
                codes2, scales2 = _load(entries, distance, entry_unit, 2)
                codes3, scales3 = _load(entries, distance, entry_unit, 3)
                distance = _distances(row_distances, low + 1, coded, places)
                for tile in range(low, tiles):
                    half = (tile & 1) * 2
                    phase = ((done + tile // 2) & 1) ^ 1
                    left = k_shared.index(half)._reinterpret(gl.int32, [KEYS, HALF // 2], _BUFFER_WORDS)
                    right = k_shared.index(half + 1)._reinterpret(gl.int32, [KEYS, HALF // 2], _BUFFER_WORDS)
                    mbarrier.wait(free.index(half), phase)
                    _unpack(left.slice(0, HALF // 4, dim=1), codes0, scales0)
                    _unpack(left.slice(HALF // 4, HALF // 4, dim=1), codes1, scales1)
                    fence_async_shared()
                    mbarrier.arrive(full.index(half), count=COPYING_THREADS)
                    mbarrier.wait(free.index(half + 1), phase)
                    _unpack(right.slice(0, HALF // 4, dim=1), codes2, scales2)
                    _unpack(right.slice(HALF // 4, HALF // 4, dim=1), codes3, scales3)
                    fence_async_shared()
                    mbarrier.arrive(full.index(half + 1), count=COPYING_THREADS)
                    codes0, scales0 = _load(entries, distance, entry_unit, 0)
                    codes1, scales1 = _load(entries, distance, entry_unit, 1)
                    codes2, scales2 = _load(entries, distance, entry_unit, 2)
                    codes3, scales3 = _load(entries, distance, entry_unit, 3)
                    distance = _distances(row_distances, tile + 2, coded, places)
        done += pairs
        turn += gl.where(pairs > 0, 1, 0)


@gluon.jit
def _turned(x, turns, first: gl.constexpr, turning: gl.constexpr):
    """Channels from ``first`` on of all heads, [HEADS, 64] BF16 as ``_COPIED``, of which those that turn are turned."""
    pair = gl.arange(0, _BLOCK // 2, gl.SliceLayout(0, _PAIRS)) + (first // 2 - (CHANNELS // 2 - turning))
    cosine = gl.expand_dims(gl.load(turns + pair, mask=pair >= 0, other=1.0), 0)
    sine = gl.expand_dims(gl.load(turns + turning + pair, mask=pair >= 0, other=0.0), 0)
    real, imaginary = gl.split(x.to(gl.float32).reshape([HEADS, _BLOCK // 2, 2]))
    real = gl.convert_layout(real, _PAIRS, assert_trivial=True)
    imaginary = gl.convert_layout(imaginary, _PAIRS, assert_trivial=True)
    both = gl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine).to(gl.bfloat16)
    both = gl.convert_layout(both.reshape([HEADS, _BLOCK]), _COPIED, assert_trivial=True)
    channel = gl.arange(0, _BLOCK, gl.SliceLayout(0, _COPIED)) + first
    return gl.where(gl.expand_dims(channel >= CHANNELS - 2 * turning, 0), both, x)


@gluon.jit
def _distances(distances, tile, place, places: gl.constexpr):
    """Of the keys of a tile; nowhere behind the last place."""
    at = tile * KEYS + place
    return gl.load(distances + at, mask=at < places, other=NOWHERE)


@gluon.jit
def _load(entries, distance, unit: gl.constexpr, quarter: gl.constexpr):
    """Words of codes [KEYS, 16] and scales [KEYS, 4], two each, of a quarter of the channels; zeros where none is."""
    entry = entries + distance * unit
    wanted = distance != NOWHERE
    word = gl.arange(0, 16, gl.SliceLayout(0, _CODES)) + quarter * 16
    at = gl.expand_dims(entry.to(gl.pointer_type(gl.int32), bitcast=True), 1) + gl.expand_dims(word, 0)
    codes = gl.load(at, mask=gl.expand_dims(wanted, 1) & gl.expand_dims(word >= 0, 0), other=0)
    entry = gl.convert_layout(entry, gl.SliceLayout(1, _SCALES))
    wanted = gl.convert_layout(wanted, gl.SliceLayout(1, _SCALES))
    pair = gl.arange(0, 4, gl.SliceLayout(0, _SCALES)) + (CHANNELS // 4 + quarter * 4)
    at = gl.expand_dims(entry.to(gl.pointer_type(gl.uint16), bitcast=True), 1) + gl.expand_dims(pair, 0)
    scales = gl.load(at, mask=gl.expand_dims(wanted, 1) & gl.expand_dims(pair >= 0, 0), other=0)
    return codes, scales.to(gl.int32)


@gluon.jit
def _unpack(shared, codes, scales):
    """A quarter of the channels of packed entries to BF16 keys in shared memory, seen as words."""
    scales = gl.expand_dims(scales, 2) + gl.zeros([KEYS, 4, 4], gl.int32, _FOURS)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, _FOURS)))
    # Two words have the scale in the low byte, two the other; its copies lie in both halves of a word.
    selector = gl.where(word >= 2, 0x4141, 0x4040)
    selector = gl.expand_dims(gl.expand_dims(selector, 0), 0) + gl.zeros([KEYS, 4, 4], gl.int32, _FOURS)
    factor = gl.inline_asm_elementwise(_TO_FACTOR, "=r,r,r", [scales, selector], dtype=gl.int32, is_pure=True, pack=1)
    factor = gl.convert_layout(factor.reshape([KEYS, 16]), _CODES, assert_trivial=True)
    values0, values1, values2, values3 = gl.inline_asm_elementwise(
        _TO_VALUES,
        "=&r,=&r,=&r,=&r,r,r",
        [codes, factor],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    values = gl.join(gl.join(values0, values2), gl.join(values1, values3))
    shared.store(values.reshape([KEYS, HALF // 4]))
