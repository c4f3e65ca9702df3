"""Kernels of ``mhc_site``.

Few rows: one pass over the streams, cut by channels, which multiplies what it makes at once, and a small kernel that
finishes. Many rows: one pass, a row a program, and the products of ``mhc_mix`` behind it: a row that is whole is normed
where it was made, and the matrix of the mix is read for as many rows at once as tensor cores like.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.mhc_kernels import finish_coefficients, split_bf16


@triton.jit
def kept(x):
    """The same BF16 numbers. Triton would otherwise compute ``x`` once more for tensor cores, in another layout."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def side_by_side(parts):
    """Four tensors [N, C] -> [N, 4 C]."""
    rows: tl.constexpr = parts[0].shape[0]
    columns: tl.constexpr = parts[0].shape[1]
    joined = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
    return tl.reshape(tl.permute(joined, (0, 3, 2, 1)), [rows, 4 * columns])


@triton.jit
def new_stream(given, output, between, after, k: tl.constexpr):
    """Stream k of ``mhc_expand`` in F32. It gets ``between[4 k + j]`` of stream j and ``after[k]`` of the output."""
    mixed = between[4 * k] * given[0]
    for j in tl.static_range(1, 4):
        mixed += between[4 * k + j] * given[j]
    return after[k] * output + mixed


