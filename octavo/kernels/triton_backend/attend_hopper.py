"""The kernel of ``attend`` for 64 heads of 512 channels on Hopper's tensor cores, with layouts and waits by hand.

Triton's own pipeline lets both groups of warps compute all scores, and unpacks entries through more registers than
there are. Here each group computes half of the scores and half of the values. While the tensor cores work on one tile
of keys, the next is copied (plain keys) or unpacked (packed entries) into the other half of a double buffer. Queries
turn in shared memory before the first product, outputs turn back on their way out of it.

Two rules keep the buffers sound. A group waits for its own products before the barrier behind which its keys may be
overwritten: a barrier alone says only that products were begun. And what threads store, products read through another
proxy: a fence stands between.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.kernels.triton_backend.attend_kernels import LOG2_E, NO_MAXIMUM, UNPACKED_EXPONENT
from octavo.kernels.triton_backend.key_places import NOWHERE

HEADS = gl.constexpr(64)
CHANNELS = gl.constexpr(512)
KEYS = gl.constexpr(64)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
_VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""Of rows in BF16: 16 bytes a thread, 128 contiguous bytes of four rows a warp."""
_BLOCK = gl.constexpr(64)
"""Channels of these 128 bytes: a query turns in whole blocks."""
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))
"""Of the even or the odd channels of a block; pairs lie in one thread."""
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [0, 128]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 16], [0, 32]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
"""Of packed codes: 16 bytes a thread; eight lanes lie in eight rows, so that their stores meet no bank twice."""
_GROUPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 8, 0], [0, 16, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 32, 16],
    )
)
"""Of the values that these codes become, by group of 16 channels."""
_SCALES = gl.constexpr(gl.SliceLayout(2, _GROUPS))
_SPREAD = gl.constexpr(
    """{
    .reg .b32 pair, low, high;
    prmt.b32 pair, $4, 0, 0x1404;
    shr.b32 low, pair, 2;  and.b32 low, low, 0x01C001C0;
    shl.b32 high, pair, 4; and.b32 high, high, 0x80008000;
    or.b32 $0, low, high;
    shr.b32 low, pair, 6;  and.b32 low, low, 0x01C001C0;
    and.b32 high, pair, 0x80008000;
    or.b32 $2, low, high;
    prmt.b32 pair, $4, 0, 0x3424;
    shr.b32 low, pair, 2;  and.b32 low, low, 0x01C001C0;
    shl.b32 high, pair, 4; and.b32 high, high, 0x80008000;
    or.b32 $1, low, high;
    shr.b32 low, pair, 6;  and.b32 low, low, 0x01C001C0;
    and.b32 high, pair, 0x80008000;
    or.b32 $3, low, high;
    }"""
)
"""Four bytes of codes -> the bits of four even and of four odd channels in BF16, two a register, 2^126 too small."""


