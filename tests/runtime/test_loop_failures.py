"""How an engine ends that cannot go on: hanging and failing steps, and what clients hear of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import pytest
from torch import Tensor

from octavo.errors import UsageError
from octavo.runtime.loop import EngineFailure
from octavo.runtime.request import Delta
from octavo.runtime.runner import Chunk
from octavo.runtime.sampling import SamplingParams
from tests.runtime.loop_world import (
    LONG,
    PATIENCE,
    ROOM,
    Broken,
    Client,
    Lazy,
    engine,
    eventually,
    gated,
    scheduler_of,
    submit,
)
from tests.runtime.stub_model import FailingMask, StubRunner


def test_hanging_step_ends_the_engine() -> None:
    """Whoever waits hears at the deadline what the engine was at; nobody waits for it again."""
    scheduler, gate = gated()
    with engine(gate, scheduler=scheduler, deadline=0.4) as loop:
        began = time.monotonic()
        clients = [Client(), Client([5] * 100), Client()]
        submit(loop, clients[0])
        assert gate.reached.wait(PATIENCE)
        submit(loop, *clients[1:])  # these wait for the step to end
        for client in clients:
            with pytest.raises(
                EngineFailure, match=r"hangs while computing step 1: 3 rows of 1 requests \(0 decoding\)"
            ):
                client.answer()
        assert 0.4 <= time.monotonic() - began < 5.0  # the watchdog looks every 0.1 s; the rest is for a busy machine

        began = time.monotonic()
        with pytest.raises(EngineFailure, match=r"more than 0.4 s. Raise --step-deadline"):
            submit(loop, Client())
        with pytest.raises(EngineFailure, match="hangs"):
            loop.ask(lambda core: core.busy)
        loop.abort(clients[0].request)
        loop.close()
        assert time.monotonic() - began < 0.3, "it waited for the hanging step"


@pytest.mark.parametrize("error", [None, RuntimeError("unreachable")])
def test_a_step_that_ends_after_its_deadline_changes_nothing(error: Exception | None) -> None:
    """Nor does one that fails then: the engine has ended, and that is why."""
    before = threading.active_count()
    scheduler = scheduler_of()
    runner = Broken(scheduler)
    runner.open.clear()
    with engine(runner, scheduler=scheduler, deadline=0.1) as loop:
        client = Client(params=LONG)
        submit(loop, client)
        with pytest.raises(EngineFailure, match="hangs"):
            client.answer()
        runner.error = error
        runner.open.set()
        eventually(lambda: threading.active_count() <= before)
        assert client.request.made == (1 if error is None else 0)
        with pytest.raises(EngineFailure, match="hangs"):
            submit(loop, Client())


class FailsAtThird(StubRunner):
    """Cannot launch its third step."""

    launched = 0

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        self.launched += 1
        if self.launched == 3:
            raise RuntimeError("out of memory")
        return super().run(chunks, drawn)


@pytest.mark.parametrize("overlap", (False, True))
def test_what_was_drawn_before_a_step_that_fails_is_delivered(overlap: bool) -> None:
    """With overlap it has not been read when the next step fails; an answer that it completes is complete."""
    scheduler = scheduler_of()
    with engine(FailsAtThird(scheduler), scheduler=scheduler, overlap=overlap) as loop:
        short, long = Client(params=SamplingParams(max_tokens=2, ignore_eos=True)), Client([5] * 9, params=LONG)
        submit(loop, short, long)
        assert short.is_lone()
        with pytest.raises(EngineFailure, match=r"computing step 3: 1 rows.*out of memory"):
            long.answer()
        assert long.request.made == 2


def test_a_group_hears_of_the_end_as_long_as_one_of_it_is_open() -> None:
    scheduler = scheduler_of()
    runner = Broken(scheduler)
    failures: queue.SimpleQueue[EngineFailure] = queue.SimpleQueue()
    with engine(runner, scheduler=scheduler) as loop:
        short, long = Client(), Client(params=LONG)
        loop.submit([short.request, long.request], failures.put)
        assert short.is_lone()
        loop.ask(lambda core: core.ended)  # by then the loop has looked for what it can forget
        runner.error = RuntimeError("out of memory")
        assert "out of memory" in str(failures.get(timeout=PATIENCE))
        assert failures.empty()


def test_the_watchdog_names_a_hanging_token_mask() -> None:
    release = threading.Event()

    def mask(answer: Sequence[int]) -> None:
        assert release.wait(PATIENCE)

    with engine(deadline=0.2) as loop:
        client, other = Client(params=SamplingParams(token_mask=mask)), Client()
        submit(loop, client, other)
        with pytest.raises(EngineFailure, match="hangs while sampling"):
            client.answer()
        with pytest.raises(EngineFailure, match="hangs while sampling"):
            other.answer()
        release.set()


def test_an_asker_hears_of_a_hanging_step() -> None:
    scheduler, gate = gated()
    with engine(gate, scheduler=scheduler, deadline=0.2) as loop:
        submit(loop, Client())
        assert gate.reached.wait(PATIENCE)
        with pytest.raises(EngineFailure, match="hangs while computing step 1"):
            loop.ask(lambda core: core.busy)


def test_many_short_steps_are_no_hang() -> None:
    """And neither is a long time without requests."""
    scheduler = scheduler_of()
    with engine(Lazy(scheduler), scheduler=scheduler, deadline=0.3) as loop:
        client = Client(params=SamplingParams(max_tokens=50, ignore_eos=True))
        submit(loop, client)
        assert client.is_lone()
        time.sleep(0.5)
        client = Client()
        submit(loop, client)
        assert client.is_lone()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), AssertionError("broken"), SystemExit(3)])
def test_a_step_that_raises_ends_the_engine(error: BaseException) -> None:
    """For running and waiting requests, and for later ones."""
    scheduler = scheduler_of(slots=1)
    runner = Broken(scheduler)
    with engine(runner, scheduler=scheduler) as loop:
        clients = [Client(params=LONG), Client()]
        submit(loop, *clients)
        clients[0].first()
        runner.error = error
        for client in clients:
            with pytest.raises(EngineFailure) as caught:
                client.answer()
            message = str(caught.value)
            assert message.startswith("The engine ended while computing step ")
            assert message.endswith(f": 1 rows of 1 requests (1 decoding): {type(error).__name__}: {error}")
            assert caught.value.__cause__ is error
        for late in (lambda: submit(loop, Client()), lambda: loop.ask(lambda core: 1)):
            with pytest.raises(EngineFailure, match="The engine ended while computing step"):
                late()


def test_a_client_that_cannot_hear_of_the_end_keeps_it_from_no_other() -> None:
    scheduler = scheduler_of()
    runner = Broken(scheduler)

    def deaf(failure: EngineFailure) -> None:
        raise RuntimeError("event loop is closed")

    with engine(runner, scheduler=scheduler) as loop:
        gone, other = Client(params=LONG), Client(params=LONG)
        loop.submit([gone.request], deaf)
        submit(loop, other)
        runner.error = RuntimeError("out of memory")
        with pytest.raises(EngineFailure, match="out of memory"):
            other.answer()


def test_what_never_fits_is_refused_and_disturbs_no_other() -> None:
    """The caller hears it; of a group with such a request none is taken."""
    with engine() as loop:
        running, companion = Client(params=LONG), Client()
        submit(loop, running)
        with pytest.raises(UsageError, match="has 600 tokens"):
            loop.submit([companion.request, Client([5] * ROOM).request], companion.heard.put)
        assert running.is_lone()
        assert loop.ask(lambda core: core.stats.prompt_tokens) == 3
        assert companion.heard.empty()


def test_failing_requests_disturb_no_other() -> None:
    """One with a failing mask, one past its deadline, and one whose client has gone."""
    scheduler = scheduler_of()
    with engine(Lazy(scheduler), scheduler=scheduler) as loop:
        good = Client(params=SamplingParams(max_tokens=60, ignore_eos=True))
        bad = Client(params=SamplingParams(max_tokens=50, ignore_eos=True, token_mask=FailingMask(2)))
        late = Client(params=LONG, deadline=time.monotonic() + 0.2)
        gone = Client(params=LONG)

        def raises(delta: Delta) -> None:
            raise RuntimeError("event loop is closed")

        gone.request.sink = raises
        submit(loop, gone, bad, late, good)
        answer = bad.answer()
        assert (answer.finish_reason, answer.error, len(answer.ids)) == ("error", "MaskError: at 2", 2)
        assert late.answer().finish_reason == "timeout"
        assert good.is_lone()
        assert gone.request.done
        assert loop.ask(lambda core: core.stats.finished)["abort"] == 1
