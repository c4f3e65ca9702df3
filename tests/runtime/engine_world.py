"""An engine core on the stub model with a clock of its own, its clients, and what holds after every event."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from octavo.runtime.answer_text import AnswerText
from octavo.runtime.core import EngineCore
from octavo.runtime.logprobs import TokenLogprob
from octavo.runtime.request import Answer, Delta, Request
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from tests.runtime.stub_model import (
    VOCABULARY,
    Ask,
    FailingMask,
    StubRunner,
    answer_alone,
    digest,
    logits_after,
    packaged_tokenizer,
)

_TOKENIZER = packaged_tokenizer()


class ClientGone(Exception):
    """What the sink of a client that went away raises."""


class Client:
    """Hears one request, and knows what it should hear."""

    def __init__(self, world: World, ask: Ask, gone_after: int | None) -> None:
        self.world = world
        self.ask = ask
        self.gone_after = gone_after
        """Deltas after which its sink raises."""
        self.aborted = False
        self.deltas = 0
        self.text = ""
        self.ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.started: float | None = None
        self.first_token: float | None = None
        self.answer: Answer | None = None
        params = ask.params
        self.request = Request(
            tokens=list(ask.prompt),
            max_length=world.max_length,
            deadline=world.now + params.timeout if params.timeout is not None else float("inf"),
            params=params,
            text=AnswerText(_TOKENIZER, params.stop),
            sink=self.hear,
            prompt=0,
            index=ask.index,
            seed=ask.seed,
            ending=ask.ending,
            prompt_length=len(ask.prompt),
            arrival=world.now,
        )

    @property
    def gone(self) -> bool:
        return self.gone_after is not None and self.deltas > self.gone_after

    def hear(self, delta: Delta) -> None:
        assert self.answer is None, "a delta after the answer"
        self.deltas += 1
        if self.gone:
            raise ClientGone
        if delta.id is not None:
            if not self.ids:
                self.first_token = self.world.now
                self.world.first_token(self)
                self.prompt_logprobs = delta.prompt_logprobs
            else:
                assert delta.prompt_logprobs is None
            self.ids.append(delta.id)
        self.text += delta.text
        self.answer = delta.answer
        if self.answer is not None:
            self._check(self.answer)

    def _check(self, answer: Answer) -> None:
        """It is the lone answer, or the beginning of it if something cut it short; the deltas add up to it."""
        assert (answer.ids, answer.text) == (self.ids, self.text), "the deltas do not add up to the answer"
        world, reason = self.world, answer.finish_reason
        cut = reason in ("abort", "timeout")
        lone = answer_alone(self.ask, world.max_length, _TOKENIZER, len(answer.ids) if cut else None)
        assert (answer.ids, answer.text, answer.stop) == (lone.ids, lone.text, lone.stop), "not the lone answer"
        assert lone.reason == (None if cut else reason)
        assert self.aborted == (reason == "abort")
        assert (reason == "error") == (answer.error is not None)
        if reason == "timeout":
            assert self.request.deadline <= world.now, "ended before its time"
        assert answer.preemptions == self.request.preemptions
        started = self.started if self.started is not None else world.now
        first_token = self.first_token if self.first_token is not None else world.now
        assert answer.queue_seconds == started - self.request.arrival
        assert answer.prefill_seconds == first_token - started
        assert answer.decode_seconds == world.now - first_token
        if self.ids and self.ask.params.prompt_logprobs is not None:
            assert self.prompt_logprobs == prompt_logprobs_alone(self.ask.prompt)


def prompt_logprobs_alone(prompt: Sequence[int]) -> list[TokenLogprob | None]:
    """For ``prompt_logprobs=0``."""
    logits = logits_after([digest(prompt[:length]) for length in range(1, len(prompt))])
    values = torch.log_softmax(logits, dim=-1)[range(len(prompt) - 1), prompt[1:]].tolist()
    return [None, *(TokenLogprob(token, value, ()) for token, value in zip(prompt[1:], values, strict=True))]


@dataclass(frozen=True)
class Sizes:
    """Of an engine."""

    slots: int
    pages: int
    row_budget: int
    max_length: int


class World:
    """Events are its methods; each ends with :meth:`check`."""

    def __init__(
        self,
        sizes: Sizes,
        scheduler: type[Scheduler] = Scheduler,
        core: type[EngineCore] = EngineCore,
        runner: type[StubRunner] = StubRunner,
        *,
        overlap: bool = False,
    ) -> None:
        self.now = 100.0
        self.scheduler = scheduler(
            slots=sizes.slots, pages=sizes.pages, row_budget=sizes.row_budget, max_length=sizes.max_length
        )
        self.max_length = self.scheduler.max_length
        self.core = core(self.scheduler, runner(self.scheduler), lambda: self.now, overlap=overlap)
        self.live: list[Client] = []
        self.clients: list[Client] = []
        self.seen: Counter[str] = Counter()
        """What happened, by name."""
        self.events = 0
        self._last_first = -1
        self._may_be_overtaken: set[int] = set()
        self._part: Request | None = None
        """Whose prompt is computed in part."""

    def submit(self, ask: Ask, gone_after: int | None = None) -> list[Client]:
        """All ``n`` answers to a prompt."""
        clients = [Client(self, replace(ask, index=index), gone_after) for index in range(ask.params.n)]
        for client in clients:
            self.core.add(client.request)
        self.live += clients
        self.clients += clients
        self.seen["submissions"] += 1
        self.events += 1
        self.check()
        return clients

    def step(self) -> None:
        running = [client.request for client in self.live if client.request.slot >= 0]
        self._part = next((one for one in running if one.computed + 1 < len(one.tokens)), None)
        self.core.step()
        self.seen["steps"] += 1
        self.events += 1
        assert self.core.doing == "waiting for requests"
        for client in self._look():
            retired = client.request.retired
            assert client.request.deadline > self.now or retired, "past its deadline, and alive"
            if client.started is None and (client.request.slot >= 0 or retired):
                client.started = self.now
        self.check()

    def abort(self, client: Client) -> None:
        request = client.request
        if request.slot < 0 and not request.retired:
            state = "preempted" if request.preemptions else "waiting"
        else:
            state = "decoding" if request.made else "prefilling"
        self.seen[f"aborted while {state}"] += 1
        client.aborted = True
        self.core.abort(request)
        self.events += 1
        assert request.done
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.events += 1

    def drain(self) -> None:
        """Step until nothing is left. The oldest gets a row in each step, so there is an end."""
        steps = self.seen["steps"]
        most = (len(self.live) + 1) * self.max_length  # what is in flight may be nobody's any more
        while self.core.busy:
            self.step()
            assert self.seen["steps"] - steps <= most, "it does not come to an end"

    def end(self) -> None:
        """Everything came back, and everybody has an answer."""
        self.drain()
        scheduler, stats = self.scheduler, self.core.stats
        assert not self._look()
        assert scheduler.pages.free == scheduler.pages.count
        assert scheduler.slots.free == scheduler.slots.count
        assert all(client.gone or client.answer is not None for client in self.clients)
        for answer in (client.answer for client in self.clients):
            if answer is not None and answer.logprobs is not None:
                assert [entry.id for entry in answer.logprobs] == answer.ids, "log probabilities of other tokens"
        assert sum(stats.finished.values()) == self.core.ended == len(self.clients)
        assert stats.generated_tokens == sum(client.request.made for client in self.clients)
        assert stats.preemptions == sum(client.request.preemptions for client in self.clients)
        self.seen.update({f"ended by {reason}": count for reason, count in stats.finished.items()})
        self.seen["preemptions"] += stats.preemptions
        self.seen["overlapped steps"] += stats.overlapped_steps
        self.seen["early reads"] += stats.early_reads
        self.seen["rows in vain"] += stats.rows_in_vain
        self.seen["clients that went away"] += sum(client.gone for client in self.clients)

    def check(self) -> None:
        self.scheduler.check()
        alive = self._look()
        retired = sum(client.request.retired for client in alive)
        assert len(alive) == len(self.scheduler.running) + len(self.scheduler.waiting) + retired

    def first_token(self, client: Client) -> None:
        """First come, first served; but beside a prompt that takes several steps short ones are computed."""
        order = client.request.order
        if order < self._last_first:
            assert order in self._may_be_overtaken, "overtaken"
        self._last_first = max(order, self._last_first)
        part = self._part
        if part is not None and part.order < order and len(client.ask.prompt) <= self.scheduler.row_budget // 2:
            self._may_be_overtaken.update(c.request.order for c in self.live if c.request.order < order and not c.ids)

    def _look(self) -> list[Client]:
        """Clients that wait for more."""
        self.live = [client for client in self.live if not client.request.done]
        assert all(client.answer is None for client in self.live)
        return self.live


def random_sizes(draw: random.Random) -> Sizes:
    """Few of everything, so that all of it runs out; in half of the worlds it is pages that do."""
    if draw.random() < 0.5:
        return Sizes(slots=8, pages=draw.randint(3, 7), row_budget=draw.choice((20, 100, 400)), max_length=10_000)
    pages = draw.randint(1, 7)
    budget = draw.choice((1, 2, 5, 17, 64, 65, 128))
    longest = draw.choice((10_000, 64, draw.randint(2, 64 * pages)))
    return Sizes(draw.randint(1, 6), pages, budget, longest)


def random_ask(draw: random.Random, max_length: int) -> Ask:
    """Lengths near the ends of pages are likely; answers end in all ways there are."""
    near_end = 64 * draw.randint(1, 3) + draw.randint(-3, 1)
    length = draw.choice((draw.randint(1, 200), draw.randint(1, 9), draw.randint(20, 64), near_end))
    prompt = [draw.randrange(VOCABULARY) for _ in range(min(length, max_length - 1))]
    params = SamplingParams(max_tokens=draw.choice((draw.randint(1, 3), draw.randint(3, 70), draw.randint(70, 160))))
    params = replace(params, ignore_eos=draw.random() < 0.9)
    match draw.randrange(12):
        case 0:
            stops, least = (draw.randrange(VOCABULARY),), draw.randint(0, params.max_tokens)
            params = replace(params, stop_token_ids=stops, min_tokens=least)
        case 1:
            params = replace(params, stop=("%", "+,", "()"))
        case 2 | 3:
            params = replace(params, timeout=draw.choice((0.5, 5.0, 40.0)))
        case 4:
            params = replace(params, token_mask=FailingMask(draw.randrange(params.max_tokens)))
        case 5:
            penalty = draw.choice((0.0, 0.5))
            params = replace(params, temperature=1.0, frequency_penalty=penalty, n=draw.randint(1, 3))
        case 6:
            params = replace(params, prompt_logprobs=0, n=draw.randint(1, 2))
    if draw.random() < 0.1:
        params = replace(params, logprobs=0)
    return Ask(prompt, params, draw.getrandbits(40))


def random_event(world: World, draw: random.Random) -> None:
    """One event of the life of an engine, mostly a step."""
    kind = draw.random()
    if kind < 0.1 and len(world.live) < world.scheduler.slots.count + 4:
        world.submit(random_ask(draw, world.max_length), draw.randint(0, 9) if draw.random() < 0.05 else None)
    elif kind < 0.12 and world.live:
        world.abort(draw.choice(world.live[: draw.randint(1, len(world.live))]))
    elif kind < 0.2:
        world.wait(draw.choice((0.01, 0.3, 2.0)))
    else:
        world.step()