@gluon.jit(do_not_specialize=["rows", "splits"])
def attend_part_hopper(
    query: gl.tensor,
    latents: gl.tensor,
    sink: gl.tensor,
    entries: gl.tensor,
    distances: gl.tensor,
    used: gl.tensor,
    turns: gl.tensor,
    positions: gl.tensor,
    attended: gl.tensor,
    numerators: gl.tensor,
    maxima: gl.tensor,
    denominators: gl.tensor,
    rows: gl.int32,
    splits: gl.int32,
    heads: gl.constexpr,
    turning: gl.constexpr,
    window_places: gl.constexpr,
    places: gl.constexpr,
    entry_unit: gl.constexpr,
    unit: gl.constexpr,
    scale: gl.constexpr,
    packed: gl.constexpr,
    divided: gl.constexpr,
) -> None:
    """As ``attend_part`` of ``attend_kernels``; heads a multiple of 64, all tensors BF16 but packed entries."""
    row = gl.program_id(0)
    split = gl.program_id(2)
    live = gl.load(positions + row) >= 0
    tiles = (gl.where(live, gl.load(used + row), 0) + KEYS - 1) // KEYS
    share = (tiles + splits - 1) // splits
    low = split * share
    high = gl.minimum(low + share, tiles)
    distances += row.to(gl.int64) * places
    turns += row.to(gl.int64) * (2 * turning)

    q_shared = gl.allocate_shared_memory(gl.bfloat16, [HEADS, CHANNELS], _SHARED)
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, CHANNELS], _SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], _SHARED)
    first_head = gl.program_id(1) * HEADS
    first = (row.to(gl.int64) * heads + first_head) * CHANNELS
    copied_head = gl.arange(0, HEADS, gl.SliceLayout(1, _COPIED))
    copied_channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, _COPIED))
    within = gl.expand_dims(copied_head, 1) * CHANNELS + gl.expand_dims(copied_channel, 0)
    async_copy.async_copy_global_to_shared(q_shared, query + first + within)
    async_copy.commit_group()

    maximum = gl.full([HEADS], NO_MAXIMUM, gl.float32, gl.SliceLayout(1, _SCORES))
    denominator = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    numerator = gl.zeros([HEADS, CHANNELS], gl.float32, _VALUES)
    window_tiles: gl.constexpr = window_places // KEYS
    plain_high = gl.minimum(high, window_tiles) if packed else high

    scored = gl.arange(0, KEYS, gl.SliceLayout(0, _SCORES))
    copied = gl.arange(0, KEYS, gl.SliceLayout(1, _COPIED))
    ahead = _distances(distances, low, plain_high, copied)
    _copy(k_shared.index(low & 1), latents, ahead, unit)
    ahead = _distances(distances, low + 1, plain_high, copied)
    async_copy.wait_group(1)
    for block in gl.static_range((CHANNELS - 2 * turning) // _BLOCK, CHANNELS // _BLOCK):
        part = q_shared.slice(block * _BLOCK, _BLOCK, dim=1)
        part.store(_turned(part.load(_COPIED), turns, block * _BLOCK, turning, inverse=False))
    fence_async_shared()
    async_copy.wait_group(0)
    fence_async_shared()
    for tile in range(low, plain_high):
        _copy(k_shared.index((tile + 1) & 1), latents, ahead, unit)
        ahead = _distances(distances, tile + 2, plain_high, copied)
        valid = gl.load(distances + tile * KEYS + scored) != NOWHERE
        maximum, denominator, products = _begin_tile(
            q_shared, k_shared.index(tile & 1), p_shared, valid, maximum, denominator, numerator, scale * LOG2_E, 0
        )
        numerator = warpgroup_mma_wait(0, deps=[products])
        async_copy.wait_group(0)
        fence_async_shared()

    if packed:
        packed_low = gl.maximum(low, window_tiles)
        coded = gl.arange(0, KEYS, gl.SliceLayout(1, _CODES))
        codes, scales = _load(entries, _distances(distances, packed_low, high, coded), entry_unit)
        after = _distances(distances, packed_low + 1, high, coded)
        _unpack(k_shared.index(packed_low & 1), codes, scales)
        fence_async_shared()
        for tile in range(packed_low, high):
            codes, scales = _load(entries, after, entry_unit)
            after = _distances(distances, tile + 2, high, coded)
            valid = gl.load(distances + tile * KEYS + scored) != NOWHERE
            maximum, denominator, products = _begin_tile(
                q_shared,
                k_shared.index(tile & 1),
                p_shared,
                valid,
                maximum,
                denominator,
                numerator,
                scale * LOG2_E,
                UNPACKED_EXPONENT,
            )
            _unpack(k_shared.index((tile + 1) & 1), codes, scales)
            fence_async_shared()
            numerator = warpgroup_mma_wait(0, deps=[products])

    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, _SCORES))
    if not divided:
        denominator += gl.exp2(gl.load(sink + head) * LOG2_E - maximum)
        factor = gl.convert_layout(gl.where(live, 1.0 / denominator, 0.0), gl.SliceLayout(1, _VALUES))
        q_shared.store((numerator * gl.expand_dims(factor, 1)).to(gl.bfloat16))
        block_channel = gl.arange(0, _BLOCK, gl.SliceLayout(0, _COPIED))
        within = gl.expand_dims(copied_head, 1) * CHANNELS + gl.expand_dims(block_channel, 0)
        for block in gl.static_range(CHANNELS // _BLOCK):
            result = q_shared.slice(block * _BLOCK, _BLOCK, dim=1).load(_COPIED)
            if (block + 1) * _BLOCK > CHANNELS - 2 * turning:
                result = _turned(result, turns, block * _BLOCK, turning, inverse=True)
            gl.store(attended + first + block * _BLOCK + within, result)
    else:
        at = (split.to(gl.int64) * rows + row) * heads
        gl.store(maxima + at + head, maximum)
        gl.store(denominators + at + head, denominator)
        value_head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, _VALUES))
        value_channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, _VALUES))
        value = gl.expand_dims(value_head, 1) * CHANNELS + gl.expand_dims(value_channel, 0)
        gl.store(numerators + at * CHANNELS + value, numerator, mask=low < high)


