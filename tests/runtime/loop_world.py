"""Clients, stub runners and engines for the tests of the engine's thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from octavo.runtime.answer_text import AnswerText
from octavo.runtime.core import EngineCore
from octavo.runtime.loop import EngineFailure, EngineLoop
from octavo.runtime.request import Answer, Delta, Request
from octavo.runtime.runner import Chunk
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from tests.runtime.stub_model import Ask, StubRunner, answer_alone, packaged_tokenizer

ROOM = 600
PATIENCE = 20.0
"""Seconds after which a test counts as hung; what it waits for takes a moment on an idle machine."""
LONG = SamplingParams(max_tokens=500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
TOKENIZER = packaged_tokenizer()


class Client:
    """A request and what comes of it: deltas, and the failure if the engine ends."""

    def __init__(
        self, prompt: Sequence[int] = (5, 6, 7), params: SamplingParams = SHORT, deadline: float = 1e18
    ) -> None:
        self.ask = Ask(list(prompt), params)
        self.heard: queue.SimpleQueue[Delta | EngineFailure] = queue.SimpleQueue()
        self.request = Request(
            tokens=list(prompt),
            max_length=ROOM,
            deadline=deadline,
            params=params,
            text=AnswerText(TOKENIZER, ()),
            sink=self.heard.put,
            prompt=0,
            index=0,
            seed=0,
            ending=self.ask.ending,
            prompt_length=len(prompt),
            arrival=time.monotonic(),
        )

    def first(self) -> Client:
        """Wait for the first token."""
        item = self.heard.get(timeout=PATIENCE)
        assert isinstance(item, Delta)
        return self

    def answer(self) -> Answer:
        """Wait for the end; raises the failure if that is how it ends."""
        while True:
            item = self.heard.get(timeout=PATIENCE)
            if isinstance(item, EngineFailure):
                raise item
            if item.answer is not None:
                return item.answer

    def is_lone(self) -> bool:
        return self.answer().ids == answer_alone(self.ask, ROOM, TOKENIZER).ids


class Gate(StubRunner):
    """Lets steps through as long as it is open."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.open = threading.Event()
        self.reached = threading.Event()
        """Set when a step stands before the closed gate."""

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        if not self.open.is_set():
            self.reached.set()
            assert self.open.wait(PATIENCE)
        return super().run(chunks, drawn)


class Broken(Gate):
    """An open gate; raises as soon as it is given an error."""

    error: BaseException | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.open.set()

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        hidden = super().run(chunks, drawn)
        if self.error is not None:
            raise self.error
        return hidden


class Lazy(StubRunner):
    """Takes a while for each step."""

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        time.sleep(0.01)
        return super().run(chunks, drawn)


def scheduler_of(slots: int = 4) -> Scheduler:
    return Scheduler(slots=slots, pages=40, row_budget=64, max_length=ROOM)


@contextmanager
def engine(
    runner: StubRunner | None = None,
    *,
    scheduler: Scheduler | None = None,
    deadline: float = 60.0,
    overlap: bool = False,
) -> Iterator[EngineLoop]:
    """A running loop; afterwards its threads are gone."""
    before = threading.active_count()
    scheduler = scheduler or scheduler_of()
    loop = EngineLoop(EngineCore(scheduler, runner or StubRunner(scheduler), overlap=overlap), deadline)
    try:
        yield loop
    finally:
        if isinstance(runner, Gate):
            runner.open.set()
        loop.close()
        eventually(lambda: threading.active_count() <= before)


def gated() -> tuple[Scheduler, Gate]:
    scheduler = scheduler_of()
    return scheduler, Gate(scheduler)


def submit(loop: EngineLoop, *clients: Client) -> None:
    for client in clients:
        loop.submit([client.request], client.heard.put)


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.002)
