"""Kernels of ``mhc_mix``: products of the streams over parts of their channels, and the coefficients from their sums.

The matrix is F32, the streams are BF16: tensor cores multiply them by three BF16 parts of the matrix, eight bits each,
whose sum is the F32 value to the bit where it is above 2^-110. Tensor cores cut off what an F32 sum cannot hold, which
adds up: they sum the products of one step alone, and the sums of steps are added with rounding.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal(value):
    """Of F32 numbers from 2^-126 on, off by one unit in the last place at most."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def split_bf16(value):
    """The upper eight bits of F32 numbers as BF16, and what is left of their 24 bits: F32, exact."""
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), value - upper


@triton.jit(do_not_specialize=["rows", "steps"])
def multiply_streams(
    streams,
    fn,
    sums,
    squares,
    rows,
    steps,
    channels: tl.constexpr,
    mixes: tl.constexpr,
    ROWS: tl.constexpr,
    MIXES: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """streams [R, channels] BF16, fn [mixes, channels] F32 -> sums [parts, R, MIXES], squares [parts, R] F32.

    A program takes ROWS rows and ``steps`` times CHANNELS channels, a part; sums beyond ``mixes`` are zero. Powers of
    two: ROWS, MIXES (not below ``mixes``) and CHANNELS, from 16 on.
    """
    part = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mix = tl.arange(0, MIXES)
    given = streams + row[:, None].to(tl.int64) * channels
    matrix = fn + mix[:, None] * channels
    total = tl.zeros([ROWS, MIXES], tl.float32)
    squared = tl.zeros([ROWS, CHANNELS], tl.float32)
    first = tl.program_id(0) * steps * CHANNELS
    for low in tl.range(first, tl.minimum(first + steps * CHANNELS, channels), CHANNELS, num_stages=STAGES):
        channel = low + tl.arange(0, CHANNELS)[None, :]
        known = (row < rows)[:, None]
        used = (mix < mixes)[:, None]
        if channels % CHANNELS:
            known = known & (channel < channels)
            used = used & (channel < channels)
        x = tl.load(given + channel, mask=known, other=0.0)
        high, rest = split_bf16(tl.load(matrix + channel, mask=used, other=0.0))
        middle, rest = split_bf16(rest)
        last, _ = split_bf16(rest)
        product = tl.dot(x, tl.trans(last))
        product = tl.dot(x, tl.trans(middle), product)
        total += tl.dot(x, tl.trans(high), product)
        wide = x.to(tl.float32)
        squared += wide * wide
    there = row < rows
    place = part * rows + row
    tl.store(sums + place[:, None] * MIXES + mix[None, :], total, mask=there[:, None])
    tl.store(squares + place, tl.sum(squared, axis=1), mask=there)


@triton.jit(do_not_specialize=["rows", "parts"])
def finish_mix(
    sums,
    squares,
    scale,
    base,
    pre,
    post,
    comb,
    rows,
    parts,
    epsilon,
    norm_epsilon,
    channels: tl.constexpr,
    streams: tl.constexpr,
    iterations: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    MIXES: tl.constexpr,
) -> None:
    """Adds what ``multiply_streams`` gives, in a fixed order, and applies ``mhc.split_mixes``.

    scale [3], base [(2 + S) S] F32 -> pre [R, S], post [R, S], comb [R, S, S] F32. Powers of two: ROWS rows a program,
    PARTS not below ``parts``, STREAMS not below S.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    finish_coefficients(
        sums,
        squares,
        scale,
        base,
        pre,
        post,
        comb,
        row,
        rows,
        parts,
        epsilon,
        norm_epsilon,
        channels,
        streams,
        iterations,
        PARTS,
        STREAMS,
        MIXES,
    )


@triton.jit
def finish_coefficients(
    sums,
    squares,
    scale,
    base,
    pre,
    post,
    comb,
    row,
    rows,
    parts,
    epsilon,
    norm_epsilon,
    channels: tl.constexpr,
    streams: tl.constexpr,
    iterations: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    MIXES: tl.constexpr,
) -> None:
    """What :func:`finish_mix` does, for the rows that ``row`` numbers."""
    there = row < rows
    stream = tl.arange(0, STREAMS)
    beside = stream < streams
    pair = stream[:, None] * streams + stream[None, :]
    used = beside[:, None] & beside[None, :]

    part = tl.arange(0, PARTS)[:, None]
    known = (part < parts) & there[None, :]
    at = part.to(tl.int64) * rows + row[None, :]
    square = tl.sum(tl.load(squares + at, mask=known, other=0.0), axis=0)
    given = sums + at[:, :, None] * MIXES + stream[None, None, :]
    some = known[:, :, None] & beside[None, None, :]
    before = tl.sum(tl.load(given, mask=some, other=0.0), axis=0)
    after = tl.sum(tl.load(given + streams, mask=some, other=0.0), axis=0)
    given = sums + at[:, :, None, None] * MIXES + 2 * streams + pair[None, None, :, :]
    some = known[:, :, None, None] & used[None, None, :, :]
    between = tl.sum(tl.load(given, mask=some, other=0.0), axis=0)

    factor = tl.rsqrt(square / channels + norm_epsilon)
    before = before * factor[:, None] * tl.load(scale) + tl.load(base + stream, mask=beside, other=0.0)[None, :]
    after = after * factor[:, None] * tl.load(scale + 1)
    after += tl.load(base + streams + stream, mask=beside, other=0.0)[None, :]
    between = between * factor[:, None, None] * tl.load(scale + 2)
    between += tl.load(base + 2 * streams + pair, mask=used, other=0.0)[None, :, :]

    written = there[:, None] & beside[None, :]
    place = row[:, None].to(tl.int64) * streams + stream[None, :]
    tl.store(pre + place, 1.0 / (1.0 + tl.exp(-before)) + epsilon, mask=written)
    tl.store(post + place, 2.0 / (1.0 + tl.exp(-after)), mask=written)

    inside = used[None, :, :]
    largest = tl.max(tl.where(inside, between, float("-inf")), axis=2, keep_dims=True)
    mixed = tl.where(inside, tl.exp(between - largest), 0.0)
    # What pads is zero and is divided by one.
    padding = tl.where(beside, 0.0, 1.0)
    least = tl.where(beside, epsilon, 1.0)
    mixed *= reciprocal(tl.sum(mixed, axis=2, keep_dims=True) + padding[None, :, None])
    mixed = tl.where(inside, mixed + epsilon, 0.0)
    mixed *= reciprocal(tl.sum(mixed, axis=1, keep_dims=True) + least[None, None, :])
    for _ in range(iterations - 1):
        mixed *= reciprocal(tl.sum(mixed, axis=2, keep_dims=True) + least[None, :, None])
        mixed *= reciprocal(tl.sum(mixed, axis=1, keep_dims=True) + least[None, None, :])
    place = row[:, None, None].to(tl.int64) * (streams * streams) + pair[None, :, :]
    tl.store(comb + place, mixed, mask=there[:, None, None] & inside)
