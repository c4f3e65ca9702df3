"""The engine's thread: answers from many threads, a watchdog, and an end that everybody hears of."""

from __future__ import annotations

import gc
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from octavo.runtime.answer_text import AnswerText
from octavo.runtime.core import EngineCore
from octavo.runtime.loop import EngineFailure, EngineLoop
from octavo.runtime.scheduler import Scheduler, Step
from tests.conftest import ReportCount
from tests.runtime.loop_world import (
    LONG,
    PATIENCE,
    ROOM,
    SHORT,
    TOKENIZER,
    Client,
    Lazy,
    engine,
    eventually,
    gated,
    scheduler_of,
    submit,
)
from tests.runtime.stub_model import StubRunner, answer_alone

BOTH_WAYS = pytest.mark.parametrize("overlap", (False, True), ids=("read at once", "overlapping"))


@BOTH_WAYS
def test_submissions_from_many_threads(overlap: bool, report_count: ReportCount) -> None:
    """More requests than slots, aborts among them; each gets its lone answer."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            draw = random.Random(number)
            for _ in range(10):
                prompt = [draw.randrange(32) for _ in range(draw.randint(1, 100))]
                client, doomed = Client(prompt), Client(prompt, LONG)
                submit(loop, doomed, client)
                loop.abort(doomed.request)
                assert client.is_lone()
                assert doomed.answer().finish_reason == "abort"
        except BaseException as error:
            failures.append(error)

    with engine(overlap=overlap) as loop:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        loop.ask(lambda core: core.scheduler.check())
        assert loop.ask(lambda core: (core.busy, core.ended)) == (False, 160)
    report_count("requests from 8 threads", 160)


def test_an_answer_that_is_cut_short_says_so() -> None:
    """Its unfinished character reads as U+FFFD, which may be a stop string; the answer was aborted all the same."""
    core = EngineCore(scheduler := scheduler_of(), StubRunner(scheduler))
    client = Client()
    client.request.text = AnswerText(TOKENIZER, ("\ufffd",))
    core.add(client.request)
    half = next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) == b"\xc3")
    assert client.request.text.push(half) == ("", None)
    core.abort(client.request)
    answer = client.answer()
    assert (answer.finish_reason, answer.stop, answer.text) == ("abort", None, "")


@BOTH_WAYS
def test_close_aborts_what_is_left(overlap: bool) -> None:
    """Running or waiting; afterwards nothing is taken. A second close is nothing."""
    scheduler = scheduler_of(slots=1)
    with engine(Lazy(scheduler), scheduler=scheduler, overlap=overlap) as loop:
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


@BOTH_WAYS
def test_close_waits_for_a_step_that_ends_in_time(overlap: bool) -> None:
    """And its token is part of the answer."""
    scheduler, gate = gated()
    with engine(gate, scheduler=scheduler, overlap=overlap) as loop:
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
        assert answer.ids == answer_alone(doomed.ask, ROOM, TOKENIZER, len(answer.ids)).ids
        assert other.is_lone()
        loop.abort(other.request)
        loop.abort(Client().request)  # never submitted
        assert loop.ask(lambda core: core.ended) == 2


@BOTH_WAYS
def test_ask_answers_between_steps(overlap: bool) -> None:
    """Never in the middle of one, so that what it reads fits together."""

    def question(core: EngineCore) -> int:
        core.scheduler.check()
        assert core.stats.generated_tokens == client.request.made
        assert core.doing == "waiting for requests"
        return core.stats.steps

    with engine(overlap=overlap) as loop:
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
