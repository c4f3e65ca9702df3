"""The kernel of ``attend`` for whole rows on Hopper: as many programs as processors, each with three groups of warps.

Two groups consume: one takes the scores of every even tile of keys, the other those of every odd tile, and each adds
one half of the channels of every tile. While one takes a softmax, the tensor cores have the other's products. A third
group (``attend_rows_keys``) copies or unpacks keys ahead of them. Tiles come in pairs; a row of an odd number has one
that is empty.

Maxima and denominators go from tile to tile through shared memory, with the probabilities. Barriers, one phase a pair
or a row: ``full`` and ``free`` of each half (channels) of both tiles, ``ready`` when the probabilities of a tile are
stored, ``asked`` when the query has come and when nobody reads it any more. No other barrier is needed: who waits for
new keys knows that the other group has left all that came before them.

Rules that keep this fast:

* Products are not under way across the end of a loop, or ptxas serialises all of them: the last pair stands apart.
* Buffers are indexed by a zero that the compiler does not see through. It would compute the operands' addresses once,
  before the loops, and they would not fit into registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.kernels.triton_backend.attend_hopper import CHANNELS, HEADS, KEYS
from octavo.kernels.triton_backend.attend_kernels import LOG2_E, NO_MAXIMUM
from octavo.kernels.triton_backend.attend_rows_keys import BUFFER, COPYING_THREADS, HALF, pairs_of, produce
from octavo.kernels.triton_backend.key_places import NOWHERE

_SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
_REGISTERS = gl.constexpr(216)
"""Of a thread that consumes; twice this and 72 for one that produces are the 504 of a thread of each."""
_BLOCK = gl.constexpr(64)
"""Channels that are written at once, and turn at once."""
_WRITTEN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
"""Of a block of outputs: 16 bytes a thread, from the four lanes that have them."""


@gluon.jit(do_not_specialize=["rows"])
def attend_rows_hopper(
    query,
    latents,
    sink,
    entries,
    distances,
    words,
    used,
    turns,
    positions,
    attended,
    rows,
    heads: gl.constexpr,
    turning: gl.constexpr,
    window_places: gl.constexpr,
    places: gl.constexpr,
    word_places: gl.constexpr,
    entry_unit: gl.constexpr,
    unit: gl.constexpr,
    scale: gl.constexpr,
    packed: gl.constexpr,
):
    """Rows of ``attended``; tensors as in the operator and in ``key_places``, contiguous, BF16 but packed entries.

    A program takes every so many-th row, 64 heads of it; ``window_places`` are at least two tiles.
    """
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], BUFFER)
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, HALF], BUFFER)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], BUFFER)
    maxima = gl.allocate_shared_memory(gl.float32, [2, HEADS], _VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], _VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=COPYING_THREADS)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(asked.index(i), count=1 + i)
    fence_async_shared()
    first_head = gl.program_id(1) * HEADS
    buffers = (q_shared, k_shared, p_shared, maxima, sums)
    barriers = (full, free, ready, asked)
    keys = (distances, words, used, positions)
    outputs = (sink, turns, attended)
    gl.warp_specialize(
        [
            (
                produce,
                (
                    buffers,
                    barriers,
                    keys,
                    query,
                    latents,
                    entries,
                    turns,
                    rows,
                    first_head,
                    heads,
                    turning,
                    window_places,
                    places,
                    entry_unit,
                    unit,
                    packed,
                ),
            ),
            (
                _consume_even,
                (
                    buffers,
                    barriers,
                    keys,
                    outputs,
                    rows,
                    first_head,
                    heads,
                    turning,
                    window_places,
                    places,
                    word_places,
                    scale,
                    packed,
                ),
            ),
            (
                _consume_odd,
                (
                    buffers,
                    barriers,
                    keys,
                    outputs,
                    rows,
                    first_head,
                    heads,
                    turning,
                    window_places,
                    places,
                    word_places,
                    scale,
                    packed,
                ),
            ),
        ],
        [4, 4],
        [_REGISTERS, _REGISTERS],
    )


@gluon.jit
def _consume_even(
    buffers,
    barriers,
    keys,
    outputs,
    rows,
    first_head,
    heads: gl.constexpr,
    turning: gl.constexpr,
    window_places: gl.constexpr,
    places: gl.constexpr,
    word_places: gl.constexpr,
    scale: gl.constexpr,
    packed: gl.constexpr,
):
    """Scores of even tiles, the first half of the channels. The next scores begin before a pair's products are done."""
    free = barriers[1]
    asked = barriers[3]
    distances, words, used, positions = keys
    done = 0
    turn = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        pairs = pairs_of(row, used, positions)
        maximum = gl.full([HEADS], NO_MAXIMUM, gl.float32, gl.SliceLayout(1, _SCORES))
        denominator = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
        numerator = gl.zeros([HEADS, HALF], gl.float32, _VALUES)
        if pairs > 0:
            word_at = words + row.to(gl.int64) * word_places
            row_distances = distances + row.to(gl.int64) * places
            word = gl.load(word_at)
            mbarrier.wait(asked.index(0), turn & 1)
            scores = _begin_scores(buffers, barriers, 0, done & 1, True, done >> 30)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(asked.index(1), pred=pairs == 1)
            for pair in range(pairs - 1):
                phase = (done + pair) & 1
                zero = (done + pair) >> 30
                maximum, denominator, products = _begin_even_pair(
                    buffers,
                    barriers,
                    scores,
                    word,
                    row_distances,
                    2 * pair,
                    maximum,
                    denominator,
                    numerator,
                    phase,
                    zero,
                    places,
                    scale,
                )
                word = gl.load(word_at + 2 * pair + 2)
                plain = (not packed) | (2 * pair + 2 < window_places // KEYS)
                scores = _begin_scores(buffers, barriers, 0, phase ^ 1, plain, zero)
                numerator = warpgroup_mma_wait(2, deps=[products])
                mbarrier.arrive(free.index(2))
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(asked.index(1), pred=pair == pairs - 2)
            maximum, denominator, products = _begin_even_pair(
                buffers,
                barriers,
                scores,
                word,
                row_distances,
                2 * pairs - 2,
                maximum,
                denominator,
                numerator,
                (done + pairs - 1) & 1,
                done >> 30,
                places,
                scale,
            )
            numerator = warpgroup_mma_wait(0, deps=[products])
            mbarrier.arrive(free.index(2))
        _finish(numerator, maximum, denominator, outputs, row, first_head, pairs > 0, 0, heads, turning)
        done += pairs
        turn += gl.where(pairs > 0, 1, 0)


@gluon.jit
def _begin_even_pair(
    buffers,
    barriers,
    scores,
    word,
    distances,
    tile,
    maximum,
    denominator,
    numerator,
    phase,
    zero,
    places: gl.constexpr,
    scale: gl.constexpr,
):
    """Both tiles of a pair from the scores of the first; the products of the second are begun, not awaited."""
    k_shared = buffers[1]
    p_shared = buffers[2]
    maxima = buffers[3]
    sums = buffers[4]
    free = barriers[1]
    ready = barriers[2]
    maximum, denominator, rescale, shares = _softmax(scores, word, distances, tile, maximum, denominator, places, scale)
    p_shared.index(zero).store(shares)
    maxima.index(0).store(maximum)
    sums.index(0).store(denominator)
    fence_async_shared()
    mbarrier.arrive(ready.index(0))
    numerator = _rescaled(numerator, rescale)
    products = warpgroup_mma(p_shared.index(zero), k_shared.index(zero), numerator, is_async=True)
    mbarrier.wait(ready.index(1), phase)
    previous = maximum
    maximum = maxima.index(1).load(gl.SliceLayout(1, _SCORES))
    denominator = sums.index(1).load(gl.SliceLayout(1, _SCORES))
    rescale = gl.exp2(previous - maximum)
    numerator = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(free.index(0))
    numerator = _rescaled(numerator, rescale)
    products = warpgroup_mma(p_shared.index(zero + 1), k_shared.index(zero + 2), numerator, is_async=True)
    return maximum, denominator, products


@gluon.jit
def _consume_odd(
    buffers,
    barriers,
    keys,
    outputs,
    rows,
    first_head,
    heads: gl.constexpr,
    turning: gl.constexpr,
    window_places: gl.constexpr,
    places: gl.constexpr,
    word_places: gl.constexpr,
    scale: gl.constexpr,
    packed: gl.constexpr,
):
    """Scores of odd tiles, the second half of the channels. The softmax runs beside the even tile's products.

    It leaves all keys of a pair before it waits for the next, which lie in the same place.
    """
    k_shared = buffers[1]
    p_shared = buffers[2]
    maxima = buffers[3]
    sums = buffers[4]
    free = barriers[1]
    ready = barriers[2]
    asked = barriers[3]
    distances, words, used, positions = keys
    done = 0
    turn = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        pairs = pairs_of(row, used, positions)
        maximum = gl.full([HEADS], NO_MAXIMUM, gl.float32, gl.SliceLayout(1, _SCORES))
        denominator = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
        numerator = gl.zeros([HEADS, HALF], gl.float32, _VALUES)
        word_at = words + row.to(gl.int64) * word_places
        row_distances = distances + row.to(gl.int64) * places
        word = gl.load(word_at + 1)
        mbarrier.wait(asked.index(0), turn & 1, pred=pairs > 0)
        for pair in range(pairs):
            phase = (done + pair) & 1
            zero = (done + pair) >> 30
            plain = (not packed) | (2 * pair + 1 < window_places // KEYS)
            scores = _begin_scores(buffers, barriers, 2, phase, plain, zero)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(asked.index(1), pred=pair == pairs - 1)
            mbarrier.wait(ready.index(0), phase)
            previous = maximum
            maximum = maxima.index(0).load(gl.SliceLayout(1, _SCORES))
            denominator = sums.index(0).load(gl.SliceLayout(1, _SCORES))
            numerator = _rescaled(numerator, gl.exp2(previous - maximum))
            products = warpgroup_mma(p_shared.index(zero), k_shared.index(zero + 1), numerator, is_async=True)
            maximum, denominator, rescale, shares = _softmax(
                scores, word, row_distances, 2 * pair + 1, maximum, denominator, places, scale
            )
            word = gl.load(word_at + 2 * pair + 3, mask=pair + 1 < pairs, other=0)
            p_shared.index(zero + 1).store(shares)
            maxima.index(1).store(maximum)
            sums.index(1).store(denominator)
            fence_async_shared()
            mbarrier.arrive(ready.index(1))
            numerator = warpgroup_mma_wait(0, deps=[products])
            mbarrier.arrive(free.index(1))
            numerator = _rescaled(numerator, rescale)
            products = warpgroup_mma(p_shared.index(zero + 1), k_shared.index(zero + 3), numerator, is_async=True)
            numerator = warpgroup_mma_wait(0, deps=[products])
            mbarrier.arrive(free.index(3))
        _finish(numerator, maximum, denominator, outputs, row, first_head, pairs > 0, HALF, heads, turning)
        done += pairs
        turn += gl.where(pairs > 0, 1, 0)


@gluon.jit
def _begin_scores(buffers, barriers, first: gl.constexpr, phase, plain, zero):
    """Of the tile whose halves are ``first`` and the next, [HEADS, KEYS] F32; by half, as their channels come.

    ``plain`` keys were copied; who produces them does not wait for the copies, so the fence behind them is here.
    """
    q_shared = buffers[0]
    k_shared = buffers[1]
    full = barriers[0]
    scores = gl.zeros([HEADS, KEYS], gl.float32, _SCORES)
    mbarrier.wait(full.index(first), phase)
    if plain:
        fence_async_shared()
    scores = warpgroup_mma(
        q_shared.index(zero), k_shared.index(zero + first).permute((1, 0)), scores, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(first + 1), phase)
    if plain:
        fence_async_shared()
    return warpgroup_mma(
        q_shared.index(zero + 1), k_shared.index(zero + first + 1).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _softmax(scores, word, distances, tile, maximum, denominator, places: gl.constexpr, scale: gl.constexpr):
    """One step of the online softmax: maximum, denominator, what older sums are multiplied by, and shares in BF16."""
    factor: gl.constexpr = scale * LOG2_E
    if word != -1:
        place = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, _SCORES))
        valid = gl.load(distances + place, mask=place < places, other=NOWHERE) != NOWHERE
        scores = gl.where(gl.expand_dims(valid, 0), scores, -float("inf"))
    previous = maximum
    maximum = gl.maximum(previous, gl.max(scores, axis=1) * factor)
    rescale = gl.exp2(previous - maximum)
    shares = gl.exp2(scores * factor - gl.expand_dims(maximum, 1))
    denominator = denominator * rescale + gl.sum(shares, axis=1)
    return maximum, denominator, rescale, shares.to(gl.bfloat16)


@gluon.jit
def _rescaled(numerator, rescale):
    return numerator * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, _VALUES)), 1)


