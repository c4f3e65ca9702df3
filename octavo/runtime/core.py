"""One step after another: schedule, compute, sample, deliver. Single-threaded; it owns all requests.

A request that fails (a token mask that raises) ends by itself and disturbs no other. What breaks the step itself ends
the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from octavo.runtime.logprobs import TokenLogprob, logprobs_of
from octavo.runtime.request import Answer, FinishReason, Request
from octavo.runtime.runner import Chunk
from octavo.runtime.sampler import sample
from octavo.runtime.scheduler import Scheduler, Step
from octavo.runtime.step_program import PROMPT_ROWS
from octavo.runtime.upload import upload

PARTS = ("schedule", "run", "sample", "deliver")
"""Of a step, in order."""

Clock = Callable[[], float]


class StepRunner(Protocol):
    """What computes a step: the model, or a stand-in for it."""

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Enter (slot, place, page) into the page table."""
        ...

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute all rows and write their state -> hidden rows [R, D]."""
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
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    """Answers by finish reason."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class EngineCore:
    """All requests of an engine."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, clock: Clock = time.monotonic) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.stats = Stats()
        self.ended = 0
        """Answers that have ended since the start."""
        self.doing = "waiting for requests"
        """What the engine is at; read by the watchdog, from another thread."""

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises :class:`~octavo.errors.UsageError` if it can never be computed."""
        self.scheduler.add(request)
        self.stats.prompt_tokens += request.prompt_length

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request as it is; nothing happens if it was never added or has ended."""
        if request.order >= 0 and not request.done:
            self._finish(request, reason)

    def step(self) -> None:
        """Compute one step, if there is anything to compute."""
        times = [time.perf_counter()]
        self.doing = "scheduling"
        now = self.clock()
        step = self.scheduler.schedule(now)
        for sequence in step.expired:
            self._finish(cast(Request, sequence), "timeout")
        times.append(time.perf_counter())
        if not step.work:
            self.doing = "waiting for requests"
            return
        self._describe(step)
        chunks = []
        for sequence, start, stop, _ in step.work:
            request = cast(Request, sequence)
            if request.started is None:
                request.started = now
            chunks.append(Chunk(request.slot, start, request.tokens[start:stop]))
        self.runner.set_pages(step.new_pages)
        hidden = self.runner.run(chunks)
        self.scheduler.computed(step)
        times.append(time.perf_counter())
        self.doing = f"sampling {len(step.work)} rows"
        rows, last = [], -1
        for sequence, start, stop, samples in step.work:
            last += stop - start
            if samples:
                rows.append((cast(Request, sequence), last))
        self._prompt_logprobs(step, hidden)
        sampled = self._sample(hidden, rows) if rows else []
        times.append(time.perf_counter())
        self.doing = f"delivering {len(sampled)} tokens"
        now = self.clock()
        for request, token in sampled:
            self._advance(request, token, now)
        times.append(time.perf_counter())
        self._count(step, times)
        self.doing = "waiting for requests"

    def _sample(self, hidden: Tensor, rows: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Tokens of the rows that sample; a row that fails ends its request alone."""
        logits = self.runner.logits(hidden, [row for _, row in rows])
        sampled, asked = [], []
        for row, outcome in enumerate(sample(logits, [request.draw for request, _ in rows])):
            request = rows[row][0]
            if isinstance(outcome, Exception):
                self._finish(request, "error", error=f"{type(outcome).__name__}: {outcome}")
                continue
            if request.params.logprobs is not None:
                asked.append((request, row, outcome, request.params.logprobs))
            sampled.append((request, outcome))
        if asked:
            requests, places, tokens, tops = zip(*asked, strict=True)
            chosen = logits.index_select(0, upload(torch.tensor(places), logits.device))
            for request, logprob in zip(requests, logprobs_of(chosen, tokens, tops), strict=True):
                request.logprobs.append(logprob)
        return sampled

    def _advance(self, request: Request, token: int, now: float) -> None:
        """Append a sampled token, give out its text, and end the answer if it is complete."""
        request.tokens.append(token)
        if request.first_token is None:
            request.first_token = now
        params, made = request.params, request.made
        logprob = request.logprobs[-1] if params.logprobs is not None else None
        self.stats.generated_tokens += 1
        if token in request.ending and made > params.min_tokens:
            self._finish(request, "stop", token=token, logprob=logprob, stop=token)
            return
        text, stop = request.text.push(token, may_stop=made > params.min_tokens)
        if stop is not None:
            self._finish(request, "stop", token=token, logprob=logprob, text=text, stop=stop)
        elif made == params.max_tokens or len(request.tokens) >= request.max_length:
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

    def _prompt_logprobs(self, step: Step, hidden: Tensor) -> None:
        """Log probabilities of the prompt tokens that follow this step's rows; none twice after a preemption."""
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
                    request.prompt_logprobs += logprobs_of(logits, request.tokens[low + 1 : high + 1], wanted)
            first += work.stop - work.start

    def _describe(self, step: Step) -> None:
        decoding = sum(work.samples and work.stop - work.start == 1 for work in step.work)
        requests = f"{len(step.work)} requests ({decoding} decoding)"
        self.doing = f"computing step {self.stats.steps + 1}: {step.rows} rows of {requests}"

    def _count(self, step: Step, times: list[float]) -> None:
        stats = self.stats
        stats.steps += 1
        stats.rows += step.rows
        stats.preemptions += len(step.preempted)
        for part, begin, end in zip(PARTS, times, times[1:], strict=False):
            stats.seconds[part] += end - begin
