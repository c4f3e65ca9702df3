"""The engine in its process, as the HTTP process has it: answers, refusals, abortion, overload, start and end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.errors import OctavoError, UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.engine import Engine
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.server.engine_client import EngineProcess
from octavo.runtime.server.engine_interface import NotReady, Overloaded, RequestStream
from octavo.runtime.server.engine_process import Outbox
from octavo.runtime.server.messages import Broken, Finished, Grammar, Refused, Submit, Tokens, from_engine

CONFIG = EngineConfig(device="cpu", graphs="off", max_requests=4, chunk=64, kv_tokens=2048)
QUEUE = 2


@dataclass
class Running:
    """An engine process, and the event loop that its client lives in."""

    runner: asyncio.Runner
    client: EngineProcess
    phases: set[str]
    """That were told of its start."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    phases: set[str] = set()

    async def start() -> EngineProcess:
        client = EngineProcess(CONFIG, QUEUE, lambda phase, done, total: phases.add(phase))
        assert client.state.phase == "starting"
        with pytest.raises(NotReady, match="starting"):
            client.open(Submit(id="early", prompts=[[5]], params={}))
        await client.start()
        await client.ready()
        return client

    with asyncio.Runner() as runner:
        client = runner.run(start())
        yield Running(runner, client, phases)
        runner.run(client.close())


def submit(name: str, prompt: list[int], grammar: Grammar | None = None, **params: Any) -> Submit:
    return Submit(id=name, prompts=[prompt], params=params, grammar=grammar)


async def collect(stream: RequestStream) -> list[Tokens | Finished | Refused]:
    return [message async for message in stream]


def test_start_is_told(running: Running) -> None:
    state = running.client.state
    assert state.phase == "ready" and running.phases == {"weights"}
    assert state.ready is not None and "octavo-nano" in state.ready.description
    assert state.ready.max_requests == 4 and state.ready.max_model_len == 2048
    assert all(seconds >= 0 for _, seconds in state.ready.timeline)


def test_answers_are_those_of_the_engine(running: Running) -> None:
    """To the bit, log probabilities included, though other requests share the steps."""
    prompts = [list(range(5, 5 + length)) for length in (1, 3, 70)]
    params: list[dict[str, Any]] = [
        {"max_tokens": 6, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1},
        {"max_tokens": 6, "n": 2, "temperature": 1.0, "seed": 7},
        {"max_tokens": 6, "ignore_eos": True, "logit_bias": {40: 50.0}, "stop_token_ids": [41]},
    ]
    with Engine(CONFIG) as engine:
        expected = engine.generate(prompts, [SamplingParams(**one) for one in params])

    async def ask() -> list[list[Tokens | Finished | Refused]]:
        streams = [
            running.client.open(submit(f"equal-{number}", prompt, **one))
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        return await asyncio.gather(*map(collect, streams))

    for heard, result in zip(running.runner.run(ask()), expected, strict=True):
        for index, answer in enumerate(result.answers):
            own = [message for message in heard if not isinstance(message, Refused) and message.index == index]
            tokens = [message for message in own if isinstance(message, Tokens)]
            assert [one.token for one in tokens] == answer.ids
            assert "".join(one.text for one in tokens) == answer.text
            logprobs = [(one.logprob.id, one.logprob.logprob, one.logprob.top) for one in tokens if one.logprob]
            assert logprobs == [(one.id, one.logprob, list(one.top)) for one in answer.logprobs or []]
            last = own[-1]
            assert isinstance(last, Finished) and sum(isinstance(message, Finished) for message in own) == 1
            assert last.reason == answer.finish_reason
            assert last.answer_tokens == len(answer.ids)
        first = heard[0]
        assert isinstance(first, Tokens)
        if result.prompt_logprobs is not None:
            assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
            assert [one.logprob for one in first.prompt_logprobs[1:] if one] == [
                one.logprob for one in result.prompt_logprobs[1:] if one
            ]


def test_grammar_is_enforced(running: Running) -> None:
    grammar = Grammar(kind="regex", source="(yes|no)!")

    async def ask() -> list[Tokens | Finished | Refused]:
        return await collect(running.client.open(submit("grammar", [5, 6], grammar, max_tokens=20)))

    heard = running.runner.run(ask())
    text = "".join(message.text for message in heard if isinstance(message, Tokens))
    assert text in ("yes!", "no!")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (submit("long", [5] * 3000), "has 3000 tokens"),
        (submit("id", [1 << 20]), "token ids are integers"),
        (submit("field", [5], max_tokens=0), "max_tokens 0"),
        (submit("unknown", [5], beam_width=2), "no such field"),
        (submit("pattern", [5], Grammar(kind="regex", source="(")), "regex"),
    ],
)
def test_what_cannot_be_answered_is_refused(running: Running, message: Submit, reason: str) -> None:
    async def ask() -> list[Tokens | Finished | Refused]:
        return await collect(running.client.open(message))

    (refused,) = running.runner.run(ask())
    assert isinstance(refused, Refused) and reason in refused.message


