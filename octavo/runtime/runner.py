"""One step: chunks of requests become one flat batch of tokens, go through the programs, and end as hidden rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.graphs.explain import Batch, placement_of
from octavo.kernels.collectives import Communicator
from octavo.model.inputs import Tokens
from octavo.runtime.assemble import Assembly
from octavo.runtime.config import GraphMode
from octavo.runtime.pools import Pools
from octavo.runtime.programs import Programs
from octavo.runtime.upload import upload

_NO_BUCKETS: Mapping[bool, tuple[int, ...]] = MappingProxyType({False: ()})


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one request computes in a step: ``ids`` at positions ``start``, ``start + 1``, ...

    An id below zero, ``~i``, stands for token i of those that the step before has drawn, which may be unknown yet.
    """

    slot: int
    start: int
    ids: Sequence[int]


class Runner:
    """Owns the pools and runs steps on them."""

    def __init__(
        self,
        assembly: Assembly,
        buckets: Mapping[bool, tuple[int, ...]] = _NO_BUCKETS,
        graphs: GraphMode = "off",
        dump_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """With a ``communicator`` this is one of its ranks; see :class:`Programs` for the arguments."""
        self.assembly = assembly
        self.sharded = False
        """Whether the rows of the last step are dealt over several ranks."""
        self._communicator = communicator
        text, capacity = assembly.config.text_config, assembly.capacity
        self.pools = Pools(text, capacity.sizes, capacity.storage, assembly.device)
        self.programs = Programs(assembly, self.pools, buckets, graphs, dump_dir, progress, communicator)

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter (slot, place in the slot's list, page) into the page table, for the steps that follow."""
        if pages:
            slots, places, numbers = upload(torch.tensor(pages), self.assembly.device).unbind(1)
            self.pools.page_table[slots, places] = numbers.int()

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        """Compute the chunks and write their state -> hidden rows [R, D], in the chunks' order, until the next step.

        ``drawn`` [n] int64 on the device: what ids below zero stand for; below zero where no token could be drawn, in
        rows that nobody reads. Only one rank alone takes them.
        Of several ranks every one is given the same chunks; if rows are dealt over them, R is this rank's share.
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
        ranks = self._communicator.ranks if self._communicator is not None else 1
        self.sharded = placement_of(Batch(len(ids), len(chunks)), ranks).sharded
        metadata = torch.stack((slots, positions, starts))
        if self.sharded:
            missing = -len(ids) % ranks
            ids, metadata = F.pad(ids, (0, missing), value=-1), F.pad(metadata, (0, missing), value=-1)
            image = F.pad(image, (0, missing))
        metadata = upload(metadata, device)
        slots, positions, starts = metadata.unbind()
        ids = upload(ids, device)
        if drawn is not None:
            known = drawn.index_select(0, ids.bitwise_not().clamp_min(0)).clamp_min(0)
            ids = torch.where(ids < 0, known, ids)
        tokens = Tokens(ids, slots, positions, starts, positions >= 0, upload(image, device))
        return self.programs.hidden(tokens, self.sharded)

    @torch.no_grad()
    def pick(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows of the last step by their global numbers: hidden [R, D] -> [len(rows), D]; all ranks ask together."""
        index = upload(torch.tensor(rows), hidden.device)
        if not self.sharded:
            return hidden.index_select(0, index)
        assert self._communicator is not None
        ranks = self._communicator.ranks
        (everybody,) = self._communicator.gather([hidden.index_select(0, index // ranks)], False)
        everybody = everybody.view(ranks, len(rows), -1)
        return everybody[index % ranks, torch.arange(len(rows), device=hidden.device)]

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Epilogue: logits [len(rows), V] F32 of some of the hidden rows, until the next call."""
        return self.programs.logits(self.pick(hidden, rows))