@gluon.jit
def _turned(
    x: gl.tensor, turns: gl.tensor, first: gl.constexpr, turning: gl.constexpr, inverse: gl.constexpr
) -> gl.tensor:
    """Channels from ``first`` on of all heads, [HEADS, 64] BF16 as ``_COPIED``, of which those that turn are turned."""
    pair = gl.arange(0, _BLOCK // 2, gl.SliceLayout(0, _PAIRS)) + (first // 2 - (CHANNELS // 2 - turning))
    cosine = gl.expand_dims(gl.load(turns + pair, mask=pair >= 0, other=1.0), 0)
    sine = gl.expand_dims(gl.load(turns + turning + pair, mask=pair >= 0, other=0.0), 0)
    if inverse:
        sine = -sine
    real, imaginary = gl.split(x.to(gl.float32).reshape([HEADS, _BLOCK // 2, 2]))
    real = gl.convert_layout(real, _PAIRS, assert_trivial=True)
    imaginary = gl.convert_layout(imaginary, _PAIRS, assert_trivial=True)
    both = gl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine).to(gl.bfloat16)
    both = gl.convert_layout(both.reshape([HEADS, _BLOCK]), _COPIED, assert_trivial=True)
    channel = gl.arange(0, _BLOCK, gl.SliceLayout(0, _COPIED)) + first
    return gl.where(gl.expand_dims(channel >= CHANNELS - 2 * turning, 0), both, x)


@gluon.jit
def _distances(distances: gl.tensor, tile: gl.tensor, high: gl.tensor, place: gl.tensor) -> gl.tensor:
    """Of the keys of a tile; nowhere from tile ``high`` on."""
    return gl.load(distances + tile * KEYS + place, mask=(place >= 0) & (tile < high), other=NOWHERE)


@gluon.jit
def _copy(shared: gl.tensor, latents: gl.tensor, distance: gl.tensor, unit: gl.constexpr) -> None:
    """Begin to copy plain keys to shared memory; zeros where there is none."""
    channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, _COPIED))
    key = gl.expand_dims(latents + distance * unit, 1) + gl.expand_dims(channel, 0)
    wanted = gl.expand_dims(distance != NOWHERE, 1) & gl.expand_dims(channel >= 0, 0)
    async_copy.async_copy_global_to_shared(shared, key, wanted)
    async_copy.commit_group()


@gluon.jit
def _load(entries: gl.tensor, distance: gl.tensor, unit: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Codes [KEYS, 256] and scales [KEYS, 32] of packed entries, in registers; zeros where there is none."""
    entry = entries + distance * unit
    byte = gl.arange(0, CHANNELS // 2, gl.SliceLayout(0, _CODES))
    wanted = gl.expand_dims(distance != NOWHERE, 1) & gl.expand_dims(byte >= 0, 0)
    codes = gl.load(gl.expand_dims(entry, 1) + gl.expand_dims(byte, 0), mask=wanted, other=0)
    distance = gl.convert_layout(distance, gl.SliceLayout(1, _SCALES))
    group = gl.arange(0, CHANNELS // 16, gl.SliceLayout(0, _SCALES))
    entry = entries + distance * unit
    wanted = gl.expand_dims(distance != NOWHERE, 1) & gl.expand_dims(group >= 0, 0)
    scales = gl.load(gl.expand_dims(entry, 1) + gl.expand_dims(group + CHANNELS // 2, 0), mask=wanted, other=0)
    return codes, scales


@gluon.jit
def _unpack(shared: gl.tensor, codes: gl.tensor, scales: gl.tensor) -> None:
    """Packed entries to BF16 keys in shared memory, 2^UNPACKED_EXPONENT too small."""
    even, odd = gl.inline_asm_elementwise(
        _SPREAD, "=r,=r,=r,=r,r", [codes], dtype=(gl.uint16, gl.uint16), is_pure=True, pack=4
    )
    factor = (scales.to(gl.float8e4nv, bitcast=True).to(gl.float32) * 2.0**118).to(gl.bfloat16)
    factor = gl.expand_dims(factor, 2) + gl.zeros([KEYS, CHANNELS // 16, 16], gl.bfloat16, _GROUPS)
    factor = factor.reshape([KEYS, CHANNELS])
    values = gl.join(even, odd).reshape([KEYS, CHANNELS]).to(gl.bfloat16, bitcast=True)
    shared.store(gl.convert_layout(values, factor.type.layout, assert_trivial=True) * factor)


@gluon.jit
def _begin_tile(
    q_shared: gl.tensor,
    keys: gl.tensor,
    p_shared: gl.tensor,
    valid: gl.tensor,
    maximum: gl.tensor,
    denominator: gl.tensor,
    numerator: gl.tensor,
    scale: gl.constexpr,
    exponent: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """One step of the online softmax; the products with the values are begun, not awaited.

    Keys are values too; they are 2^exponent too small.
    """
    scores = gl.zeros([HEADS, KEYS], gl.float32, _SCORES)
    scores = warpgroup_mma(q_shared, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores]) * (scale * 2.0**exponent)
    scores = gl.where(gl.expand_dims(valid, 0), scores, -float("inf"))
    previous = maximum
    maximum = gl.maximum(previous, gl.max(scores, axis=1))
    rescale = gl.exp2(previous - maximum)
    shares = gl.exp2(scores - gl.expand_dims(maximum, 1))
    denominator = denominator * rescale + gl.sum(shares, axis=1)
    p_shared.store((shares * 2.0**exponent).to(gl.bfloat16))
    numerator *= gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, _VALUES)), 1)
    fence_async_shared()
    products = warpgroup_mma(p_shared, keys, numerator, is_async=True)
    return maximum, denominator, products
