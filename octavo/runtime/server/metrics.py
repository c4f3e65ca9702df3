"""Numbers for Prometheus: what HTTP requests took, and the engine's own counters as they are at a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from octavo import __version__
from octavo.runtime.server.engine_interface import EngineState, Phase, RequestStream

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(1 << power) for power in range(0, 21, 2))


class Metrics:
    """What one application has counted. Two applications in one process share nothing."""

    def __init__(self, model: str) -> None:
        """``model``: the name under which it is served."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        Info("octavo", "What is served.", registry=self._registry).info({"version": __version__, "model": model})
        labels = ("route", "status")
        self._requests = Counter("octavo_http_requests", "Ended HTTP requests.", labels, registry=self._registry)
        self._request_seconds = self._histogram(
            "octavo_http_request_seconds", "From a request's head to the end of its answer.", _SECONDS, ("route",)
        )
        self._queue_seconds = self._histogram(
            "octavo_queue_seconds", "Until the first token of a prompt was computed.", _SECONDS
        )
        self._first_token_seconds = self._histogram(
            "octavo_time_to_first_token_seconds", "Until the first token of an answer was there.", _SECONDS
        )
        self._token_seconds = self._histogram(
            "octavo_time_per_output_token_seconds", "For each further token, mean of an answer.", _SECONDS
        )
        self._prompt_tokens = self._histogram("octavo_request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_tokens = self._histogram("octavo_request_answer_tokens", "Tokens of an answer.", _TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def observe_request(self, route: str, status: int, seconds: float, stream: RequestStream | None) -> None:
        """Count an HTTP request that has ended; ``status`` 0 if it ended without an answer."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)
        answers = stream.finished if stream is not None else []
        if stream is not None and answers:
            for prompt in stream.submit.prompts:
                self._prompt_tokens.observe(len(prompt))
        for answer in answers:
            self._queue_seconds.observe(answer.queue_seconds)
            self._answer_tokens.observe(answer.answer_tokens)
            if answer.answer_tokens:
                self._first_token_seconds.observe(answer.queue_seconds + answer.prefill_seconds)
            if answer.answer_tokens > 1:
                self._token_seconds.observe(answer.decode_seconds / (answer.answer_tokens - 1))

    def render(self, state: EngineState, stats: Mapping[str, Any] | None) -> bytes:
        """Prometheus' text format; ``stats`` of the engine, None where it gives none."""
        return generate_latest(self._registry) + generate_latest(_EngineNumbers(state, stats))


class _EngineNumbers(Collector):
    """State and ``EngineBase.stats()`` of an engine, read once."""

    def __init__(self, state: EngineState, stats: Mapping[str, Any] | None) -> None:
        self._state = state
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        phases = GaugeMetricFamily("octavo_engine_phase", "1 for the phase it is in.", labels=("phase",))
        for phase in get_args(Phase):
            phases.add_metric((phase,), phase == self._state.phase)
        yield phases
        if self._state.ready is not None:
            start = GaugeMetricFamily("octavo_start_seconds", "What the start took.", labels=("phase",))
            for part, seconds in self._state.ready.timeline:
                start.add_metric((part,), seconds)
            yield start
        if self._stats is not None:
            yield from _engine_stats(self._stats)


def _engine_stats(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for key, text in (
        ("steps", "Steps of the engine."),
        ("rows", "Rows that steps computed."),
        ("prompt_tokens", "Tokens of prompts that were taken."),
        ("generated_tokens", "Tokens that were sampled."),
        ("preemptions", "Requests that gave their pages back and were computed again."),
        ("overlapped_steps", "Steps launched before the tokens of the step before were read."),
        (
            "early_reads",
            "Steps read before the next was launched, with overlap: pages were short or a deadline passed.",
        ),
        ("rows_in_vain", "Rows computed for answers that had ended when their tokens were read."),
    ):
        yield CounterMetricFamily(f"octavo_{key}", text, stats[key])
    for key, text in (
        ("running", "Answers in work."),
        ("waiting", "Answers that wait for a slot."),
        ("slots", "Answers that can be in work at once."),
        ("free_slots", "Slots that nobody holds."),
        ("pages", "Pages of state."),
        ("free_pages", "Pages that nobody holds."),
    ):
        yield GaugeMetricFamily(f"octavo_{key}", text, stats[key])
    for name, text, key, label in (
        ("octavo_answers", "Ended answers.", "finished", "reason"),
        ("octavo_step_seconds", "Spent in steps.", "seconds", "part"),
        ("octavo_replayed_steps", "Steps that replayed a program, by the rows of its bucket.", "replays", "bucket"),
        ("octavo_eager_steps", "Steps that replayed nothing.", "not_replayed", "reason"),
    ):
        family = CounterMetricFamily(name, text, labels=(label,))
        for value, count in stats[key].items():
            family.add_metric((str(value),), count)
        yield family
