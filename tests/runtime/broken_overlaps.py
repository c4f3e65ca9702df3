"""Overlapping steps with one planted error each, in what schedules, computes or reads them."""

from __future__ import annotations

import collections.abc

import torch
from torch import Tensor

from octavo.runtime.core import EngineCore
from octavo.runtime.request import Request
from octavo.runtime.runner import Chunk
from octavo.runtime.scheduler import Scheduler, Sequence
from tests.runtime.stub_model import StubRunner


class PlaceholderAsToken(StubRunner):
    """Computes what stands for a token as if it were one."""

    def run(self, chunks: collections.abc.Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        return super().run(chunks, torch.zeros_like(drawn) if drawn is not None else None)


class TokensOfOthers(StubRunner):
    """Gives every row the token of its neighbour."""

    def run(self, chunks: collections.abc.Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        return super().run(chunks, drawn.roll(1) if drawn is not None else None)


class PlaceholderInTheAnswer(EngineCore):
    """Takes what stands for a token for known as soon as it stands there."""

    def step(self) -> None:
        super().step()
        for sequence in self.scheduler.running:
            assert isinstance(sequence, Request)
            sequence.unread = False


class ReadsTwice(EngineCore):
    """Gives out the tokens of a step, and then once more."""

    def read(self) -> None:
        step = self._in_flight
        super().read()
        if step is not None and len(step.requests) > 2:
            self._in_flight = step
            super().read()


class NeverReads(EngineCore):
    """Forgets a step, now and then."""

    def read(self) -> None:
        if self.stats.steps % 7 == 6:
            self._in_flight = None
        super().read()


class RowsBeyondTheEnd(Scheduler):
    """Computes a last token, though nothing is sampled after it."""

    def retire(self, sequence: Sequence) -> None:
        """It goes on."""


BROKEN_OVERLAPS: tuple[type[EngineCore | StubRunner | Scheduler], ...] = (
    PlaceholderAsToken,
    TokensOfOthers,
    PlaceholderInTheAnswer,
    ReadsTwice,
    NeverReads,
    RowsBeyondTheEnd,
)
