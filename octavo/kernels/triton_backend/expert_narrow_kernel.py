"""Grouped products with packed F4 weights for tiles of 8 or 16 rows: ``experts`` with few rows an expert.

Next to nothing is computed there, and what counts is how weights are asked for. They are read in whole lines of memory,
256 columns of a row at a time, by small programs, many of which are on a multiprocessor at once: one waits while the
others decode. Lines come to shared memory as they are and leave it in the order of the tensor cores' operand, so that
nothing moves between threads after that. How codes are decoded: ``expert_products``.

Eight lanes read two pieces of 64 bytes at once, of rows 2n and 2n + 1, and these must not meet in one bank: lines are
permuted in shared memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.kernels.triton_backend.expert_routing import BLOCK
from octavo.kernels.triton_backend.gluon_weights import decoded_words, group_factors

STEP = gl.constexpr(256)
"""Columns that are read at once: 128 bytes of a row, two scale words."""
_WORDS = gl.constexpr(32)
"""Of eight codes."""


@functools.cache
def layouts(outputs: int, warps: int) -> dict[str, Any]:
    """Of a tile of ``outputs`` weight rows, a power of two from 16 for each warp on."""
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    beyond = [[1 << bit, 0, 0, 0] for bit in range(4, outputs.bit_length() - 1)]
    of_warps = warps.bit_length() - 1
    # Rows, blocks of 128 columns, the four scale groups of a block, and the four words of a group.
    words = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [8, 0, 0, 0], *beyond[of_warps:]],
        lane_bases=lanes,
        warp_bases=beyond[:of_warps],
        block_bases=[],
        shape=[outputs, 2, 4, 4],
    )
    lines = gl.DistributedLinearLayout(
        reg_bases=[[row, 16 * block + word] for row, block, _, word in words.reg_bases],
        lane_bases=[[row, 4 * group] for row, _, group, _ in lanes],
        warp_bases=[[row, 0] for row, *_ in words.warp_bases],
        block_bases=[],
        shape=[outputs, _WORDS.value],
    )
    # Eight lines of 8 pieces of 16 bytes. A line stands at place s, its pieces at theirs xor s, so that no two lines
    # have a piece in one bank; row 2n + 1 stands four places behind row 2n.
    pieces = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [2, 4], [4, 8], [1, 16]]
    return {
        "SUMS": gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8]),
        "BY_GROUPS": words,
        "BY_LINES": lines,
        "LINES": gl.SharedLinearLayout(
            offset_bases=[*pieces, *([1 << b, 0] for b in range(3, outputs.bit_length() - 1))]
        ),
        "COPIED_LINES": gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0]),
        "COPIED_SCALES": gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0]),
        "COPIED_ROWS": gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0]),
        "WRITTEN": gl.BlockedLayout([8, 1], [min(outputs // 8, 32), 32 // min(outputs // 8, 32)], [1, warps], [0, 1]),
    }


@gluon.jit
def multiply_narrow(
    x,
    w_first,
    s_first,
    w_second,
    s_second,
    order,
    tiles,
    totals,
    results,
    top_k: gl.constexpr,
    inputs: gl.constexpr,
    outputs: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,
    BY_GROUPS: gl.constexpr,
    BY_LINES: gl.constexpr,
    LINES: gl.constexpr,
    COPIED_LINES: gl.constexpr,
    COPIED_SCALES: gl.constexpr,
    COPIED_ROWS: gl.constexpr,
    WRITTEN: gl.constexpr,
):
    """results = w x by one or two matrices, OUTPUTS channels of a tile of pairs and of one matrix at a time.

    Matrices [n, outputs, inputs / 8] int32 and their scales [n, outputs, inputs / 128] int32, multiples of 128 both.
    order, tiles and totals as ``place_pairs`` gives them. Of two matrices x [R, inputs] BF16 has a row for each row
    of the step, which is chosen top_k times, and results [P, 2, outputs] BF16 one for each place of ``order``; of one
    (the second is None) x [P, inputs] has a row for each place and results [R x top_k, outputs] one for each pair. x in
    fragment order, x 2^64 (``expert_routing``).
    """
    both: gl.constexpr = w_second is not None
    matrices: gl.constexpr = 2 if both else 1
    held = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, _WORDS], LINES)
    held_scales = gl.allocate_shared_memory(
        gl.int32, [STAGES, OUTPUTS, 2], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    )
    held_rows = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, ROWS, STEP], gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    )
    buffers = (held, held_scales, held_rows)
    channel_tiles: gl.constexpr = outputs // OUTPUTS
    steps: gl.constexpr = (inputs + STEP - 1) // STEP
    tasks = gl.load(totals) * (channel_tiles * matrices)
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        number = task // (channel_tiles * matrices)
        within = task - number * (channel_tiles * matrices)
        matrix = within // channel_tiles
        first = (within - matrix * channel_tiles) * OUTPUTS
        expert = gl.load(tiles + number * 3).to(gl.int64)
        start = gl.load(tiles + number * 3 + 1)
        end = gl.load(tiles + number * 3 + 2)
        weights = w_first
        scales = s_first
        if both:  # noqa: SIM102 (known when it is compiled, so that the other branch is never read)
            if matrix > 0:
                weights = w_second
                scales = s_second
        weights += (expert * outputs + first) * (inputs // 8)
        scales += (expert * outputs + first) * (inputs // BLOCK)
        sources = (
            _at(weights, inputs // 8, OUTPUTS, _WORDS, COPIED_LINES),
            _at(scales, inputs // BLOCK, OUTPUTS, 2, COPIED_SCALES),
            _rows_at(x, order, start, end, top_k, inputs, both, ROWS, COPIED_ROWS),
        )
        there = start + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, COPIED_ROWS)), 1) < end
        total = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
        for step in gl.static_range(STAGES - 1):
            _fetch(step, step, sources, there, buffers, inputs, COPIED_LINES, COPIED_SCALES, COPIED_ROWS)
        for step in range(steps):
            async_copy.wait_group(STAGES - 2)
            ahead = step + STAGES - 1
            _fetch(ahead, ahead % STAGES, sources, there, buffers, inputs, COPIED_LINES, COPIED_SCALES, COPIED_ROWS)
            slot = step % STAGES
            words = held.index(slot).load(BY_LINES)
            scale_words = held_scales.index(slot).load(gl.SliceLayout(2, gl.SliceLayout(3, BY_GROUPS)))
            rows = held_rows.index(slot).permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2))
            total = mma_v2(_decoded(words, scale_words, OUTPUTS, SUMS, BY_GROUPS), rows, total)
        async_copy.wait_group(0)

        place = start + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
        channel = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, WRITTEN))
        row = place
        if not both:
            row = gl.load(order + place, mask=place < end, other=0)
        at = gl.expand_dims(row.to(gl.int64) * (outputs * matrices) + matrix * outputs, 0) + gl.expand_dims(channel, 1)
        values = gl.convert_layout(total.to(gl.bfloat16), WRITTEN)
        gl.store(results + at, values, mask=gl.expand_dims(place < end, 0))


@gluon.jit
def _at(base, width: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to the first columns of ROWS rows of so many numbers: [ROWS, COLUMNS]."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return base + (gl.expand_dims(row * width, 1) + gl.expand_dims(column, 0))


@gluon.jit
def _rows_at(
    x,
    order,
    start,
    end,
    top_k: gl.constexpr,
    inputs: gl.constexpr,
    both: gl.constexpr,
    ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Pointers to the first inputs of a tile's rows: [ROWS, STEP]."""
    row = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    if both:
        row = gl.load(order + row, mask=row < end, other=0) // top_k
    column = gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))
    return x + (gl.expand_dims(row.to(gl.int64) * inputs, 1) + gl.expand_dims(column, 0))


