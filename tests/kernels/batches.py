"""Batches for the operators' tests: requests at different positions, dead rows after them, and pages for everybody."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 8
MAX_PAGES = 4
PAGES = SLOTS * MAX_PAGES + 3
"""Every slot holds pages for 256 tokens; three pages belong to nobody."""
_STARTS = (0, 1, 5, 37, 63, 126)
"""Step starts: a new request, odd and even ones, inside and at the end of a page, past a mini window."""


@dataclass(frozen=True, slots=True)
class Request:
    """The rows of one request in a step: positions ``start`` to ``start + count - 1``."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: the rows of ``requests`` one after the other, then ``dead`` rows."""

    requests: tuple[Request, ...]
    dead: int = 0

    @property
    def rows(self) -> int:
        return sum(request.count for request in self.requests) + self.dead

    @property
    def slots(self) -> Tensor:
        """[R] int32, -1 on dead rows; so are the next two."""
        return self._column([[r.slot] * r.count for r in self.requests])

    @property
    def positions(self) -> Tensor:
        return self._column([range(r.start, r.start + r.count) for r in self.requests])

    @property
    def starts(self) -> Tensor:
        return self._column([[r.start] * r.count for r in self.requests])

    @property
    def live(self) -> Tensor:
        """[R] bool."""
        return self.positions >= 0

    @property
    def image(self) -> Tensor:
        """[R] bool: an image span of nine tokens wherever a position is 3 to 11 mod 20."""
        place = self.positions % 20
        return self.live & (place >= 3) & (place < 12)

    def rows_of(self, requests: Sequence[int]) -> Tensor:
        """Row numbers of the chosen requests, one request after the other: [n] int64."""
        ends = list(itertools.accumulate((r.count for r in self.requests), initial=0))
        chosen = [torch.arange(ends[i], ends[i + 1]) for i in requests]
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def _column(self, values: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([*itertools.chain.from_iterable(values), *[-1] * self.dead], dtype=torch.int32)


def random_batch(rows: int, seed: int) -> Batch:
    """``rows`` rows, an eighth of them dead, of up to six requests in random slots, lengths and step starts."""
    random = torch.Generator().manual_seed(seed)
    live = rows - rows // 8
    count = min(len(_STARTS), live)
    cuts = sorted((torch.randperm(live - 1, generator=random)[: count - 1] + 1).tolist()) if live > 1 else []
    lengths = [high - low for low, high in itertools.pairwise([0, *cuts, live])]
    slots = torch.randperm(SLOTS, generator=random).tolist()
    starts = torch.randperm(len(_STARTS), generator=random).tolist()
    requests = [Request(s, _STARTS[i], n) for s, i, n in zip(slots, starts, lengths, strict=False)]
    return Batch(tuple(requests), rows - live)


def page_table() -> Tensor:
    """[SLOTS, MAX_PAGES] int32: all slots own all of their pages, scattered over the pool."""
    random = torch.Generator().manual_seed(0)
    return torch.randperm(PAGES, generator=random)[: SLOTS * MAX_PAGES].view(SLOTS, MAX_PAGES).int()
