"""Kernels of ``attend`` for models of any size: rows over their own keys, and the union of the parts of a row.

A program takes one row, some heads and a share of the row's keys, in tiles: first the places of the window, then the
selected entries, as the reference orders them; where W is a multiple of the tile, running maxima are the reference's
too. Queries turn on their way in and outputs turn back on their way out (``rotary``). Logarithms are of base 2, which
is the instruction that there is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.key_places import NOWHERE
from octavo.kernels.triton_backend.rotary import turned

LOG2_E = tl.constexpr(1.4426950408889634)
NO_MAXIMUM = tl.constexpr(-1e30)
"""Where a running maximum starts: finite, so that minus infinity less it is no NaN."""
UNPACKED_EXPONENT = tl.constexpr(8)
"""Unpacked entries are 2^8 too small: a scale times 2^118 leaves neither BF16 nor F32."""


@triton.jit(do_not_specialize=["rows", "splits"])
def attend_part(
    query: tl.tensor,
    latents: tl.tensor,
    sink: tl.tensor,
    entries: tl.tensor,
    distances: tl.tensor,
    used: tl.tensor,
    turns: tl.tensor,
    positions: tl.tensor,
    attended: tl.tensor,
    numerators: tl.tensor,
    maxima: tl.tensor,
    denominators: tl.tensor,
    rows: tl.int32,
    splits: tl.int32,
    heads: tl.constexpr,
    channels: tl.constexpr,
    turning: tl.constexpr,
    window_places: tl.constexpr,
    places: tl.constexpr,
    entry_unit: tl.constexpr,
    unit: tl.constexpr,
    scale: tl.constexpr,
    packed: tl.constexpr,
    divided: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """One row of ``attended`` or, if it is divided, a share of its numerator, maximum and denominator.

    Tensors as in the operator and in ``key_places``, contiguous; numerators [splits, R, H, C], maxima and denominators
    [splits, R, H] F32. ``turning`` pairs of channels turn. HEADS and CHANNELS pad to powers of two.
    """
    row = tl.program_id(0)
    split = tl.program_id(2)
    live = tl.load(positions + row) >= 0
    tiles = (tl.where(live, tl.load(used + row), 0) + KEYS - 1) // KEYS
    share = (tiles + splits - 1) // splits
    low = split * share
    high = tl.minimum(low + share, tiles)
    distances += row.to(tl.int64) * places
    turns += row.to(tl.int64) * (2 * turning)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)
    within = head[:, None] * channels + channel[None, :]
    stored = (head < heads)[:, None] & (channel < channels)[None, :]
    first = row.to(tl.int64) * (heads * channels)
    q = turned(tl.load(query + first + within, mask=stored, other=0.0), turns, channels, turning, inverse=False)
    maximum = tl.full((HEADS,), NO_MAXIMUM, tl.float32)
    denominator = tl.zeros((HEADS,), tl.float32)
    numerator = tl.zeros((HEADS, CHANNELS), tl.float32)
    window_tiles: tl.constexpr = window_places // KEYS
    plain_high = tl.minimum(high, window_tiles) if packed else high
    for tile in range(low, plain_high):
        distance = tl.load(distances + tile * KEYS + tl.arange(0, KEYS))
        keys = _plain_keys(distance, latents, channels, unit, CHANNELS)
        maximum, denominator, numerator = _add_keys(
            q, keys, distance, maximum, denominator, numerator, scale * LOG2_E, 0
        )
    if packed:
        for tile in range(tl.maximum(low, window_tiles), high):
            distance = tl.load(distances + tile * KEYS + tl.arange(0, KEYS))
            keys = _packed_keys(distance, entries, channels, entry_unit, KEYS, CHANNELS).to(q.dtype)
            maximum, denominator, numerator = _add_keys(
                q, keys, distance, maximum, denominator, numerator, scale * LOG2_E, UNPACKED_EXPONENT
            )

    if not divided:
        denominator += tl.exp2(tl.load(sink + head, mask=head < heads, other=0.0) * LOG2_E - maximum)
        result = numerator * tl.where(live, 1.0 / denominator, 0.0)[:, None]
        result = turned(result.to(attended.dtype.element_ty), turns, channels, turning, inverse=True)
        tl.store(attended + first + within, result, mask=stored)
    else:
        at = (split.to(tl.int64) * rows + row) * heads
        tl.store(maxima + at + head, maximum, mask=head < heads)
        tl.store(denominators + at + head, denominator, mask=head < heads)
        tl.store(numerators + at * channels + within, numerator, mask=stored & (low < high))


@triton.jit
def _plain_keys(
    distance: tl.tensor, origin: tl.tensor, channels: tl.constexpr, unit: tl.constexpr, CHANNELS: tl.constexpr
) -> tl.tensor:
    """Keys [KEYS, CHANNELS] as they are stored; zero where there is none."""
    channel = tl.arange(0, CHANNELS)
    wanted = (distance != NOWHERE)[:, None] & (channel < channels)[None, :]
    return tl.load((origin + distance * unit)[:, None] + channel[None, :], mask=wanted, other=0.0)


@triton.jit
def _packed_keys(
    distance: tl.tensor,
    pool: tl.tensor,
    channels: tl.constexpr,
    unit: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Packed entries -> values [KEYS, CHANNELS] F32, 2^UNPACKED_EXPONENT too small; zero where there is none.

    The three low bits of a code, put on the lowest exponent bits of F32, mean 2^126 times less.
    """
    group = tl.arange(0, CHANNELS // 16)
    byte = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    entry = pool + distance * unit
    wanted = (distance != NOWHERE)[:, None] & (group < channels // 16)[None, :]
    codes = tl.load(entry[:, None, None] + byte[None, :, :], mask=wanted[:, :, None], other=0).to(tl.int32)
    scales = tl.load(entry[:, None] + channels // 2 + group[None, :], mask=wanted, other=0)
    even = ((codes & 7) << 22) | ((codes & 8) << 28)
    odd = ((codes & 0x70) << 18) | ((codes & 0x80) << 24)
    values = tl.reshape(tl.join(even, odd), (KEYS, CHANNELS)).to(tl.float32, bitcast=True)
    factor = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 2.0**118
    # A product comes last: Triton 3.6 cannot lower a reshape that feeds a dot.
    return values * tl.reshape(tl.broadcast_to(factor[:, :, None], (KEYS, CHANNELS // 16, 16)), (KEYS, CHANNELS))


@triton.jit
def _add_keys(
    q: tl.tensor,
    keys: tl.tensor,
    distance: tl.tensor,
    maximum: tl.tensor,
    denominator: tl.tensor,
    numerator: tl.tensor,
    scale: tl.constexpr,
    exponent: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax. Keys are values too; they are 2^exponent too small."""
    scores = tl.dot(q, tl.trans(keys)) * (scale * 2.0**exponent)
    scores = tl.where((distance != NOWHERE)[None, :], scores, -float("inf"))
    previous = maximum
    maximum = tl.maximum(previous, tl.max(scores, axis=1))
    rescale = tl.exp2(previous - maximum)
    shares = tl.exp2(scores - maximum[:, None])
    denominator = denominator * rescale + tl.sum(shares, axis=1)
    numerator = tl.dot((shares * 2.0**exponent).to(q.dtype), keys, numerator * rescale[:, None])
    return maximum, denominator, numerator


@triton.jit(do_not_specialize=["rows", "splits"])
def unite_parts(
    numerators: tl.tensor,
    maxima: tl.tensor,
    denominators: tl.tensor,
    sink: tl.tensor,
    turns: tl.tensor,
    positions: tl.tensor,
    attended: tl.tensor,
    rows: tl.int32,
    splits: tl.int32,
    heads: tl.constexpr,
    channels: tl.constexpr,
    turning: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """One head of one row of ``attended`` from its parts; SPLITS and CHANNELS pad to powers of two."""
    let_next_start()
    wait_for_ahead()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    live = tl.load(positions + row) >= 0
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, CHANNELS)
    at = (split.to(tl.int64) * rows + row) * heads + head
    share = tl.load(denominators + at, mask=split < splits, other=0.0)
    part_maximum = tl.load(maxima + at, mask=split < splits, other=NO_MAXIMUM)
    given = (share > 0)[:, None] & (channel < channels)[None, :]
    part = tl.load(numerators + at[:, None] * channels + channel[None, :], mask=given, other=0.0)
    maximum = tl.max(part_maximum, axis=0)
    rescale = tl.exp2(part_maximum - maximum)
    denominator = tl.sum(share * rescale, axis=0) + tl.exp2(tl.load(sink + head) * LOG2_E - maximum)
    result = tl.where(live, tl.sum(part * rescale[:, None], axis=0) / denominator, 0.0)
    result = result.to(attended.dtype.element_ty)[None, :]
    result = turned(result, turns + row * (2 * turning), channels, turning, inverse=True)
    stored = (channel < channels)[None, :]
    tl.store(attended + (row * heads + head) * channels + channel[None, :], result, mask=stored)
