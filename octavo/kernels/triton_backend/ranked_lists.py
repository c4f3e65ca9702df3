"""Lists of the best so far, which a stream of scores fills: see ``select_kernels``."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(127)
"""Code of minus infinity: every finite score lies above it, and 0 stands for no score."""

BAR = tl.constexpr(65536)
"""The state of a list is its bar times 2^16 and its length."""

PART = tl.constexpr(512)
"""Places of a list that are moved at once."""

STORE = tl.constexpr("""{
.reg .pred taken;
setp.ne.s32 taken, $5, 0;
@taken st.global.b16 [$1], $3;
@taken st.global.b32 [$2], $4;
mov.b32 $0, 0;
}""")
"""A code and a number to their addresses where they are taken; a plain store would move them between threads first."""


@triton.jit
def append(codes, numbers, stride, code, number, state, dtype: tl.constexpr):
    """Append to each row's list, in order, what lies above its bar -> the new states.

    code [KEYS, ROWS], number [KEYS]; the state of a row's list stands at every key of it, [KEYS, ROWS] uint32. Of
    several rows, a product with a triangle of ones ranks what is taken: each thread has what it needs. Its factors are
    of ``dtype``.
    """
    keys: tl.constexpr = code.shape[0]
    rows: tl.constexpr = code.shape[1]
    taken = code > (state // BAR).to(tl.int32)
    if rows == 1:
        one = taken.to(tl.int32)
        rank = tl.cumsum(one, axis=0) - one
        total = tl.broadcast_to(tl.sum(one, axis=0, keep_dims=True), code.shape)
    else:
        key = tl.arange(0, keys)
        one = taken.to(dtype)
        rank = tl.dot((key[:, None] > key[None, :]).to(dtype), one, input_precision="ieee").to(tl.int32)
        total = tl.dot(tl.full((keys, keys), 1.0, dtype), one, input_precision="ieee").to(tl.int32)
    at = tl.arange(0, rows)[None, :] * stride + (state % BAR).to(tl.int32) + rank
    store_taken(codes, numbers, at, code, number, taken)
    return state + total.to(tl.uint32)


@triton.jit
def store_taken(codes, numbers, at, code, number, taken):
    """Codes [KEYS, ROWS] and the numbers [KEYS] of their keys to the places ``at`` of lists, where they are taken."""
    tl.inline_asm_elementwise(
        STORE,
        "=r,l,l,r,r,r",
        [
            codes.to(tl.int64) + at.to(tl.int64) * 2,
            numbers.to(tl.int64) + at.to(tl.int64) * 4,
            code,
            tl.broadcast_to(number[:, None], code.shape),
            taken.to(tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def shorten(
    codes,
    numbers,
    stride,
    tile,
    high,
    per_tile: tl.constexpr,
    state,
    keep: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Lists cut down to their best ``keep`` if one is full or the stream ends -> states, tile of the next check."""
    most = tl.max(tl.max((state % BAR).to(tl.int32), axis=1), axis=0)
    if (most > CAPACITY - per_tile) | (tile == high - 1):
        rows: tl.constexpr = state.shape[1]
        lane = tl.arange(0, rows)[None, :]
        place = tl.arange(0, CAPACITY)
        tl.debug_barrier()  # what other threads have appended
        for member in range(rows):
            filled = tl.max(tl.max(tl.where(lane == member, (state % BAR).to(tl.int32), 0), axis=1), axis=0)
            if filled > keep:
                at = member * stride
                every = tl.load(codes + at + place, mask=place < filled, other=0).to(tl.int32)
                least, room = least_of(every, place < filled, filled, keep)
                before = 0
                for low in range(0, filled, PART):
                    part = low + tl.arange(0, PART)
                    code = tl.load(codes + at + part, mask=part < filled, other=0).to(tl.int32)
                    number = tl.load(numbers + at + part, mask=part < filled, other=0)
                    kept, target, before = places_of(code, part < filled, least, room, before)
                    tl.debug_barrier()  # all have read; what is written from here on lies below what is read next
                    tl.store(codes + at + target, code.to(tl.uint16), mask=kept)
                    tl.store(numbers + at + target, number, mask=kept)
                state = tl.where(lane == member, (least * BAR + keep).to(tl.uint32), state)
        most = tl.minimum(most, keep)
    return state, tile + tl.maximum((CAPACITY - most) // per_tile, 1)


@triton.jit
def least_of(code, used, count, keep: tl.constexpr):
    """(the least code among the best ``keep`` of the ``count`` used ones, how many of that very code are kept)."""
    low = tl.min(tl.where(used, code, BAR), axis=0)
    high = tl.max(code, axis=0) + 1
    high = tl.where(count > keep, high, low + 1)
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.sum((code >= middle).to(tl.int32), axis=0) >= keep
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, keep - tl.sum((used & (code > low)).to(tl.int32), axis=0)


@triton.jit
def places_of(code, used, least, room, before):
    """(which are kept, their places among the kept, ``before`` of what follows): of the least code, the first ``room``.

    ``before`` counts what came earlier: codes above the least, and 2^16 times the least ones.
    """
    better = used & (code > least)
    level = used & (code == least)
    one = better.to(tl.int32) + level.to(tl.int32) * BAR
    rank = before + tl.cumsum(one, axis=0)
    kept = better | (level & (rank // BAR <= room))
    return kept, rank % BAR + tl.minimum(rank // BAR, room) - 1, before + tl.sum(one, axis=0)


@triton.jit
def fill(codes, numbers, base, count, CAPACITY: tl.constexpr):
    """The list of the numbers below ``count``; base [1]."""
    place = tl.arange(0, CAPACITY)
    at = base + place
    tl.store(codes + at, tl.zeros((CAPACITY,), tl.uint16), mask=place < count)
    tl.store(numbers + at, place, mask=place < count)