def test_a_closed_stream_frees_everything_between_two_steps(running: Running) -> None:
    async def leave() -> dict[str, Any]:
        client = running.client
        streams = [client.open(submit(f"left-{n}", [5, 6, 7], max_tokens=1000, ignore_eos=True, n=n)) for n in (1, 3)]
        for stream in streams:
            await anext(stream)
        busy = await client.stats()
        assert busy["running"] == 4 and busy["free_slots"] == 0
        for stream in streams:
            stream.close()
            stream.close()
        after = await client.stats()
        assert after["steps"] - busy["steps"] <= 2
        await client.idle()
        assert [message async for message in streams[0]] == []
        return after

    after = running.runner.run(leave())
    assert (after["running"], after["waiting"]) == (0, 0)
    assert (after["free_slots"], after["free_pages"]) == (after["slots"], after["pages"])


def test_abort_is_for_the_owner(running: Running) -> None:
    async def abort() -> list[Tokens | Finished | Refused]:
        client = running.client
        stream = client.open(submit("mine", [5], max_tokens=1000, ignore_eos=True), owner="me")
        assert not client.abort("mine", "you") and not client.abort("mine") and not client.abort("other", "me")
        await anext(stream)
        assert client.abort("mine", "me")
        heard = await collect(stream)
        assert not client.abort("mine", "me"), "it has ended"
        return heard

    last = running.runner.run(abort())[-1]
    assert isinstance(last, Finished) and last.reason == "abort" and 0 < last.answer_tokens < 1000


def test_what_cannot_be_sent_takes_no_room(running: Running) -> None:
    async def fail() -> None:
        for number in range(4 + QUEUE):
            with pytest.raises(OverflowError):
                running.client.open(submit(f"huge-{number}", [5], stop_token_ids=[1 << 64]))
        await asyncio.wait_for(running.client.idle(), 1)
        heard = await collect(running.client.open(submit("fits", [5], max_tokens=1)))
        assert isinstance(heard[-1], Finished)

    running.runner.run(fail())


def test_one_answer_can_be_stopped(running: Running) -> None:
    """It ends alone, and counts as stopped everywhere; of several prompts each has its answers."""

    async def stop() -> None:
        client = running.client
        before = (await client.stats())["finished"]
        message = Submit(id="several", prompts=[[5, 6], [7]], params={"max_tokens": 1000, "ignore_eos": True, "n": 2})
        stream = client.open(message)
        seen: set[int] = set()
        while len(seen) < 4:
            one = await anext(stream)
            assert isinstance(one, Tokens)
            seen.add(one.index)
        for number, index in enumerate((2, 0, 3, 1)):
            stream.stop(index)
            stream.stop(index)
            while len(stream.finished) == number:
                await anext(stream)
            assert stream.finished[-1].index == index
        assert [one async for one in stream] == []
        assert {one.reason for one in stream.finished} == {"stop"}
        after = (await client.stats())["finished"]
        assert {reason: after[reason] - count for reason, count in before.items() if after[reason] != count} == {
            "stop": 4
        }

    running.runner.run(stop())


def test_a_full_queue_sends_away(running: Running) -> None:
    async def fill() -> None:
        client = running.client
        stream = client.open(submit("full", [5], max_tokens=1000, ignore_eos=True, n=4 + QUEUE - 1))
        with pytest.raises(Overloaded, match="room for 1 more") as caught:
            client.open(submit("two", [5], n=2))
        assert caught.value.retry_after >= 1
        with pytest.raises(UsageError, match="n: the request asks for 7 answers; this server takes at most 6"):
            client.open(submit("never", [5], n=4 + QUEUE + 1))
        last = client.open(submit("one", [5], max_tokens=1))
        with pytest.raises(Overloaded):
            client.open(submit("none", [5]))
        stream.close()
        await collect(last)
        await client.idle()
        await collect(client.open(submit("again", [5], max_tokens=1)))

    running.runner.run(fill())


def test_a_start_that_fails_says_why() -> None:
    async def start() -> None:
        client = EngineProcess(EngineConfig(device="cuda:99"), QUEUE)
        await client.start()
        try:
            with pytest.raises(OctavoError, match="--device cuda:99: this machine has"):
                await client.ready()
            assert client.state.phase == "broken" and "cuda:99" in client.state.detail
            with pytest.raises(NotReady, match="cuda:99"):
                client.open(submit("late", [5]))
            with pytest.raises(NotReady, match="cuda:99"):
                await client.stats()
        finally:
            await client.close()

    asyncio.run(start())


def test_an_outbox_that_fails_says_so_and_hangs_up(capsys: pytest.CaptureFixture[str]) -> None:
    """So that the other side waits for nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(ours)
        outbox.put(Tokens(id="request", index=0, text="text", token=1 << 64))
        theirs.settimeout(10)
        with theirs.makefile("rb") as stream:
            size = int.from_bytes(stream.read(4), "little")
            (broken,) = from_engine(stream.read(size))
            assert isinstance(broken, Broken) and "OverflowError" in broken.reason
            assert stream.read(1) == b""
        outbox.close()
    assert "Traceback" in capsys.readouterr().err


def test_outbox_never_waits_and_sends_many_at_once() -> None:
    """Though the other side reads nothing: a slow client cannot hold up a step."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(ours)
        count = 20_000
        for number in range(count):
            outbox.put(Tokens(id="request", index=0, text="text", token=number))
        ending = threading.Thread(target=outbox.close)
        ending.start()
        frames = 0
        tokens: list[int | None] = []
        with theirs.makefile("rb") as stream:
            while len(tokens) < count:
                size = int.from_bytes(stream.read(4), "little")
                tokens += [message.token for message in from_engine(stream.read(size)) if isinstance(message, Tokens)]
                frames += 1
        ending.join()
    assert tokens == list(range(count))
    assert frames < count / 10
