"""One step: chunks of requests become one flat batch, go through prelude and body, and end as hidden rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo import kernels
from octavo.model.inputs import Rows
from octavo.runtime.assemble import Assembly
from octavo.runtime.body_program import BodyProgram
from octavo.runtime.config import GraphMode
from octavo.runtime.pools import Pools


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
    ) -> None:
        self.assembly = assembly
        text, capacity = assembly.config.text_config, assembly.capacity
        self.pools = Pools(text, capacity.sizes, capacity.storage, assembly.device)
        self.pools.history = self.pools.history.to(assembly.tables.classes.device)
        self.body = BodyProgram(assembly.model, self.pools, assembly.dtype, buckets, graphs, dump_dir)

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter (slot, place in the slot's list, page) into the page table, for the steps that follow."""
        if pages:
            slots, places, numbers = torch.tensor(pages, device=self.assembly.device).unbind(1)
            self.pools.page_table[slots, places] = numbers.int()

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks and write their state -> hidden rows [R, D], in the chunks' order.

        A slot stands in at most one chunk, and has the pages for all its tokens up to the chunk's last.
        """
        counts = torch.tensor([len(chunk.ids) for chunk in chunks])
        slots = torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int32).repeat_interleave(counts)
        starts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32).repeat_interleave(counts)
        first_rows = (counts.cumsum(0) - counts).repeat_interleave(counts)
        positions = starts + (torch.arange(len(slots)) - first_rows).int()
        ids = torch.tensor(list(itertools.chain.from_iterable(chunk.ids for chunk in chunks)))
        image = torch.zeros(len(ids), dtype=torch.bool)
        metadata = torch.stack((slots, positions, starts))
        engram = self._engram(ids, image, metadata)

        device, dtype = self.assembly.device, self.assembly.dtype
        write_slots, write_positions, write_starts = metadata.to(device).unbind()
        rows = Rows(
            self.assembly.model.embed(ids.to(device), dtype),
            write_slots,
            write_positions,
            write_positions >= 0,
            image.to(device),
            engram,
        )
        state = self.pools.state(write_slots, write_positions, write_starts)
        return self.body.run(rows, state)

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Epilogue: logits [len(rows), V] F32 of some of the hidden rows."""
        return self.assembly.model.logits(hidden, torch.tensor(rows, device=hidden.device))

    def _engram(self, ids: Tensor, image: Tensor, metadata: Tensor) -> list[Tensor]:
        """Table rows of this step on the model's device; the history moves on."""
        tables, history = self.assembly.tables, self.pools.history
        slots, positions, starts = metadata.to(history.device).unbind()
        classes = tables.token_classes(ids.to(history.device), image.to(history.device))
        found = tables.rows(classes, history, slots, positions, starts)
        kernels.commit_window(history, classes, slots, positions)
        return [rows.to(self.assembly.device) for rows in tables.look_up(found, self.assembly.dtype)]
