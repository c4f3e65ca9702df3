"""One step: chunks of requests become one flat batch of tokens, go through the programs, and end as hidden rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.model.inputs import Tokens
from octavo.runtime.assemble import Assembly
from octavo.runtime.config import GraphMode
from octavo.runtime.pools import Pools
from octavo.runtime.programs import Programs


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one request computes in a step: ``ids`` at positions ``start``, ``start + 1``, ..."""

    slot: int
    start: int
    ids: Sequence[int]


class Runner:
    """Owns the pools and runs steps on them."""

    def __init__(
        self,
        assembly: Assembly,
        buckets: tuple[int, ...] = (),
        graphs: GraphMode = "off",
        dump_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.assembly = assembly
        text, capacity = assembly.config.text_config, assembly.capacity
        self.pools = Pools(text, capacity.sizes, capacity.storage, assembly.device)
        self.programs = Programs(assembly, self.pools, buckets, graphs, dump_dir, progress)

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter (slot, place in the slot's list, page) into the page table, for the steps that follow."""
        if pages:
            slots, places, numbers = torch.tensor(pages, device=self.assembly.device).unbind(1)
            self.pools.page_table[slots, places] = numbers.int()

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks and write their state -> hidden rows [R, D], in the chunks' order, until the next step.

        A slot stands in at most one chunk, and has the pages for all its tokens up to the chunk's last.
        """
        device = self.assembly.device
        counts = torch.tensor([len(chunk.ids) for chunk in chunks])
        slots = torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int32).repeat_interleave(counts)
        starts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32).repeat_interleave(counts)
        first_rows = (counts.cumsum(0) - counts).repeat_interleave(counts)
        positions = starts + (torch.arange(len(slots)) - first_rows).int()
        ids = torch.tensor(list(itertools.chain.from_iterable(chunk.ids for chunk in chunks)))
        image = torch.zeros(len(ids), dtype=torch.bool)
        metadata = torch.stack((slots, positions, starts)).to(device)
        slots, positions, starts = metadata.unbind()
        tokens = Tokens(ids.to(device), slots, positions, starts, positions >= 0, image.to(device))
        return self.programs.hidden(tokens)

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Epilogue: logits [len(rows), V] F32 of some of the hidden rows, until the next call."""
        return self.programs.logits(hidden.index_select(0, torch.tensor(rows, device=hidden.device)))
