"""Where a request's entries and recent rows lie: page table, step metadata and rings (design section 7).

A page holds 64 tokens of every source, so 64 entries at ratio 1 and 32 at ratio 2: a pool's second dimension tells
its ratio. Slots number the requests; a row's slot and position say what it is; position -1 is a dead row.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE_TOKENS = 64


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def ratio_of(pool: Tensor) -> int:
    """Tokens an entry of this pool stands for: pool [pages, PAGE_TOKENS / ratio, C]."""
    return PAGE_TOKENS // pool.shape[1]


def entry_address(entries: Tensor, slots: Tensor, page_table: Tensor, page_entries: int) -> tuple[Tensor, Tensor]:
    """Logical entries of requests -> (page, place in the page), both int64, of the broadcast shape of the inputs.

    entries and slots int; page_table [slots, max_pages] int32. Entries below zero give an arbitrary valid address.
    """
    safe = entries.long().clamp_min(0)
    return page_table[slots.long(), safe // page_entries].long(), safe % page_entries


def step_layout(
    write_slots: Tensor, write_positions: Tensor, write_starts: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    """Per slot: (first position of this step, global row minus position), each [slots] int64.

    A request's rows are contiguous in global order, so one difference places them all. Slots without rows in this
    step start beyond every position.
    """
    live = write_positions >= 0
    target = torch.where(live, write_slots, slots).long()
    start = torch.full((slots + 1,), torch.iinfo(torch.int64).max, device=write_slots.device)
    offset = torch.zeros_like(start)
    start[target] = write_starts.long()
    offset[target] = torch.arange(write_slots.shape[0], device=write_slots.device) - write_positions
    return start[:slots], offset[:slots]
