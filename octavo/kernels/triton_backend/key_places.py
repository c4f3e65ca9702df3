"""Where the keys of each row lie, and by what angles it turns: the first kernel of ``attend``.

A key may lie in any of three tensors. It is found by its distance from the beginning of one of them, in steps of
``unit`` elements, so that a kernel knows how far copies are aligned. Packed entries are counted from their own pool,
all else from the latents.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.rotary import angles, store_turns

NOWHERE = tl.constexpr(-(2**63))
"""The distance of a place that holds no key."""
_LAST = tl.constexpr(2**31 - 1)
_SEARCHED = tl.constexpr(1024)


@triton.jit(do_not_specialize=["share", "written", "max_pages"])
def place_keys(
    latents: tl.tensor,
    ring: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    write_slots: tl.tensor,
    write_positions: tl.tensor,
    write_starts: tl.tensor,
    page_table: tl.tensor,
    entries: tl.tensor,
    selected: tl.tensor,
    frequencies: tl.tensor,
    distances: tl.tensor,
    used: tl.tensor,
    turns: tl.tensor,
    share: tl.int32,
    written: tl.int32,
    max_pages: tl.int32,
    channels: tl.constexpr,
    window: tl.constexpr,
    window_places: tl.constexpr,
    top_k: tl.constexpr,
    places: tl.constexpr,
    page_entries: tl.constexpr,
    entry_size: tl.constexpr,
    entry_unit: tl.constexpr,
    unit: tl.constexpr,
    packed: tl.constexpr,
    turning: tl.constexpr,
    PLACES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TURNING: tl.constexpr,
) -> None:
    """distances [R, places] int64, how many places each row needs, used [R] int32, and its turns, of one row.

    The W places of the window ascend, left-justified in ``window_places``; the selection follows. Dead rows need none.
    ``share`` global rows were dealt with each local one. turns [R, 2, turning] F32 as in ``rotary``. PLACES, CANDIDATES
    and TURNING pad places, share and ``turning`` to powers of two.
    """
    row = tl.program_id(0)
    position = tl.load(positions + row)
    live = position >= 0
    slot = tl.where(live, tl.load(slots + row), 0).to(tl.int64)
    angle = angles(position, frequencies, turning, TURNING)
    place = tl.arange(0, PLACES)
    start, offset = _step_of_request(
        slot, live, row, share, written, write_slots, write_positions, write_starts, CANDIDATES
    )

    wanted = tl.maximum(position - window + 1, 0) + place
    recent = (wanted + offset).to(tl.int64) * (channels // unit)
    older = _between(latents, ring, unit) + (slot * window + wanted % window) * (channels // unit)
    found = tl.where(wanted <= position, tl.where(wanted >= start, recent, older), NOWHERE)
    count = tl.minimum(position + 1, window)

    if top_k > 0:
        chosen = place - window_places
        inside = live & (chosen >= 0) & (chosen < top_k)
        entry = tl.load(selected + row.to(tl.int64) * top_k + chosen, mask=inside, other=-1)
        usable = inside & (entry >= 0)
        page = tl.load(page_table + slot * max_pages + entry // page_entries, mask=usable, other=0).to(tl.int64)
        at = (page * page_entries + entry % page_entries) * (entry_size // entry_unit)
        if not packed:
            at += _between(latents, entries, unit)
        found = tl.where(chosen < 0, found, tl.where(usable, at, NOWHERE))
        count = tl.maximum(count, tl.max(tl.where(usable, place + 1, 0), axis=0))
    tl.store(distances + row.to(tl.int64) * places + place, found, mask=live & (place < places))
    tl.store(used + row, count)
    store_turns(turns, row, angle, turning)


@triton.jit
def key_words(
    distances: tl.tensor, words: tl.tensor, places: tl.int32, KEYS: tl.constexpr, TILES: tl.constexpr
) -> None:
    """Which places of each tile of 64 hold a key, of one row: words [R, TILES] int64 from distances [R, places].

    A tile of 64 keys is -1; TILES pads tiles to a power of two, with zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    key = tl.arange(0, KEYS)
    place = tile[:, None] * KEYS + key[None, :]
    found = tl.load(distances + row * places + place, mask=place < places, other=NOWHERE) != NOWHERE
    bits = tl.sum(found.to(tl.int64) << key.to(tl.int64)[None, :], axis=1)
    tl.store(words + row * TILES + tile, bits)


@triton.jit
def _step_of_request(
    slot: tl.tensor,
    live: tl.tensor,
    row: tl.tensor,
    share: tl.tensor,
    written: tl.tensor,
    write_slots: tl.tensor,
    write_positions: tl.tensor,
    write_starts: tl.tensor,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(first position of this step, global row less position) of the request in a slot, int32.

    Any row of the request tells both, since its rows are contiguous. A local row mostly is one of the ``share`` global
    rows dealt with it; if none of these is the request's, all are searched. A request without rows in this step starts
    beyond every position.
    """
    dealt = tl.arange(0, CANDIDATES)
    index = row * share + dealt
    found = _last_of(slot, index, (dealt < share) & (index < written), write_slots, write_positions)
    if live & (found < 0):
        for low in range(0, written, _SEARCHED):
            every = low + tl.arange(0, _SEARCHED)
            found = tl.maximum(found, _last_of(slot, every, every < written, write_slots, write_positions))
    known = live & (found >= 0)
    start = tl.load(write_starts + found, mask=known, other=_LAST)
    offset = tl.where(known, found, 0) - tl.load(write_positions + found, mask=known, other=0)
    return start, offset


@triton.jit
def _last_of(
    slot: tl.tensor, index: tl.tensor, inside: tl.tensor, write_slots: tl.tensor, write_positions: tl.tensor
) -> tl.tensor:
    """The last of some global rows that is a live one of the slot, or -1."""
    theirs = tl.load(write_slots + index, mask=inside, other=-1) == slot
    theirs = theirs & (tl.load(write_positions + index, mask=inside, other=-1) >= 0)
    return tl.max(tl.where(theirs & inside, index, -1), axis=0)


@triton.jit
def _between(first: tl.tensor, second: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """Steps from one tensor to another of the same type. Both begin at a multiple of 16 bytes."""
    width: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8
    return (second.to(tl.int64) - first.to(tl.int64)) // (width * unit)
