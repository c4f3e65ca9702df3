"""Rank 0 as the engine's runner: it tells the others each step before it computes its own share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from octavo.runtime.ranks.launch import Others
from octavo.runtime.ranks.messages import Pick, StepPlan, send
from octavo.runtime.runner import Chunk, Runner


class Leader:
    """What :class:`octavo.runtime.core.EngineCore` steps. No other rank decides anything, so ranks cannot disagree."""

    def __init__(self, runner: Runner, others: Others) -> None:
        self._runner = runner
        self._others = others
        self._group = others.control
        self._closed = False
        self._pages: list[tuple[int, int, int]] = []
        self._between = True
        """Whether the others wait for a message, and for nothing else."""

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter (slot, place, page) into the page tables; they travel with the next step."""
        self._pages += pages

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        assert drawn is None, "the other ranks do not know what rank 0 has drawn"
        pages, self._pages = self._pages, []
        with self._explained():
            send(StepPlan(tuple(pages), tuple(chunks)), self._group)
            self._runner.set_pages(pages)
            return self._runner.run(chunks)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        with self._explained():
            if self._runner.sharded:
                send(Pick(tuple(rows)), self._group)
            return self._runner.logits(hidden, rows)

    def close(self) -> None:
        """Tell the others that all is over, and end them; by force if they are amid a step that failed or hangs.

        Nothing happens the second time.
        """
        if self._closed:
            return
        self._closed = True
        if self._others.failure is None and self._between:
            with contextlib.suppress(RuntimeError):  # one that has just ended; stop() ends the rest
                send(None, self._group)
        self._others.stop(force=not self._between, release=self._runner.programs.close)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A broken collective is told as the end of the rank that broke it."""
        self._between = False
        try:
            yield
        except RuntimeError as error:
            raise self._others.explain(error) from error
        self._between = True
