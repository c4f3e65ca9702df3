"""Engines in worlds where everything runs out: whatever happens, every answer is the one the request gets alone.

The stub model checks each step it is given; the world checks scheduler, clients and order after each event.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from octavo.runtime.core import EngineCore
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from tests.conftest import ReportCount
from tests.runtime.broken_overlaps import BROKEN_OVERLAPS
from tests.runtime.broken_schedulers import BROKEN
from tests.runtime.engine_world import Sizes, World, random_event, random_sizes
from tests.runtime.stub_model import VOCABULARY, Ask, FailingMask, StubRunner

HAPPENINGS = (
    "preemptions",
    "aborted while waiting",
    "aborted while prefilling",
    "aborted while decoding",
    "aborted while preempted",
    "ended by stop",
    "ended by length",
    "ended by timeout",
    "ended by error",
    "clients that went away",
)
OVERLAP = ("overlapped steps", "early reads", "rows in vain")
"""What happens besides where steps overlap, and nowhere else."""


def live_through(
    seed: int,
    events: int,
    scheduler: type[Scheduler] = Scheduler,
    core: type[EngineCore] = EngineCore,
    runner: type[StubRunner] = StubRunner,
    *,
    overlap: bool = False,
) -> World:
    """So many random events in a random world, and its end."""
    draw = random.Random(seed)
    world = World(random_sizes(draw), scheduler, core, runner, overlap=overlap)
    while world.events < events:
        random_event(world, draw)
    world.end()
    return world


@pytest.mark.parametrize("overlap", (False, True), ids=("read at once", "overlapping"))
def test_random_events(overlap: bool, report_count: ReportCount, long_form: bool) -> None:
    events, seen, seed = 0, Counter[str](), 0
    while events < (500_000 if long_form else 11_000):
        world = live_through(seed, 500, overlap=overlap)
        events, seen, seed = events + world.events, seen + world.seen, seed + 1
    expected = HAPPENINGS + OVERLAP if overlap else HAPPENINGS
    assert not [name for name in expected if seen[name] < seed / 10], seen
    assert overlap or not any(seen[name] for name in OVERLAP)
    report_count("events of an engine on the stub model", events)
    for name in expected:
        report_count(f"of these, {name}", seen[name])


class Machine(RuleBasedStateMachine):
    """The same events, chosen by hypothesis, which finds a short story for a failure."""

    events: ClassVar[Counter[str]]

    @initialize(
        slots=st.integers(1, 4),
        pages=st.integers(1, 5),
        row_budget=st.sampled_from((1, 3, 64, 200)),
        max_length=st.sampled_from((2, 65, 1000)),
        overlap=st.booleans(),
    )
    def begin(self, slots: int, pages: int, row_budget: int, max_length: int, overlap: bool) -> None:
        self.world = World(Sizes(slots, pages, row_budget, max_length), overlap=overlap)

    @rule(
        length=st.one_of(st.integers(1, 10), st.integers(60, 66), st.integers(120, 200)),
        first=st.integers(0, VOCABULARY - 1),
        most=st.integers(1, 8),
        least=st.integers(0, 2),
        stops=st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
        timeout=st.sampled_from((None, None, 1.0)),
        mask_fails_at=st.sampled_from((None, None, None, 0, 2)),
        gone_after=st.sampled_from((None, None, None, 0, 2)),
        n=st.sampled_from((1, 1, 2)),
    )
    def submit(
        self,
        length: int,
        first: int,
        most: int,
        least: int,
        stops: list[int],
        timeout: float | None,
        mask_fails_at: int | None,
        gone_after: int | None,
        n: int,
    ) -> None:
        params = SamplingParams(
            max_tokens=most,
            min_tokens=min(least, most),
            stop_token_ids=tuple(stops),
            timeout=timeout,
            token_mask=FailingMask(mask_fails_at) if mask_fails_at is not None else None,
            n=n,
        )
        prompt = [(first + place) % VOCABULARY for place in range(min(length, self.world.max_length - 1))]
        self.world.submit(Ask(prompt, params), gone_after)

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(seconds=st.sampled_from((0.5, 1.0)))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(self.world.live)))

    def teardown(self) -> None:
        self.world.end()
        self.events["all"] += self.world.events


def test_stories(report_count: ReportCount) -> None:
    class Counted(Machine):
        events: ClassVar[Counter[str]] = Counter()

    usual = hypothesis.settings()
    settings = hypothesis.settings(usual, max_examples=usual.max_examples // 4, stateful_step_count=40)
    run_state_machine_as_test(Counted, settings=settings)
    report_count("events of an engine on the stub model, by hypothesis", Counted.events["all"])


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_scheduler_is_noticed(broken: type[Scheduler]) -> None:
    for seed in range(60):
        try:
            live_through(seed, 500, broken)
        except (AssertionError, KeyError):
            return
    pytest.fail("nothing was noticed")


@pytest.mark.parametrize("broken", BROKEN_OVERLAPS, ids=lambda broken: broken.__name__)
def test_a_broken_overlap_is_noticed(broken: type[EngineCore | StubRunner | Scheduler]) -> None:
    scheduler = broken if issubclass(broken, Scheduler) else Scheduler
    core = broken if issubclass(broken, EngineCore) else EngineCore
    runner = broken if issubclass(broken, StubRunner) else StubRunner
    for seed in range(60):
        try:
            live_through(seed, 500, scheduler, core, runner, overlap=True)
        except (AssertionError, KeyError, RuntimeError):
            return
    pytest.fail("nothing was noticed")
