"""One step after another: schedule, compute, sample, read, deliver. Single-threaded; it owns all requests.

With overlap a step is launched before the tokens of the one before are read: where its rows need such a token, the
device puts it in. The host reads and delivers while the device computes, and then draws, knowing every token. So masks,
penalties and log probabilities need no way of their own. An answer that ends in some other way than by its length has
one row more under way, which is dropped.

A request that fails (a token mask that raises) ends by itself and disturbs no other. What breaks the step itself ends
the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from octavo.runtime.in_flight import InFlight
from octavo.runtime.logprobs import Logprobs, TokenLogprob
from octavo.runtime.request import Answer, FinishReason, Request
from octavo.runtime.runner import Chunk
from octavo.runtime.sampler import Sampled, sample
from octavo.runtime.scheduler import Scheduler, Step
from octavo.runtime.step_program import PROMPT_ROWS
from octavo.runtime.upload import upload

PARTS = ("schedule", "run", "sample", "read", "deliver")
"""Of a step; ``read`` waits for the device. With overlap the last two are those of the step before, and come behind
``run``."""

Clock = Callable[[], float]


class StepRunner(Protocol):
    """What computes a step: the model, or a stand-in for it."""

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter (slot, place, page) into the page table."""
        ...

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        """Compute all rows and write their state -> hidden rows [R, D], until the next step.

        ``drawn`` [n] int64: what ids below zero stand for, see :class:`Chunk`; given with overlap alone.
        """
        ...

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits [len(rows), V] F32 of some of the hidden rows."""
        ...


@dataclass(slots=True)
class Stats:
    """Counters since the start, and seconds spent by part of a step."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    overlapped_steps: int = 0
    """Launched before the tokens of the step before were read."""
    early_reads: int = 0
    """Steps that were read before the next was launched, although steps overlap: pages were short, or a deadline had
    passed."""
    rows_in_vain: int = 0
    """Computed for answers that had ended when their tokens were read."""
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    """Answers by finish reason."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class EngineCore:
    """All requests of an engine."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, clock: Clock = time.monotonic, *, overlap: bool = False
    ) -> None:
        """``overlap``: launch a step before the tokens of the one before are read."""
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.overlap = overlap
        self.stats = Stats()
        self.ended = 0
        """Answers that have ended since the start."""
        self.doing = "waiting for requests"
        """What the engine is at; read by the watchdog, from another thread."""
        self._in_flight: InFlight | None = None

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting) or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises :class:`~octavo.errors.UsageError` if it can never be computed."""
        self.scheduler.add(request)
        self.stats.prompt_tokens += request.prompt_length

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request as it is; nothing happens if it was never added or has ended."""
        if request.order >= 0 and not request.done:
            self._finish(request, reason)

    def step(self) -> None:
        """Compute one step, if there is anything to compute, and read the one before, if that is still to be done."""
        if self._reads_early():
            self.stats.early_reads += 1
            self.read()
        step = self._schedule()
        hidden = self._run(step) if step.work else None
        self.read()
        if hidden is not None:
            self._sample(step, hidden)
        self.doing = "waiting for requests"

    def read(self) -> None:
        """Wait for what the last step has drawn, unless it has been read, and deliver it."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        with self._part("read", f"reading {len(step.requests)} tokens of step {step.number}"):
            outcomes = step.sampled.read()
            for request, prompt_logprobs in step.prompt_logprobs:
                request.prompt_logprobs += prompt_logprobs.read()
            logprobs = dict(zip(step.asked, step.logprobs.read() if step.logprobs else (), strict=True))
        with self._part("deliver", f"delivering {len(step.requests)} tokens"):
            now = self.clock()
            for request, outcome in zip(step.requests, outcomes, strict=True):
                if request.done:
                    self.stats.rows_in_vain += 1
                elif isinstance(outcome, Exception):
                    self._finish(request, "error", error=f"{type(outcome).__name__}: {outcome}")
                else:
                    self._advance(request, outcome, logprobs.get(request), now)

    def _reads_early(self) -> bool:
        """What is in flight may end an answer, and so spare another one to give way; and a token that was drawn in time
        belongs to its answer."""
        if not self.overlap or self._in_flight is None or not self._in_flight.requests:
            return False
        return self.scheduler.is_short_of_pages() or self.scheduler.is_overdue(self.clock())

    def _schedule(self) -> Step:
        with self._part("schedule", "scheduling"):
            step = self.scheduler.schedule(self.clock())
            for sequence in step.expired:
                self._finish(cast(Request, sequence), "timeout")
            self.stats.preemptions += len(step.preempted)
        return step

    def _run(self, step: Step) -> Tensor:
        """Launch the step's rows -> hidden rows."""
        stats, now, chunks = self.stats, self.clock(), []
        stats.steps += 1
        stats.rows += step.rows
        with self._part("run", self._description(step)):
            for sequence, start, stop, _ in step.work:
                request = cast(Request, sequence)
                if request.started is None:
                    request.started = now
                chunks.append(Chunk(request.slot, start, request.tokens[start:stop]))
            drawn = None
            if self._in_flight is not None and self._in_flight.requests:
                drawn = self._in_flight.sampled.tokens
                stats.overlapped_steps += 1
            self.runner.set_pages(step.new_pages)
            hidden = self.runner.run(chunks, drawn)
            self.scheduler.computed(step)
        return hidden

    def _sample(self, step: Step, hidden: Tensor) -> None:
        """Draw the next tokens. They are read at once, or with overlap behind the launch of the next step."""
        with self._part("sample", f"sampling {len(step.work)} rows"):
            requests, rows, last = list[Request](), list[int](), -1
            for sequence, start, stop, samples in step.work:
                last += stop - start
                request = cast(Request, sequence)
                if request.done:
                    self.stats.rows_in_vain += stop - start
                elif samples:
                    requests.append(request)
                    rows.append(last)
            prompt_logprobs = self._prompt_logprobs(step, hidden)
            self._in_flight = self._draw(hidden, requests, rows, prompt_logprobs)
            for place, request in enumerate(requests):
                request.expect(place)
                if request.complete:
                    self.scheduler.retire(request)
        if requests and not self.overlap:
            self.read()

    def _draw(
        self,
        hidden: Tensor,
        requests: list[Request],
        rows: list[int],
        prompt_logprobs: list[tuple[Request, Logprobs]],
    ) -> InFlight:
        """A token for each request from its row, with log probabilities for those that asked."""
        number = self.stats.steps
        if not requests:
            nothing = Sampled(torch.empty(0, dtype=torch.int64, device=hidden.device), {})
            return InFlight(number, requests, nothing, [], None, prompt_logprobs)
        logits = self.runner.logits(hidden, rows)
        sampled = sample(logits, [request.draw for request in requests])
        asking = [place for place, request in enumerate(requests) if request.params.logprobs is not None]
        asked, logprobs = [requests[place] for place in asking], None
        if asking:
            places = upload(torch.tensor(asking), logits.device)
            tops = [request.params.logprobs or 0 for request in asked]
            logprobs = Logprobs(logits.index_select(0, places), sampled.tokens.index_select(0, places), tops)
        return InFlight(number, requests, sampled, asked, logprobs, prompt_logprobs)

    def _advance(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Take a sampled token in, give out its text, and end the answer if it is complete."""
        request.learn(token)
        if logprob is not None:
            request.logprobs.append(logprob)
        if request.first_token is None:
            request.first_token = now
        params, made = request.params, request.made
        self.stats.generated_tokens += 1
        if token in request.ending and made > params.min_tokens:
            self._finish(request, "stop", token=token, logprob=logprob, stop=token)
            return
        text, stop = request.text.push(token, may_stop=made > params.min_tokens)
        if stop is not None:
            self._finish(request, "stop", token=token, logprob=logprob, text=text, stop=stop)
        elif request.complete:
            self._finish(request, "length", token=token, logprob=logprob, text=text)
        else:
            self._deliver(request, text, token, logprob)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        text: str = "",
        stop: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """Take a request out and give its client the finished answer."""
        request.forget_unread()
        self.scheduler.finish(request)
        if not isinstance(stop, str):
            rest, found = request.text.finish()
            text += rest
            # An unfinished character can complete a stop string; that is no reason for an answer that was cut short.
            if found is not None and reason in ("stop", "length"):
                stop, reason = found, "stop"
        self.ended += 1
        self.stats.finished[reason] += 1
        self._deliver(request, text, token, logprob, request.answer(reason, self.clock(), stop, error))

    def _deliver(
        self,
        request: Request,
        text: str,
        token: int | None,
        logprob: TokenLogprob | None,
        answer: Answer | None = None,
    ) -> None:
        """Give the client its delta. One that cannot hear any more, its event loop being closed, disturbs no other."""
        try:
            request.deliver(text, token, logprob, answer)
        except AssertionError:  # a bug of ours
            raise
        except Exception:
            self.abort(request)

    def _prompt_logprobs(self, step: Step, hidden: Tensor) -> list[tuple[Request, Logprobs]]:
        """Log probabilities of the prompt tokens that follow this step's rows; none twice after a preemption."""
        found = []
        first = 0
        for work in step.work:
            request = cast(Request, work.sequence)
            wanted = request.params.prompt_logprobs
            if wanted is not None:
                known = len(request.prompt_logprobs)
                # Row at position p tells of the token at p + 1.
                for low in range(max(work.start, known - 1), min(work.stop, request.prompt_length - 1), PROMPT_ROWS):
                    high = min(low + PROMPT_ROWS, work.stop, request.prompt_length - 1)
                    rows = [first + position - work.start for position in range(low, high)]
                    logits = self.runner.logits(hidden, rows)
                    tokens = upload(torch.tensor(request.tokens[low + 1 : high + 1]), logits.device)
                    found.append((request, Logprobs(logits, tokens, [wanted] * len(rows))))
            first += work.stop - work.start
        return found

    def _description(self, step: Step) -> str:
        decoding = sum(work.samples and work.stop - work.start == 1 for work in step.work)
        requests = f"{len(step.work)} requests ({decoding} decoding)"
        return f"computing step {self.stats.steps}: {step.rows} rows of {requests}"

    @contextlib.contextmanager
    def _part(self, name: str, doing: str) -> Iterator[None]:
        """A part of a step: it is told what the engine is at, and its seconds are counted."""
        self.doing = doing
        began = time.perf_counter()
        yield
        self.stats.seconds[name] += time.perf_counter() - began