@gluon.jit
def _finish(
    numerator,
    maximum,
    denominator,
    outputs,
    row,
    first_head,
    live,
    first: gl.constexpr,
    heads: gl.constexpr,
    turning: gl.constexpr,
):
    """A half of the channels of a row, from channel ``first`` on, from registers to ``attended``."""
    sink, turns, attended = outputs
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, _SCORES))
    denominator += gl.exp2(gl.load(sink + head) * LOG2_E - maximum)
    factor = gl.convert_layout(gl.where(live, 1.0 / denominator, 0.0), gl.SliceLayout(1, _VALUES))
    result = (numerator * gl.expand_dims(factor, 1)).to(gl.bfloat16)
    low, high = gl.split(result.reshape([HEADS, 2, HALF // 2]).permute((0, 2, 1)))
    block0, block1 = gl.split(low.reshape([HEADS, 2, _BLOCK]).permute((0, 2, 1)))
    block2, block3 = gl.split(high.reshape([HEADS, 2, _BLOCK]).permute((0, 2, 1)))
    at = attended + (row.to(gl.int64) * heads + first_head) * CHANNELS
    row_turns = turns + row.to(gl.int64) * (2 * turning)
    _write(block0, at, row_turns, first, turning)
    _write(block1, at, row_turns, first + _BLOCK, turning)
    _write(block2, at, row_turns, first + 2 * _BLOCK, turning)
    _write(block3, at, row_turns, first + 3 * _BLOCK, turning)


@gluon.jit
def _write(block, at, turns, first: gl.constexpr, turning: gl.constexpr):
    """64 channels of all heads, turned back; pairs lie in one thread."""
    block = gl.convert_layout(block, _SCORES)
    if first + _BLOCK > CHANNELS - 2 * turning:
        real, imaginary = gl.split(block.to(gl.float32).reshape([HEADS, _BLOCK // 2, 2]))
        pair = gl.arange(0, _BLOCK // 2, gl.SliceLayout(0, real.type.layout)) + (first // 2 - (CHANNELS // 2 - turning))
        cosine = gl.expand_dims(gl.load(turns + pair, mask=pair >= 0, other=1.0), 0)
        sine = -gl.expand_dims(gl.load(turns + turning + pair, mask=pair >= 0, other=0.0), 0)
        both = gl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine).to(gl.bfloat16)
        both = gl.convert_layout(both.reshape([HEADS, _BLOCK]), _SCORES)
        channel = gl.arange(0, _BLOCK, gl.SliceLayout(0, _SCORES)) + first
        block = gl.where(gl.expand_dims(channel >= CHANNELS - 2 * turning, 0), both, block)
    block = gl.convert_layout(block, _WRITTEN)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _WRITTEN))
    channel = gl.arange(0, _BLOCK, gl.SliceLayout(0, _WRITTEN)) + first
    gl.store(at + gl.expand_dims(head, 1) * CHANNELS + gl.expand_dims(channel, 0), block)
