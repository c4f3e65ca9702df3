"""Grouped products with packed F4 weights for tiles of up to 160 rows: ``experts`` with many rows an expert.

A program is a group of four warps that brings weights as they are and rows, blocks of 128 columns, as far ahead as
there are buffers, and groups that multiply. Those wait for buffers alone: while one decodes, tensor cores have
another's products. Weights go from shared memory to registers, are decoded there and are an operand in registers. Rows
lie in order of their places, so that the tensor memory accelerator brings them.

There are two forms. Tiles of 128 rows have two groups that multiply 128 channels each, 64 a product. Tiles of 64 rows
need fewer registers, and have four groups that multiply 64 channels each: more of them hide each other's waits better.

A product costs what its columns cost. Tiles of up to 32, 64 and 96 rows have a loop each, with the first form those of
up to 128 and 160 too; 96 and 160 are two products that share the decoded weights. Where an expert has a few rows more
than fill a tile, this spares a second one, and with it decoding all weights again.

Products of two halves of a block at most are under way in a group, and none across the end of a loop, or ptxas
serialises all of them; it does so too where registers do not suffice.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.kernels.triton_backend.expert_routing import BLOCK, PIECE
from octavo.kernels.triton_backend.gluon_weights import decoded_words, group_factors

CHANNELS = gl.constexpr(256)
"""Of a tile, for all groups that multiply."""
MORE = gl.constexpr(PIECE.value)
"""By so many rows may a tile exceed a whole one: what is brought at once."""
HALF = gl.constexpr(64)
"""Columns of half a block: 128 bytes of a row, and what is decoded at once."""
WORDS_HELD = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
ROWS_HELD = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))

_BRINGING_THREADS = gl.constexpr(128)
_WORDS = gl.constexpr(16)
"""Of eight codes: 128 columns."""
_SCALES_HELD = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
_COPIED_SCALES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SUMS_32 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
_SUMS_64 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_SUMS_128 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
"""Of the words of 64 channels: 16 bytes a thread, which have one scale."""
_GROUPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 2],
    )
)
"""Of half of them: channels, the four scale groups of a block, two words of each."""
_WRITTEN = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def multiply_wide(
    x,
    w_first,
    s_first,
    w_second,
    s_second,
    order,
    tiles,
    totals,
    results,
    inputs: gl.constexpr,
    outputs: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """results = w x by one or two matrices, 256 channels of a tile of pairs and of one matrix at a time.

    x [P, inputs] BF16, a row for each place of ``order``, in fragment order, x 2^64 (``expert_routing``), by pieces of
    32 rows and 64 columns; matrices [n x outputs, inputs / 8] int32 by 256 rows and 16 columns; both are descriptors.
    Scales [n, outputs, inputs / 128] int32. inputs is a multiple of 128, outputs one of 256. order, tiles and
    totals as ``place_pairs`` gives them. Of two matrices results [P, 2, outputs] BF16 has a row for each place, of
    one (the second is None) [R x top_k, outputs] one for each pair. ROWS of a whole tile are 64 or 128, STAGES blocks
    are on their way or in use, and each thread that multiplies has so many REGISTERS.
    """
    words = gl.allocate_shared_memory(gl.int32, [STAGES, CHANNELS, _WORDS], WORDS_HELD)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, CHANNELS], _SCALES_HELD)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, HALF], ROWS_HELD)
    more = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, MORE, HALF], ROWS_HELD)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=_BRINGING_THREADS + 1)
        mbarrier.init(free.index(i), count=2 if ROWS == 128 else 4)
    fence_async_shared()
    buffers = (words, scales, rows, more)
    barriers = (full, free)
    both: gl.constexpr = w_second is not None
    matrices = (w_first, s_first, w_second, s_second)
    table = (order, tiles, totals)
    if ROWS == 128:
        gl.warp_specialize(
            [
                (_bring, (buffers, barriers, matrices, x, table, inputs, outputs, both, ROWS, STAGES)),
                (_multiply, (buffers, barriers, results, table, inputs, outputs, both, ROWS, STAGES, 0)),
                (_multiply, (buffers, barriers, results, table, inputs, outputs, both, ROWS, STAGES, 128)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_bring, (buffers, barriers, matrices, x, table, inputs, outputs, both, ROWS, STAGES)),
                (_multiply, (buffers, barriers, results, table, inputs, outputs, both, ROWS, STAGES, 0)),
                (_multiply, (buffers, barriers, results, table, inputs, outputs, both, ROWS, STAGES, 64)),
                (_multiply, (buffers, barriers, results, table, inputs, outputs, both, ROWS, STAGES, 128)),
                (_multiply, (buffers, barriers, results, table, inputs, outputs, both, ROWS, STAGES, 192)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )


@gluon.jit
def _cut(task, tiles, outputs: gl.constexpr, both: gl.constexpr):
    """Expert, first place, place after the last, matrix and first channel of a task."""
    channel_tiles: gl.constexpr = outputs // CHANNELS
    of_tile: gl.constexpr = 2 * channel_tiles if both else channel_tiles
    number = task // of_tile
    within = task - number * of_tile
    matrix = within // channel_tiles
    tile = tiles + number * 3
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), matrix, (within - matrix * channel_tiles) * CHANNELS


@gluon.jit
def _tasks(totals, outputs: gl.constexpr, both: gl.constexpr):
    return gl.load(totals) * (2 * (outputs // CHANNELS) if both else outputs // CHANNELS)


@gluon.jit
def _bring(
    buffers,
    barriers,
    matrices,
    x,
    table,
    inputs: gl.constexpr,
    outputs: gl.constexpr,
    both: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Blocks of weights, scales and rows, as soon as their places are free.

    Rows of a piece that are beyond the tile may be another expert's, or none: each is a column of its own.
    """
    words, scales, rows, more = buffers
    full, free = barriers
    w_first, s_first, w_second, s_second = matrices
    _, tiles, totals = table
    of_scales = gl.arange(0, CHANNELS, _COPIED_SCALES) * (inputs // BLOCK)
    pieces_of_rows: gl.constexpr = ROWS // PIECE
    done = 0
    for task in range(gl.program_id(0), _tasks(totals, outputs, both), gl.num_programs(0)):
        expert, start, end, matrix, channel = _cut(task, tiles, outputs, both)
        first = expert * outputs + channel
        s = s_first
        if both:
            s = s_second if matrix > 0 else s_first
        s += first.to(gl.int64) * (inputs // BLOCK)
        pieces = (end - start + PIECE - 1) // PIECE
        for block in range(inputs // BLOCK):
            slot = done % STAGES
            mbarrier.wait(free.index(slot), ((done // STAGES) & 1) ^ 1)
            for count in gl.static_range(1, pieces_of_rows + 2):  # one of them is the number of pieces
                mbarrier.expect(full.index(slot), 4 * CHANNELS * _WORDS + count * (2 * PIECE * BLOCK), pieces == count)
            at = [first, block * _WORDS]
            if both:
                if matrix > 0:
                    tma.async_copy_global_to_shared(w_second, at, full.index(slot), words.index(slot))
                else:
                    tma.async_copy_global_to_shared(w_first, at, full.index(slot), words.index(slot))
            else:
                tma.async_copy_global_to_shared(w_first, at, full.index(slot), words.index(slot))
            async_copy.async_copy_global_to_shared(scales.index(slot), (s + block) + of_scales)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            for half in gl.static_range(2):
                column = block * BLOCK + half * HALF
                part = rows.index(2 * slot + half)
                for piece in gl.static_range(pieces_of_rows):
                    place = part.slice(piece * PIECE, PIECE)
                    wanted = pieces > piece
                    tma.async_copy_global_to_shared(x, [start + piece * PIECE, column], full.index(slot), place, wanted)
                place = more.index(2 * slot + half)
                wanted = pieces > pieces_of_rows
                tma.async_copy_global_to_shared(x, [start + ROWS, column], full.index(slot), place, wanted)
            done += 1


@gluon.jit
def _multiply(
    buffers,
    barriers,
    results,
    table,
    inputs: gl.constexpr,
    outputs: gl.constexpr,
    both: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    mine: gl.constexpr,
):
    """A group's channels of every tile, from channel ``mine`` of it on, by the loop that is as wide as the tile."""
    order, tiles, totals = table
    width: gl.constexpr = 2 * outputs if both else outputs
    done = 0
    for task in range(gl.program_id(0), _tasks(totals, outputs, both), gl.num_programs(0)):
        _, start, end, matrix, channel = _cut(task, tiles, outputs, both)
        target = (None if both else order, start, end, matrix * outputs + channel + mine)
        given = (buffers, barriers, results, target, done)
        rows = end - start
        if rows <= 32:
            _multiply_tile(given, inputs, width, ROWS, STAGES, mine, 32, 0)
        elif rows <= 64:
            _multiply_tile(given, inputs, width, ROWS, STAGES, mine, 64, 0)
        elif rows <= 96:
            _multiply_tile(given, inputs, width, ROWS, STAGES, mine, 64, MORE)
        elif ROWS == 128:
            if rows <= 128:
                _multiply_tile(given, inputs, width, ROWS, STAGES, mine, 128, 0)
            else:
                _multiply_tile(given, inputs, width, ROWS, STAGES, mine, 128, MORE)
        done += inputs // BLOCK


@gluon.jit
def _multiply_tile(
    given,
    inputs: gl.constexpr,
    width: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    mine: gl.constexpr,
    rows: gl.constexpr,
    beyond: gl.constexpr,
):
    """A tile of ``rows`` rows and ``beyond`` more, MORE or none, once or twice 64 channels; results have rows of
    ``width``."""
    twice: gl.constexpr = ROWS == 128
    SUMS: gl.constexpr = _SUMS_32 if rows == 32 else _SUMS_64 if rows == 64 else _SUMS_128
    buffers, barriers, results, target, done = given
    words, scales, held, more = buffers
    full, free = barriers
    low = gl.zeros([64, rows], gl.float32, SUMS)
    high = gl.zeros([64, rows], gl.float32, SUMS)
    low_beyond = 0
    high_beyond = 0
    if beyond > 0:
        low_beyond = gl.zeros([64, beyond], gl.float32, _SUMS_32)
        high_beyond = gl.zeros([64, beyond], gl.float32, _SUMS_32)
    for block in range(inputs // BLOCK):
        slot = (done + block) % STAGES
        mbarrier.wait(full.index(slot), ((done + block) // STAGES) & 1)
        x0 = _columns(held.index(2 * slot), more.index(2 * slot), ROWS, rows, beyond)
        x1 = _columns(held.index(2 * slot + 1), more.index(2 * slot + 1), ROWS, rows, beyond)
        codes0, codes1 = _two_words(words.index(slot).slice(mine, 64))
        factors = _factors(scales.index(slot).slice(mine, 64))
        low, low_beyond = _begin(codes0, factors, x0, low, low_beyond, beyond, SUMS)
        low, low_beyond = _begin(codes1, factors, x1, low, low_beyond, beyond, SUMS)
        if twice:
            low, low_beyond = _wait_for_all_but(1, low, low_beyond, beyond)
            codes0, codes1 = _two_words(words.index(slot).slice(mine + 64, 64))
            factors = _factors(scales.index(slot).slice(mine + 64, 64))
            high, high_beyond = _begin(codes0, factors, x0, high, high_beyond, beyond, SUMS)
            low, low_beyond = _wait_for_all_but(1, low, low_beyond, beyond)
            high, high_beyond = _begin(codes1, factors, x1, high, high_beyond, beyond, SUMS)
            high, high_beyond = _wait_for_all_but(0, high, high_beyond, beyond)
        low, low_beyond = _wait_for_all_but(0, low, low_beyond, beyond)
        mbarrier.arrive(free.index(slot))
    _write(low, results, target, 0, 0, width)
    if beyond > 0:
        _write(low_beyond, results, target, rows, 0, width)
    if twice:
        _write(high, results, target, 0, 64, width)
        if beyond > 0:
            _write(high_beyond, results, target, rows, 64, width)


@gluon.jit
def _columns(held, more, ROWS: gl.constexpr, rows: gl.constexpr, beyond: gl.constexpr):
    """Rows of a tile as right operands: the first ones, and ``beyond`` more."""
    following = more if rows == ROWS else held.slice(rows if beyond > 0 else 0, PIECE)
    return held.slice(0, rows).permute((1, 0)), following.permute((1, 0))


@gluon.jit
def _two_words(held):
    """Words of 64 channels, those of either half of a block: twice [64, 4, 2] int32."""
    first, second = gl.split(held.load(_LINES).reshape([64, 4, 2, 2]).permute((0, 1, 3, 2)))
    first = gl.convert_layout(first, _GROUPS, assert_trivial=True)
    return first, gl.convert_layout(second, _GROUPS, assert_trivial=True)


@gluon.jit
def _factors(held):
    scales = held.load(gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS)))
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, _GROUPS)))
    return group_factors(gl.expand_dims(scales, 1), gl.expand_dims(group, 0))


@gluon.jit
def _begin(codes, factors, x, total, total_beyond, beyond: gl.constexpr, SUMS: gl.constexpr):
    """Decode 64 columns of 64 channels and begin to add their products."""
    factors, codes = gl.broadcast(gl.expand_dims(factors, 2), codes)
    weights = decoded_words(codes, factors).permute((0, 2, 4, 5, 1, 3)).reshape([64, HALF])
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    total = warpgroup_mma(operand, x[0], total, is_async=True)
    if beyond > 0:
        operand = gl.convert_layout(weights, gl.DotOperandLayout(0, _SUMS_32, 2), assert_trivial=True)
        total_beyond = warpgroup_mma(operand, x[1], total_beyond, is_async=True)
    return total, total_beyond


@gluon.jit
def _wait_for_all_but(last: gl.constexpr, total, total_beyond, beyond: gl.constexpr):
    """Until no more than the ``last`` products are under way, so that others' operands may be written again."""
    if beyond > 0:
        total, total_beyond = warpgroup_mma_wait(2 * last, deps=[total, total_beyond])
    else:
        total = warpgroup_mma_wait(last, deps=[total])
    return total, total_beyond


@gluon.jit
def _write(total, results, target, row: gl.constexpr, channel: gl.constexpr, width: gl.constexpr):
    """Sums [64, N] of the rows from ``row`` on, in BF16, where ``target`` says: order or None, places, channel."""
    order, start, end, first = target
    place = start + row + gl.arange(0, total.shape[1], gl.SliceLayout(0, _WRITTEN))
    there = place < end
    at = place
    if order is not None:
        at = gl.load(order + place, mask=there, other=0)
    column = first + channel + gl.arange(0, 64, gl.SliceLayout(1, _WRITTEN))
    at = gl.expand_dims(at.to(gl.int64) * width, 0) + gl.expand_dims(column, 1)
    gl.store(results + at, gl.convert_layout(total.to(gl.bfloat16), _WRITTEN), mask=gl.expand_dims(there, 0))
