"""Kernels before the products of ``experts``: rounded inputs, the choice of experts, and the order of the work.

Products take their input in *fragment order*: within 128 channels, channel 32 q + 8 w + 4 p + 2 a + b stands at place
32 w + 16 a + 8 b + 2 q + p. Thread q of the four that share a row in the operand of a tensor core then holds one group
of 32 weights, which are 16 bytes in a row with one scale (see ``expert_products``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.scales import scale_and_inverse

GROUP = tl.constexpr(32)
"""Channels of one Q8 scale."""
BLOCK = tl.constexpr(128)
"""Channels over which fragment order permutes."""
PIECE = tl.constexpr(32)
"""Rows by which wide tiles grow."""
SHIFT = tl.constexpr(2.0**64)
"""Inputs are 2^64 too large and weights 2^-64 too small: see ``expert_products``."""


@triton.jit
def round_q8_groups(x: tl.tensor) -> tl.tensor:
    """Through Q8 and back: [G, 32, N] F32, a scale for each group along axis 1; as ``quantise.round_q8``, to the bit.

    E4M3 has steps of an eighth of the power of two below, at least 2^-9. Adding and taking away 1.5 x 2^23 steps rounds
    to them, ties to even.
    """
    amax = tl.maximum(tl.max(tl.abs(x), axis=1, keep_dims=True), 1e-4)
    exponent, inverse = scale_and_inverse(amax * (1.0 / 448.0))
    scaled = tl.minimum(
        tl.maximum(x * inverse, -448.0, propagate_nan=tl.PropagateNan.ALL), 448.0, propagate_nan=tl.PropagateNan.ALL
    )
    below = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    steps = tl.maximum(below * 0.125, 0.001953125) * 12582912.0
    return ((scaled + steps) - steps) * exponent.to(tl.float32, bitcast=True)


@triton.jit
def in_fragment_order(x: tl.tensor) -> tl.tensor:
    """[N, C] with C a multiple of 128 -> the same with its columns in fragment order."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    parts = tl.reshape(x, [rows * (columns // BLOCK), 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 4, 5, 1, 3)), [rows, columns])


@triton.jit(do_not_specialize=["resident"])
def round_rows(
    x: tl.tensor,
    rounded: tl.tensor,
    counts: tl.tensor,
    channels: tl.int32,
    padded: tl.int32,
    resident: tl.int32,
    COLUMNS: tl.constexpr,
    RESIDENT: tl.constexpr,
) -> None:
    """x [R, D] BF16 -> rounded [R, padded] BF16, Q8, in fragment order, x 2^64, zero beyond D.

    Also sets counts [resident] int32 to zero. ``padded`` is D up to a multiple of 128. One row and COLUMNS channels a
    program.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(x + row * channels + column, mask=column < channels, other=0.0).to(tl.float32)
    groups = round_q8_groups(tl.reshape(values, [COLUMNS // GROUP, GROUP, 1])) * SHIFT
    fragments = tl.permute(tl.reshape(groups, [COLUMNS // BLOCK, 4, 4, 2, 2, 2]), (0, 2, 4, 5, 1, 3))
    ordered = tl.reshape(fragments, [COLUMNS]).to(rounded.dtype.element_ty)
    tl.store(rounded + row * padded + column, ordered, mask=column < padded)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        expert = tl.arange(0, RESIDENT)
        tl.store(counts + expert, tl.zeros([RESIDENT], tl.int32), mask=expert < resident)


@triton.jit(do_not_specialize=["rows"])
def score_rows(
    x: tl.tensor,
    gate: tl.tensor,
    rounded: tl.tensor,
    parts: tl.tensor,
    counts: tl.tensor,
    rows: tl.int32,
    channels: tl.int32,
    padded: tl.int32,
    experts: tl.int32,
    resident: tl.int32,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    RESIDENT: tl.constexpr,
) -> None:
    """:func:`round_rows` and the router's product in one: parts [splits, R, E] F32, a sum for each CHANNELS channels.

    gate [E, D] BF16. Grid: tiles of EXPERTS experts and one more, whose programs round; parts; tiles of ROWS rows.
    Launched in the ordinary way: a collective may stand ahead (``dependent_launch``).
    """
    let_next_start()
    split = tl.program_id(1)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    column = split * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = column < channels
    wanted = (expert < experts)[:, None] & inside[None, :]
    weights = tl.load(gate + expert[:, None] * channels + column[None, :], mask=wanted, other=0.0)
    here = row < rows
    source = x + row[:, None].to(tl.int64) * channels + column[None, :]
    values = tl.load(source, mask=here[:, None] & inside[None, :], other=0.0)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        total = multiply(weights, tl.trans(values))
        place = parts + (split * rows + row)[None, :].to(tl.int64) * experts + expert[:, None]
        tl.store(place, total, mask=(expert < experts)[:, None] & here[None, :])
    else:
        groups = tl.reshape(values.to(tl.float32), [ROWS * (CHANNELS // GROUP), GROUP, 1])
        scaled = tl.reshape(round_q8_groups(groups) * SHIFT, [ROWS, CHANNELS])
        ordered = in_fragment_order(scaled).to(rounded.dtype.element_ty)
        target = rounded + row[:, None].to(tl.int64) * padded + column[None, :]
        tl.store(target, ordered, mask=here[:, None] & (column < padded)[None, :])
        if (split == 0) & (tl.program_id(2) == 0):
            number = tl.arange(0, RESIDENT)
            tl.store(counts + number, tl.zeros([RESIDENT], tl.int32), mask=number < resident)


@triton.jit
def multiply(weights: tl.tensor, x: tl.tensor) -> tl.tensor:
    return tl.dot(weights, x)


@triton.jit
def better(
    key: tl.tensor,
    expert: tl.tensor,
    score: tl.tensor,
    other_key: tl.tensor,
    other_expert: tl.tensor,
    other_score: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whichever has the larger key, of equal ones the lower number."""
    first = (key > other_key) | ((key == other_key) & (expert < other_expert))
    return tl.where(first, key, other_key), tl.where(first, expert, other_expert), tl.where(first, score, other_score)