@triton.jit(do_not_specialize=["rows", "steps"])
def expand_and_multiply(
    streams,
    y,
    post,
    comb,
    pre,
    fn,
    expanded,
    collapsed,
    sums,
    squares,
    collapsed_squares,
    rows,
    steps,
    width: tl.constexpr,
    mixes: tl.constexpr,
    ROWS: tl.constexpr,
    MIXES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """``mhc_expand``, the sum of ``mhc_collapse`` and the products of ``mhc_mix``.

    streams [R, 4, width] and y [R, width] BF16, post and pre [R, 4] F32, comb [R, 4, 4] F32, fn [mixes, 4 width] F32
    -> expanded as streams, collapsed [R, width] BF16; sums [parts, R, MIXES], squares of expanded and of collapsed,
    each [parts, R] F32.

    A program takes ROWS rows and ``steps`` times CHANNELS channels of every stream, a part; sums beyond ``mixes`` are
    zero. Powers of two: ROWS, MIXES (not below ``mixes``) and CHANNELS, from 16 on. The products of a step are summed
    by tensor cores, those of steps with rounding, as in ``multiply_streams``.
    """
    let_next_start()
    wait_for_ahead()
    part = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mix = tl.arange(0, MIXES)
    there = row < rows
    of_row = row.to(tl.int64)
    before = ()
    after = ()
    between = ()
    for k in tl.static_range(4):
        before += (tl.load(pre + of_row * 4 + k, mask=there, other=0.0)[:, None],)
        after += (tl.load(post + of_row * 4 + k, mask=there, other=0.0)[:, None],)
        for j in tl.static_range(4):
            place = comb + (of_row * 4 + j) * 4 + k
            between += (tl.load(place, mask=there, other=0.0)[:, None],)
    of_row = of_row[:, None] * width
    matrix = fn + mix[:, None] * (4 * width)
    total = tl.zeros([ROWS, MIXES], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    collapsed_square = tl.zeros([ROWS], tl.float32)
    first = tl.program_id(0) * steps * CHANNELS
    for low in tl.range(first, tl.minimum(first + steps * CHANNELS, width), CHANNELS, num_stages=STAGES):
        channel = low + tl.arange(0, CHANNELS)[None, :]
        known = there[:, None]
        used = (mix < mixes)[:, None]
        if width % CHANNELS:
            known = known & (channel < width)
            used = used & (channel < width)
        output = tl.load(y + of_row + channel, mask=known, other=0.0).to(tl.float32)
        given = ()
        weights = ()
        for j in tl.static_range(4):
            source = streams + of_row * 4 + j * width + channel
            given += (tl.load(source, mask=known, other=0.0).to(tl.float32),)
            weights += (tl.load(matrix + j * width + channel, mask=used, other=0.0),)
        squared = tl.zeros([ROWS, CHANNELS], tl.float32)
        weighted = tl.zeros([ROWS, CHANNELS], tl.float32)
        made = ()
        for k in tl.static_range(4):
            x = kept(new_stream(given, output, between, after, k).to(expanded.dtype.element_ty))
            tl.store(expanded + of_row * 4 + k * width + channel, x, mask=known)
            wide = x.to(tl.float32)
            squared += wide * wide
            weighted += before[k] * wide
            made += (x,)
        high, rest = split_bf16(side_by_side(weights))
        middle, rest = split_bf16(rest)
        last, _ = split_bf16(rest)
        x = side_by_side(made)
        product = tl.dot(x, tl.trans(last))
        product = tl.dot(x, tl.trans(middle), product)
        total += tl.dot(x, tl.trans(high), product)
        square += tl.sum(squared, axis=1)
        x = weighted.to(collapsed.dtype.element_ty)
        tl.store(collapsed + of_row + channel, x, mask=known)
        wide = x.to(tl.float32)
        collapsed_square += tl.sum(wide * wide, axis=1)
    place = part * rows + row
    tl.store(sums + place[:, None] * MIXES + mix[None, :], total, mask=there[:, None])
    tl.store(squares + place, square, mask=there)
    tl.store(collapsed_squares + place, collapsed_square, mask=there)


@triton.jit(do_not_specialize=["rows", "parts", "finishing"])
def finish_site(
    sums,
    squares,
    collapsed_squares,
    scale,
    base,
    collapsed,
    weight,
    pre,
    post,
    comb,
    rows,
    parts,
    finishing,
    epsilon,
    norm_epsilon,
    collapse_epsilon,
    width: tl.constexpr,
    iterations: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MIXES: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """The first ``finishing`` programs make coefficients as ``finish_mix`` does, ROWS rows each; the others norm.

    collapsed [R, width] is normed in place, with weight [width], CHANNELS of a row a program.
    """
    let_next_start()
    wait_for_ahead()
    program = tl.program_id(0)
    if program < finishing:
        finish_coefficients(
            sums,
            squares,
            scale,
            base,
            pre,
            post,
            comb,
            program * ROWS + tl.arange(0, ROWS),
            rows,
            parts,
            epsilon,
            norm_epsilon,
            4 * width,
            4,
            iterations,
            PARTS,
            4,
            MIXES,
        )
    else:
        pieces: tl.constexpr = (width + CHANNELS - 1) // CHANNELS
        piece = program - finishing
        row = (piece // pieces).to(tl.int64)
        part = tl.arange(0, PARTS)
        square = tl.sum(tl.load(collapsed_squares + part.to(tl.int64) * rows + row, mask=part < parts, other=0.0))
        factor = tl.rsqrt(square / width + collapse_epsilon)
        channel = piece % pieces * CHANNELS + tl.arange(0, CHANNELS)
        known = channel < width
        place = collapsed + row * width + channel
        x = tl.load(place, mask=known, other=0.0).to(tl.float32) * factor
        x = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32) * x
        tl.store(place, x.to(collapsed.dtype.element_ty), mask=known)


@triton.jit
def expand_and_collapse(
    streams,
    y,
    post,
    comb,
    pre,
    weight,
    expanded,
    target,
    epsilon,
    width: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """``mhc_expand`` and ``mhc_collapse`` of its result, a row a program: STEPS times CHANNELS channels.

    Arguments as in :func:`expand_and_multiply`, weight [width] -> expanded [R, 4, width], target [R, width], BF16.
    """
    row = tl.program_id(0).to(tl.int64)
    before = ()
    after = ()
    between = ()
    for k in tl.static_range(4):
        before += (tl.load(pre + row * 4 + k),)
        after += (tl.load(post + row * 4 + k),)
        for j in tl.static_range(4):
            between += (tl.load(comb + (row * 4 + j) * 4 + k),)
    square = tl.zeros([CHANNELS], tl.float32)
    collapsed = ()
    for step in tl.static_range(STEPS):
        channel = step * CHANNELS + tl.arange(0, CHANNELS)
        known = channel < width
        output = tl.load(y + row * width + channel, mask=known, other=0.0).to(tl.float32)
        given = ()
        for j in tl.static_range(4):
            source = streams + (row * 4 + j) * width + channel
            given += (tl.load(source, mask=known, other=0.0).to(tl.float32),)
        weighted = tl.zeros([CHANNELS], tl.float32)
        for k in tl.static_range(4):
            x = new_stream(given, output, between, after, k).to(expanded.dtype.element_ty)
            tl.store(expanded + (row * 4 + k) * width + channel, x, mask=known)
            weighted += before[k] * x.to(tl.float32)
        x = weighted.to(target.dtype.element_ty)
        wide = x.to(tl.float32)
        square += wide * wide
        collapsed += (x,)
    factor = tl.rsqrt(tl.sum(square) / width + epsilon)
    for step in tl.static_range(STEPS):
        channel = step * CHANNELS + tl.arange(0, CHANNELS)
        known = channel < width
        x = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32) * (collapsed[step].to(tl.float32) * factor)
        tl.store(target + row * width + channel, x.to(target.dtype.element_ty), mask=known)
