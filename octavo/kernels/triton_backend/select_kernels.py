"""Kernels of the indexer: scores as a stream, of which each row keeps a short list, and the union of such lists.

A list holds what may still be among the best of its row, in ascending order of entries: numbers and 16-bit codes. A
code orders BF16 scores; above a row's *bar* an entry is appended, and when a list is full, all but the best are dropped
and the bar rises to the least code that was kept. What comes later and equals it loses: ties go to the lower entry.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton_backend.index_products import (
    block_numbers,
    found_keys,
    pages_of,
    queries_of,
    score_codes,
    stored_keys,
    weights_of,
)
from octavo.kernels.triton_backend.ranked_lists import BAR, LOWEST, append, fill, least_of, places_of, shorten

GROUP = tl.constexpr(8)
"""Neighbouring rows that share keys where they are of one request: with 32 heads, 256 columns of a product."""

FORCED = tl.constexpr(65535)
"""Above the code of every score."""


@triton.jit(do_not_specialize=["rows", "max_pages", "splits"])
def score_rows(
    query,
    weights,
    keys,
    page_table,
    slots,
    positions,
    candidates,
    codes,
    entries,
    counts,
    block_codes,
    blocks,
    block_counts,
    rows,
    max_pages,
    splits,
    scale,
    heads: tl.constexpr,
    channels: tl.constexpr,
    page_entries: tl.constexpr,
    ratio: tl.constexpr,
    top_k: tl.constexpr,
    top_blocks: tl.constexpr,
    block_size: tl.constexpr,
    listed: tl.constexpr,
    packed: tl.constexpr,
    aligned: tl.constexpr,
    least_tiles: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One split of the keys of ROWS rows, 1 or GROUP: their lists of entries and, if top_blocks > 0, of blocks.

    Tensors as in the operator, contiguous. codes and entries [R, splits, CAPACITY] uint16 and int32, counts [R, splits]
    int32, and so for blocks. Groups whose rows are of one request are scored together, all others row by row: of the
    two grids that are launched each does its rows only. ``listed`` is the width of ``candidates``, 0 if there are
    none; a row whose candidates are not simply its first blocks is scored by itself, from the list alone.
    """
    first = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    member, slot, visible, scored, together = _group(
        first, rows, slots, positions, candidates, ratio, top_k, top_blocks, block_size, listed
    )
    row = first + tl.arange(0, ROWS)
    if ROWS == 1:
        own = member == first
        mine = row < rows
        if tl.max(tl.where(own & together, 1, 0), axis=0) > 0:
            return
        seen = tl.sum(tl.where(own, visible, 0), axis=0)
        length = tl.sum(tl.where(own & scored, visible, 0), axis=0)
        limit = tl.full((1,), 0, tl.int32) + length
        request = tl.sum(tl.where(own & scored, slot, 0), axis=0).to(tl.int64)
    else:
        mine = together
        seen = 0
        limit = tl.where(together, visible, 0)
        length = tl.max(limit, axis=0)
        request = tl.max(tl.where(together, slot, 0), axis=0).to(tl.int64)
        if length == 0:
            return
    own_list: tl.constexpr = ROWS == 1 and listed > 0
    stream = length
    if own_list:
        place = tl.arange(0, LISTED)
        given = tl.load(candidates + first.to(tl.int64) * listed + place, mask=place < listed, other=-1)
        stream = tl.sum(tl.where((given >= 0) & (length > 0), block_size, 0), axis=0)

    tiles = (stream + KEYS - 1) // KEYS
    share = tl.cdiv(tiles, tl.minimum(tl.maximum(tiles // least_tiles, 1), splits))
    low = split * share
    high = tl.minimum(low + share, tiles)
    list_number = row.to(tl.int64) * splits + split
    if low >= high:
        count = 0
        block_count = 0
        if (ROWS == 1) and (split == 0) and (length == 0):
            count = seen
            fill(codes, entries, list_number * CAPACITY, count, CAPACITY)
            if top_blocks > 0:
                block_count = tl.cdiv(seen, block_size)
                fill(block_codes, blocks, list_number * BLOCK_CAPACITY, block_count, BLOCK_CAPACITY)
        tl.store(counts + list_number, tl.zeros((ROWS,), tl.int32) + count, mask=mine)
        if top_blocks > 0:
            tl.store(block_counts + list_number, tl.zeros((ROWS,), tl.int32) + block_count, mask=mine)
        return

    table = page_table + request * max_pages
    chosen = candidates + first.to(tl.int64) * listed
    q = queries_of(query, row, mine, heads, channels, packed, ROWS, HEADS, CHANNELS)
    w = weights_of(weights, row, mine, scale, heads, ROWS, HEADS)
    newest = tl.where(limit > 0, (limit - 1) // block_size, -1)
    codes += (first.to(tl.int64) * splits + split) * CAPACITY
    entries += (first.to(tl.int64) * splits + split) * CAPACITY
    block_codes += (first.to(tl.int64) * splits + split) * BLOCK_CAPACITY
    blocks += (first.to(tl.int64) * splits + split) * BLOCK_CAPACITY

    # What is wanted of a tile is asked for while others are computed: keys one tile ahead, pages two, blocks three.
    first_block = block_numbers(low, 0, chosen, stream, own_list, packed, block_size, KEYS)
    first_place, first_page = pages_of(
        low, 0, first_block, table, stream, length, own_list, packed, block_size, page_entries, KEYS
    )
    word_0, word_1, word_2, word_3, factor = stored_keys(
        keys, first_place, first_page, channels, page_entries, packed, aligned, CHANNELS
    )
    first_block = block_numbers(low + 1, 0, chosen, stream, own_list, packed, block_size, KEYS)
    first_place, first_page = pages_of(
        low + 1, 0, first_block, table, stream, length, own_list, packed, block_size, page_entries, KEYS
    )
    first_block = block_numbers(low + 2, 0, chosen, stream, own_list, packed, block_size, KEYS)
    if packed:
        second_block = block_numbers(low, 1, chosen, stream, own_list, packed, block_size, KEYS)
        second_place, second_page = pages_of(
            low, 1, second_block, table, stream, length, own_list, packed, block_size, page_entries, KEYS
        )
        word_4, word_5, word_6, word_7, second_factor = stored_keys(
            keys, second_place, second_page, channels, page_entries, packed, aligned, CHANNELS
        )
        second_block = block_numbers(low + 1, 1, chosen, stream, own_list, packed, block_size, KEYS)
        second_place, second_page = pages_of(
            low + 1, 1, second_block, table, stream, length, own_list, packed, block_size, page_entries, KEYS
        )
        second_block = block_numbers(low + 2, 1, chosen, stream, own_list, packed, block_size, KEYS)

    state = tl.full((KEYS, ROWS), LOWEST * BAR, tl.uint32)
    check = low + CAPACITY // KEYS - 1
    block_state = tl.full((KEYS, ROWS), LOWEST * BAR, tl.uint32)
    block_check = low + BLOCK_CAPACITY // (KEYS // block_size) - 1
    for tile in range(low, high):
        next_0, next_1, next_2, next_3, next_factor = stored_keys(
            keys, first_place, first_page, channels, page_entries, packed, aligned, CHANNELS
        )
        first_place, first_page = pages_of(
            tile + 2, 0, first_block, table, stream, length, own_list, packed, block_size, page_entries, KEYS
        )
        first_block = block_numbers(tile + 3, 0, chosen, stream, own_list, packed, block_size, KEYS)
        if packed:
            next_4, next_5, next_6, next_7, next_second = stored_keys(
                keys, second_place, second_page, channels, page_entries, packed, aligned, CHANNELS
            )
            second_place, second_page = pages_of(
                tile + 2, 1, second_block, table, stream, length, own_list, packed, block_size, page_entries, KEYS
            )
            second_block = block_numbers(tile + 3, 1, chosen, stream, own_list, packed, block_size, KEYS)
        number = tile * KEYS + tl.arange(0, KEYS)
        if own_list:
            listed_block = tl.load(chosen + number // block_size, mask=number < stream, other=0)
            number = tl.where(number < stream, listed_block * block_size + number % block_size, length)

        if packed:
            found = found_keys(
                *(word_0, word_1, word_2, word_3, factor, word_4, word_5, word_6, word_7, second_factor),
                KEYS,
            )
            word_4, word_5, word_6, word_7, second_factor = next_4, next_5, next_6, next_7, next_second
        else:
            found = word_0
        word_0, word_1, word_2, word_3, factor = next_0, next_1, next_2, next_3, next_factor
        code = score_codes(found, q, w, ROWS, KEYS, HEADS)
        code = tl.where(number[:, None] < limit[None, :], code, 0)
        state = append(codes, entries, splits * CAPACITY, code, number, state, q.dtype)
        if (tile == check) | (tile == high - 1):
            state, check = shorten(codes, entries, splits * CAPACITY, tile, high, KEYS, state, top_k, CAPACITY)
        if top_blocks > 0:
            per_tile: tl.constexpr = KEYS // block_size
            best = tl.max(tl.reshape(code, (per_tile, block_size, ROWS)), axis=1)
            best = tl.reshape(tl.broadcast_to(best[:, None, :], (per_tile, block_size, ROWS)), (KEYS, ROWS))
            number = number // block_size
            best = tl.where(number[:, None] == newest[None, :], FORCED, best)
            best = tl.where((tl.arange(0, KEYS) % block_size == 0)[:, None], best, 0)
            block_state = append(block_codes, blocks, splits * BLOCK_CAPACITY, best, number, block_state, q.dtype)
            if (tile == block_check) | (tile == high - 1):
                block_state, block_check = shorten(
                    block_codes,
                    blocks,
                    splits * BLOCK_CAPACITY,
                    tile,
                    high,
                    per_tile,
                    block_state,
                    top_blocks,
                    BLOCK_CAPACITY,
                )

    tl.store(counts + list_number, tl.max((state % BAR).to(tl.int32), axis=0), mask=mine)
    if top_blocks > 0:
        tl.store(block_counts + list_number, tl.max((block_state % BAR).to(tl.int32), axis=0), mask=mine)


@triton.jit(do_not_specialize=["lists", "step"])
def unite_lists(
    codes,
    numbers,
    counts,
    result,
    lists,
    step,
    keep: tl.constexpr,
    final: tl.constexpr,
    CAPACITY: tl.constexpr,
    FAN: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The best ``keep`` of up to FAN lists of a row, in place of the first of them, or, if ``final``, in ``result``.

    Lists as :func:`score_rows` leaves them, every ``step``-th of [R, lists]; result [R, keep] int32, ascending, -1
    padded. KEEP is the power of two from keep on.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * FAN * step
    member = first + tl.arange(0, FAN) * step
    length = tl.load(counts + row * lists + member, mask=member < lists, other=0)
    total = tl.sum(length, axis=0)
    place = tl.arange(0, KEEP)
    used = place[None, :] < length[:, None]
    at = (row * lists + member)[:, None] * CAPACITY + place[None, :]
    every = tl.reshape(tl.load(codes + at, mask=used, other=0).to(tl.int32), (FAN * KEEP,))
    least, room = least_of(every, tl.reshape(used, (FAN * KEEP,)), total, keep)
    before = 0
    goal = (row * lists + first) * CAPACITY
    for number_of_list in range(FAN):
        listed = first + number_of_list * step
        filled = tl.load(counts + row * lists + listed, mask=listed < lists, other=0)
        source = (row * lists + listed) * CAPACITY + place
        code = tl.load(codes + source, mask=place < filled, other=0).to(tl.int32)
        number = tl.load(numbers + source, mask=place < filled, other=0)
        kept, target, before = places_of(code, place < filled, least, room, before)
        if final:
            tl.store(result + row * keep + target, number, mask=kept)
        else:
            tl.debug_barrier()  # all have read; what is written from here on lies below what is read next
            tl.store(codes + goal + target, code.to(tl.uint16), mask=kept)
            tl.store(numbers + goal + target, number, mask=kept)
    if final:
        tl.store(result + row * keep + place, -1, mask=(place >= total) & (place < keep))
    else:
        tl.debug_barrier()  # all have read how long the lists are
        tl.store(counts + row * lists + first, tl.minimum(total, keep))


@triton.jit
def _group(
    first,
    rows,
    slots,
    positions,
    candidates,
    ratio: tl.constexpr,
    top_k: tl.constexpr,
    top_blocks: tl.constexpr,
    block_size: tl.constexpr,
    listed: tl.constexpr,
):
    """Of the group of row ``first``, [GROUP] each: rows, slots, visible entries, which need scores, which share keys.

    A row that sees no more than it may choose needs no scores.
    """
    member = first // GROUP * GROUP + tl.arange(0, GROUP)
    position = tl.load(positions + member, mask=member < rows, other=-1)
    visible = tl.where(position >= 0, (position + 1) // ratio, 0)
    slot = tl.load(slots + member, mask=visible > 0, other=0)
    count = (visible + block_size - 1) // block_size
    scored = visible > top_k
    if top_blocks > 0:
        scored = scored | (count > top_blocks)
    sharing = scored
    if listed > 0:
        within = (visible > 0) & (count <= listed)
        last = tl.load(candidates + member.to(tl.int64) * listed + count - 1, mask=within, other=-1)
        all_first = within & (last == count - 1)
        scored = (visible > 0) & (scored | (last != count - 1))
        sharing = scored & all_first
    lowest = tl.min(tl.where(sharing, slot, 2**31 - 1), axis=0)
    highest = tl.max(tl.where(sharing, slot, -1), axis=0)
    several = tl.sum(sharing.to(tl.int32), axis=0) > 1
    return member, slot, visible, scored, sharing & (lowest == highest) & several
