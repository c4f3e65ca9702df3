"""One step: chunks of requests become one flat batch, go through prelude, body and epilogue, and end as logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import kernels
from octavo.model.inputs import Rows
from octavo.runtime.assemble import Assembly
from octavo.runtime.pools import Pools


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one request computes in a step: ``ids`` at positions ``start``, ``start + 1``, ..."""

    slot: int
    start: int
    ids: Sequence[int]


class Runner:
    """Owns the pools and runs steps on them."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        text = assembly.config.text_config
        self.pools = Pools(text, assembly.sizes, assembly.dtype, assembly.device)
        self.pools.history = self.pools.history.to(assembly.tables.classes.device)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot its pages, in order of the tokens they hold."""
        self.pools.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks and write their state; logits [len(chunks), V] F32 of each chunk's last token.

        The pages that the chunks write to must have been given to their slots.
        """
        slots = [chunk.slot for chunk in chunks for _ in chunk.ids]
        starts = [chunk.start for chunk in chunks for _ in chunk.ids]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.ids))]
        ids = torch.tensor([token for chunk in chunks for token in chunk.ids])
        metadata = torch.tensor([slots, positions, starts], dtype=torch.int32)
        image = torch.zeros(len(ids), dtype=torch.bool)
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
        output = self.assembly.model.body(rows, self.pools.state(write_slots, write_positions, write_starts))
        last = torch.tensor([len(chunk.ids) for chunk in chunks]).cumsum(0) - 1
        return self.assembly.model.logits(output.hidden, last.to(device))

    def _engram(self, ids: Tensor, image: Tensor, metadata: Tensor) -> list[Tensor]:
        """Table rows of this step on the model's device; the history moves on."""
        tables, history = self.assembly.tables, self.pools.history
        slots, positions, starts = metadata.to(history.device).unbind()
        classes = tables.token_classes(ids.to(history.device), image.to(history.device))
        found = tables.rows(classes, history, slots, positions, starts)
        kernels.commit_window(history, classes, slots, positions)
        return [rows.to(self.assembly.device) for rows in tables.look_up(found, self.assembly.dtype)]