@gluon.jit
def _inside(step, limit: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of a step's columns there are: [1, COLUMNS], or all or none where steps are whole."""
    if limit % COLUMNS == 0:
        return step * COLUMNS < limit
    else:
        return gl.expand_dims(step * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)) < limit, 0)


@gluon.jit
def _fetch(
    step,
    slot,
    sources,
    there,
    buffers,
    inputs: gl.constexpr,
    COPIED_LINES: gl.constexpr,
    COPIED_SCALES: gl.constexpr,
    COPIED_ROWS: gl.constexpr,
):
    """Begin to copy a step's weights, scales and rows, zeros beyond the last of them; one group of copies.

    ``there`` [ROWS, 1]: which rows of the tile there are.
    """
    words = _inside(step, inputs // 8, _WORDS, COPIED_LINES)
    scales = _inside(step, inputs // BLOCK, 2, COPIED_SCALES)
    columns = there & _inside(step, inputs, STEP, COPIED_ROWS)
    async_copy.async_copy_global_to_shared(buffers[0].index(slot), sources[0] + step * _WORDS, mask=words)
    async_copy.async_copy_global_to_shared(buffers[1].index(slot), sources[1] + step * 2, mask=scales)
    async_copy.async_copy_global_to_shared(buffers[2].index(slot), sources[2] + step * STEP, mask=columns)
    async_copy.commit_group()


@gluon.jit
def _decoded(words, scales, OUTPUTS: gl.constexpr, SUMS: gl.constexpr, BY_GROUPS: gl.constexpr):
    """words [OUTPUTS, 32] int32 and scales [OUTPUTS, 2] int32 -> weights x 2^-64, an operand [OUTPUTS, 256] BF16."""
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, BY_GROUPS))))
    factor = group_factors(gl.expand_dims(scales, 2), gl.expand_dims(gl.expand_dims(group, 0), 1))
    codes = gl.convert_layout(words.reshape([OUTPUTS, 2, 4, 4]), BY_GROUPS, assert_trivial=True)
    factors, codes = gl.broadcast(gl.expand_dims(factor, 3), codes)
    ordered = decoded_words(codes, factors).permute((0, 1, 3, 5, 6, 2, 4)).reshape([OUTPUTS, STEP])
    return gl.convert_layout(ordered, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