@triton.jit(do_not_specialize=["rows", "first_expert"])
def route(
    parts: tl.tensor,
    live: tl.tensor,
    image: tl.tensor,
    bias: tl.tensor,
    bias_vl: tl.tensor,
    counts: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    rows: tl.int32,
    experts: tl.int32,
    resident: tl.int32,
    first_expert: tl.int32,
    route_scale: tl.float32,
    top_k: tl.constexpr,
    vision: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """As ``experts.choose_experts``, with the numbers of resident experts alone.

    parts [PARTS, R, E] F32, whose sums in this order are the logits, live and image [R] uint8, bias and bias_vl [E] F32
    -> chosen [R, top_k] int32, from 0 for first_expert, -1 on dead rows and for experts of others; weights [R, top_k]
    F32; with COUNT, pairs of each resident expert are added to counts [resident] int32. Powers of two: ROWS rows a
    program, EXPERTS and CHOICES pad.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    expert = tl.arange(0, EXPERTS)
    known = there[:, None] & (expert < experts)[None, :]
    let_next_start()
    wait_for_ahead()
    place = row[:, None].to(tl.int64) * experts + expert[None, :]
    given = tl.load(parts + place, mask=known, other=0.0)
    for part in tl.static_range(1, PARTS):
        given += tl.load(parts + part * rows * experts + place, mask=known, other=0.0)
    scores = tl.sqrt_rn(tl.where(given > 20.0, given, libdevice.log1p(libdevice.exp(given))))
    offset = tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    if vision:
        seen = tl.load(image + row, mask=there, other=0) != 0
        offset = tl.where(seen[:, None], tl.load(bias_vl + expert, mask=expert < experts, other=0.0)[None, :], offset)
    keys = scores + offset
    keys = tl.where(known, tl.where(keys == keys, keys, float("inf")), float("-inf"))

    choice = tl.arange(0, CHOICES)
    numbers = tl.full([ROWS, CHOICES], -1, tl.int32)
    taken = tl.zeros([ROWS, CHOICES], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    number = tl.broadcast_to(expert[None, :], [ROWS, EXPERTS])
    for k in tl.static_range(top_k):
        _, best, score = tl.reduce((keys, number, scores), 1, better)
        mine = expert[None, :] == best[:, None]
        total = total + score
        numbers = tl.where((choice == k)[None, :], best[:, None], numbers)
        taken = tl.where((choice == k)[None, :], score[:, None], taken)
        keys = tl.where(mine, float("-inf"), keys)
    taken = tl.div_rn(taken, tl.broadcast_to((total + 1e-20)[:, None], [ROWS, CHOICES])) * route_scale

    alive = tl.load(live + row, mask=there, other=0) != 0
    local = numbers - first_expert
    mine = alive[:, None] & (local >= 0) & (local < resident) & (choice < top_k)[None, :]
    local = tl.where(mine, local, -1)
    place = row[:, None] * top_k + choice[None, :]
    written = there[:, None] & (choice < top_k)[None, :]
    tl.store(chosen + place, local, mask=written)
    tl.store(weights + place, taken, mask=written)
    if COUNT:
        tl.atomic_add(counts + tl.maximum(local, 0), 1, mask=mine, sem="relaxed")


@triton.jit(do_not_specialize=["given", "resident"])
def place_pairs(
    chosen: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    totals: tl.tensor,
    given: tl.int32,
    resident: tl.int32,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    CHUNK: tl.constexpr,
    RESIDENT: tl.constexpr,
) -> None:
    """The pairs of one resident expert, in their order, and its tiles; a program an expert.

    chosen [given] int32 (as ``route`` gives it) -> pairs [given] int32: numbers of pairs, sorted by expert. Rows of
    tiles are (expert, first place in ``pairs``, place after the last) int32, of ROWS places; what is left of an expert
    joins the last of these if it is MORE places or fewer, else it is one more tile. Large tiles come first, by steps of
    PIECE places, so that the last to be taken are short. totals [2] int32: how many tiles and how many pairs there are.
    """
    expert = tl.program_id(0)
    number = tl.arange(0, RESIDENT)
    count = tl.load(counts + number, mask=number < resident, other=0)
    whole = count // ROWS
    rest = count - whole * ROWS
    joined = (whole > 0) & (rest <= MORE)
    ahead_of_last = tl.where(joined, whole - 1, tl.where(count > 0, whole, 0))
    last = count - ahead_of_last * ROWS
    size = (last + PIECE - 1) // PIECE
    of_whole: tl.constexpr = (ROWS + PIECE - 1) // PIECE

    me = number == expert
    before = number < expert
    my_size = tl.sum(tl.where(me, size, 0))
    my_ahead = tl.sum(tl.where(me, ahead_of_last, 0))
    larger = tl.sum((size > of_whole).to(tl.int32))
    at = larger + tl.sum(tl.where(before, ahead_of_last, 0))
    last_at = tl.sum(((size > my_size) | ((size == my_size) & before)).to(tl.int32))
    if my_size <= of_whole:
        last_at += tl.sum(ahead_of_last)
    start = tl.sum(tl.where(before, count, 0))
    end = start + tl.sum(tl.where(me, count, 0))
    if expert == 0:
        tl.store(totals, tl.sum(ahead_of_last + (count > 0).to(tl.int32)))
        tl.store(totals + 1, tl.sum(count))

    for number_of_tile in range(0, my_ahead):
        row = tiles + (at + number_of_tile) * 3
        low = start + number_of_tile * ROWS
        tl.store(row, expert)
        tl.store(row + 1, low)
        tl.store(row + 2, low + ROWS)
    if end > start:
        row = tiles + last_at * 3
        tl.store(row, expert)
        tl.store(row + 1, start + my_ahead * ROWS)
        tl.store(row + 2, end)

    place = start
    for low in range(0, tl.where(end > start, given, 0), CHUNK):
        pair = low + tl.arange(0, CHUNK)
        mine = tl.load(chosen + pair, mask=pair < given, other=-1) == expert
        ahead = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(pairs + place + ahead - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32))


@triton.jit
def round_pairs(
    x: tl.tensor,
    pairs: tl.tensor,
    totals: tl.tensor,
    rounded: tl.tensor,
    top_k: tl.constexpr,
    channels: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """:func:`round_rows` in the order of ``pairs``: rounded [P, D] BF16 has a row of x for each place.

    totals as ``place_pairs`` gives it; D a multiple of 128. ROWS rows at a time and COLUMNS channels a program.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(totals + 1)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        place = first + tl.arange(0, ROWS)
        wanted = (place < end)[:, None] & (column < channels)[None, :]
        row = tl.load(pairs + place, mask=place < end, other=0) // top_k
        values = tl.load(x + (row.to(tl.int64)[:, None] * channels + column[None, :]), mask=wanted, other=0.0)
        groups = round_q8_groups(tl.reshape(values.to(tl.float32), [ROWS * (COLUMNS // GROUP), GROUP, 1])) * SHIFT
        ordered = in_fragment_order(tl.reshape(groups, [ROWS, COLUMNS]))
        target = rounded + (place.to(tl.int64)[:, None] * channels + column[None, :])
        tl.store(target, ordered.to(rounded.dtype.element_ty), mask=wanted)
