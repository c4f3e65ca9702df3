"""The engine's thread: answers from many threads, a watchdog, and an end that everybody hears of."""

from __future__ import annotations

import gc
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

from octavo.errors import UsageError
from octavo.runtime.answer_text import AnswerText
from octavo.runtime.core import EngineCore
from octavo.runtime.loop import EngineFailure, EngineLoop
from octavo.runtime.request import Answer, Delta, Request
from octavo.runtime.runner import Chunk
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler, Step
from tests.conftest import ReportCount
from tests.runtime.stub_model import Ask, FailingMask, StubRunner, answer_alone, packaged_tokenizer

ROOM = 600
PATIENCE = 20.0
"""Seconds after which a test counts as hung; what it waits for takes a moment on an idle machine."""
LONG = SamplingParams(max_tokens=500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
_TOKENIZER = packaged_tokenizer()


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
            text=AnswerText(_TOKENIZER, ()),
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
        return self.answer().ids == answer_alone(self.ask, ROOM, _TOKENIZER).ids


class Gate(StubRunner):
    """Lets steps through as long as it is open."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.open = threading.Event()
        self.reached = threading.Event()
        """Set when a step stands before the closed gate."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        if not self.open.is_set():
            self.reached.set()
            assert self.open.wait(PATIENCE)
        return super().run(chunks)


class Broken(Gate):
    """An open gate; raises as soon as it is given an error."""

    error: BaseException | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.open.set()

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        hidden = super().run(chunks)
        if self.error is not None:
            raise self.error
        return hidden


class Lazy(StubRunner):
    """Takes a while for each step."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        time.sleep(0.01)
        return super().run(chunks)


def scheduler_of(slots: int = 4) -> Scheduler:
    return Scheduler(slots=slots, pages=40, row_budget=64, max_length=ROOM)


@contextmanager
def engine(
    runner: StubRunner | None = None, *, scheduler: Scheduler | None = None, deadline: float = 60.0
) -> Iterator[EngineLoop]:
    """A running loop; afterwards its threads are gone."""
    before = threading.active_count()
    scheduler = scheduler or scheduler_of()
    loop = EngineLoop(EngineCore(scheduler, runner or StubRunner(scheduler)), deadline)
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


def test_submissions_from_many_threads(report_count: ReportCount) -> None:
    """More requests than slots, aborts among them; each gets its lone answer."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            draw = random.Random(number)
            for _ in range(20):
                prompt = [draw.randrange(32) for _ in range(draw.randint(1, 100))]
                client, doomed = Client(prompt), Client(prompt, LONG)
                submit(loop, doomed, client)
                loop.abort(doomed.request)
                assert client.is_lone()
                assert doomed.answer().finish_reason == "abort"
        except BaseException as error:
            failures.append(error)

    with engine() as loop:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        loop.ask(lambda core: core.scheduler.check())
        assert loop.ask(lambda core: (core.busy, core.ended)) == (False, 320)
    report_count("requests from 8 threads", 320)


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


def test_close_aborts_what_is_left() -> None:
    """Running or waiting; afterwards nothing is taken. A second close is nothing."""
    scheduler = scheduler_of(slots=1)
    with engine(Lazy(scheduler), scheduler=scheduler) as loop:
        running, waiting = Client(params=LONG), Client()
        submit(loop, running, waiting)
        running.first()
        loop.close()
        assert [client.answer().finish_reason for client in (running, waiting)] == ["abort", "abort"]
        assert (scheduler.pages.free, scheduler.slots.free) == (40, 1)
        with pytest.raises(EngineFailure, match="The engine is closed"):
            submit(loop, Client())
        with pytest.raises(EngineFailure, match="The engine is closed"):
            loop.ask(lambda core: 1)
        loop.abort(running.request)
        loop.close()


def test_close_while_others_submit(report_count: ReportCount) -> None:
    """Whatever was taken gets an answer, and whatever comes later is refused, however close to the end it was."""
    accepted: list[Client] = []

    def work(loop: EngineLoop) -> None:
        with pytest.raises(EngineFailure, match="The engine is closed"):
            while True:
                client = Client()
                submit(loop, client)
                accepted.append(client)
                loop.ask(lambda core: core.ended)

    def close_at(count: int) -> None:
        accepted.clear()
        with engine() as loop:
            thread = threading.Thread(target=work, args=(loop,))
            thread.start()
            eventually(lambda: len(accepted) >= count)
            loop.close()
            thread.join()
            for client in accepted:
                assert client.answer().finish_reason in ("abort", "length")

    for round_ in range(100):
        close_at(round_ % 10)
    report_count("engines closed while requests came", 100)


def test_a_request_of_the_last_moment_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken, and the engine closed, just when the thread has found that nothing more was asked."""
    client, last_moment = Client(), threading.Event()

    class Commands(queue.SimpleQueue[Callable[[], None]]):
        def empty(self) -> bool:
            empty = super().empty()
            if empty and last_moment.is_set():
                last_moment.clear()
                submit(loop, client)
                threading.Thread(target=loop.close).start()
                eventually(lambda: self.qsize() == 2)
            return empty

    monkeypatch.setattr(queue, "SimpleQueue", Commands)
    with engine() as loop:
        monkeypatch.undo()
        last_moment.set()
        loop.abort(client.request)  # wakes the thread
        assert client.answer().finish_reason == "abort"


def test_close_during_a_hanging_step() -> None:
    """It waits for the step until its deadline; then it ends and whoever waits hears why."""
    scheduler, gate = gated()
    with engine(gate, scheduler=scheduler, deadline=0.4) as loop:
        client = Client()
        time.sleep(0.05)  # so that the deadline lies between two looks of the watchdog, 0.1 s apart
        submit(loop, client)
        assert gate.reached.wait(PATIENCE)
        began = time.monotonic()
        loop.close()
        assert time.monotonic() - began < 5.0
        with pytest.raises(EngineFailure, match="hangs while computing step 1"):
            client.answer()


def test_close_waits_for_a_step_that_ends_in_time() -> None:
    scheduler, gate = gated()
    with engine(gate, scheduler=scheduler) as loop:
        client = Client(params=LONG)
        submit(loop, client)
        assert gate.reached.wait(PATIENCE)
        closer = threading.Thread(target=loop.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        gate.open.set()
        closer.join(PATIENCE)
        answer = client.answer()
        assert (answer.finish_reason, len(answer.ids)) == ("abort", 1)


def test_abort_from_another_thread() -> None:
    """At once, as far as it came; a second abort, and one of what has ended, is nothing."""
    with engine() as loop:
        doomed, other = Client(params=LONG), Client(params=LONG)
        submit(loop, doomed, other)
        doomed.first()
        for _ in range(2):
            thread = threading.Thread(target=loop.abort, args=(doomed.request,))
            thread.start()
            thread.join()
        answer = doomed.answer()
        assert answer.finish_reason == "abort"
        assert answer.ids == answer_alone(doomed.ask, ROOM, _TOKENIZER, len(answer.ids)).ids
        assert other.is_lone()
        loop.abort(other.request)
        loop.abort(Client().request)  # never submitted
        assert loop.ask(lambda core: core.ended) == 2


def test_ask_answers_between_steps() -> None:
    """Never in the middle of one, so that what it reads fits together."""

    def question(core: EngineCore) -> int:
        core.scheduler.check()
        assert core.stats.generated_tokens == client.request.made
        assert core.doing == "waiting for requests"
        return core.stats.steps

    with engine() as loop:
        client = Client(params=LONG)
        submit(loop, client)
        steps = [loop.ask(question)]
        while not client.request.done:
            steps.append(loop.ask(question))
        assert steps == sorted(steps)
        assert len(set(steps)) > 5
        assert client.is_lone()


@pytest.mark.parametrize("error", [KeyError("no such counter"), TimeoutError("its own")])
def test_a_question_that_raises_is_the_askers(error: Exception) -> None:
    def question(core: EngineCore) -> None:
        raise error

    with engine() as loop:
        with pytest.raises(type(error)) as caught:
            loop.ask(question)
        assert caught.value is error
        client = Client()
        submit(loop, client)
        assert client.is_lone()


def test_two_loops_in_one_process() -> None:
    """The end of one is nothing to the other."""
    scheduler, gate = gated()
    with engine(gate, scheduler=scheduler, deadline=0.2) as bad, engine() as good:
        lost, won = Client(), Client(params=LONG)
        submit(bad, lost)
        submit(good, won)
        with pytest.raises(EngineFailure, match="hangs"):
            lost.answer()
        assert won.is_lone()
        late = Client()
        submit(good, late)
        assert late.is_lone()


def test_an_idle_engine_rests() -> None:
    class Counting(Scheduler):
        plans = 0

        def schedule(self, now: float) -> Step:
            self.plans += 1
            return super().schedule(now)

    scheduler = Counting(slots=1, pages=4, row_budget=64, max_length=ROOM)
    with engine(scheduler=scheduler) as loop:
        client = Client()
        submit(loop, client)
        client.answer()
        loop.ask(lambda core: None)
        plans = scheduler.plans
        time.sleep(0.1)
        assert scheduler.plans <= plans + 1


@pytest.mark.parametrize("aborted", [False, True])
def test_what_has_ended_is_forgotten(aborted: bool) -> None:
    """Also while another request goes on."""
    scheduler = scheduler_of()
    with engine(Lazy(scheduler), scheduler=scheduler) as loop:
        long, ended = Client(params=LONG), Client(params=LONG if aborted else SHORT)
        submit(loop, long, ended)
        if aborted:
            loop.abort(ended.request)
        ended.answer()
        reference = weakref.ref(ended.heard)  # where its deltas go
        del ended
        eventually(lambda: gc.collect() >= 0 and reference() is None)
        assert not long.request.done
