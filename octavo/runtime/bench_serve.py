"""``octavo bench serve``: load on a server as its clients make it, and the latencies that they see.

Requests are completions of random token ids, streamed. They arrive as a Poisson process, whatever the server does, or
from a fixed number of clients, each of which sends its next request when it has its answer.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

import octavo
from octavo.errors import OctavoError, UsageError
from octavo.runtime.bench import percentiles

_TOKENS = range(3, 1000)
"""Text in every vocabulary that the engine takes."""
_DONE = "data: [DONE]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens: ``N`` always, ``A-B`` uniformly, ``~N`` exponentially with mean N; at least 1."""

    text: str

    def __post_init__(self) -> None:
        found = re.fullmatch(r"~?\d+|(\d+)-(\d+)", self.text)
        if not found or int(re.findall(r"\d+", self.text)[0]) < 1 or (found[1] and int(found[1]) > int(found[2])):
            raise UsageError(f"{self.text!r}: lengths are N, A-B (uniform) or ~N (exponential, with mean N), from 1 on")

    def draw(self, source: random.Random) -> int:
        if self.text.startswith("~"):
            return max(1, round(source.expovariate(1 / int(self.text[1:]))))
        low, _, high = self.text.partition("-")
        return source.randint(int(low), int(high or low))


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent. Either ``rate`` or ``concurrency`` is given."""

    requests: int
    rate: float | None
    """Requests a second, with exponential gaps."""
    concurrency: int | None
    """Clients that send one request after the other."""
    prompt_tokens: Lengths
    answer_tokens: Lengths
    seed: int
    timeout: float
    """Seconds that a request may take."""

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise UsageError("give --rate, for arrivals by chance, or --concurrency, for a fixed number of clients")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Seconds within which a request counts as good; None is no bound."""

    first_token: float | None = None
    inter_token: float | None = None
    """Of the mean over a request."""
    latency: float | None = None

    @property
    def given(self) -> dict[str, float]:
        values = {"first_token": self.first_token, "inter_token": self.inter_token, "latency": self.latency}
        return {name: value for name, value in values.items() if value is not None}


class _Choice(msgspec.Struct):
    text: str


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, Meta(ge=1)]


class _Failure(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """Of the stream of a completion, as far as it is read."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], Meta(min_length=1)]


@dataclass(slots=True)
class Call:
    """One request as its client sees it; times in seconds since the start of the measurement."""

    prompt: list[int]
    max_tokens: int
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of events with text."""
    ended: float = 0.0
    answer_tokens: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def inter_token(self) -> float:
        """Mean seconds from one token to the next; 0 for an answer of one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.answer_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Between events. One event may bring several tokens, or a token none."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def within(self, bounds: Bounds) -> bool:
        measured = {"first_token": self.first_token, "inter_token": self.inter_token, "latency": self.latency}
        return self.error is None and all(measured[name] <= bound for name, bound in bounds.given.items())


async def measure_server(
    url: str, api_key: str | None, load: Load, on_progress: Callable[[int, int], None], model: str | None = None
) -> list[Call]:
    """Send the load and wait for all answers. Raises :class:`OctavoError` if the server cannot be reached."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=load.timeout) as client:
        name = model if model is not None else await _served_model(client, url)
        draw = random.Random(load.seed)
        calls = [
            Call(draw.choices(_TOKENS, k=load.prompt_tokens.draw(draw)), load.answer_tokens.draw(draw))
            for _ in range(load.requests)
        ]
        began, done = time.perf_counter(), 0

        async def run(call: Call) -> None:
            nonlocal done
            await _call(client, name, call, began, load.timeout)
            done += 1
            on_progress(done, load.requests)

        async def send_in_turn(waiting: list[Call]) -> None:
            while waiting:
                await run(waiting.pop())

        async with asyncio.TaskGroup() as group:
            if load.rate is None:
                waiting = calls[::-1]
                for _ in range(load.concurrency or 0):
                    group.create_task(send_in_turn(waiting))
            else:
                due = 0.0
                for call in calls:
                    await asyncio.sleep(due - (time.perf_counter() - began))
                    group.create_task(run(call))
                    due += draw.expovariate(load.rate)
        return calls


async def _served_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Models).data[0].id
    except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OctavoError(
            f"{url}: /v1/models does not answer as a server's would ({error or type(error).__name__})"
        ) from error


async def _call(client: httpx.AsyncClient, model: str, call: Call, began: float, timeout: float) -> None:
    """Send one request and note what comes; a failure is noted, not raised."""
    body = {
        "model": model,
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    call.sent = time.perf_counter() - began
    try:
        async with asyncio.timeout(timeout), client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                call.error = f"status {response.status_code}"
            else:
                await _read(response, call, began)
    except msgspec.DecodeError as error:
        call.error = f"an event that is none of a completion: {error}"
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        call.error = type(error).__name__
    call.ended = time.perf_counter() - began


async def _read(response: httpx.Response, call: Call, began: float) -> None:
    """Events until the last; a stream that ends without it, with an error, or without text or usage, has failed.

    Raises :class:`msgspec.DecodeError` for an event that is none of a completion.
    """
    async for line in response.aiter_lines():
        if line == _DONE:
            if not call.arrivals:
                call.error = "an answer without text"
            elif not call.answer_tokens:
                call.error = "an answer without usage"
            return
        if line.startswith("data: "):
            event = msgspec.json.decode(line.removeprefix("data: "), type=_Event)
            if event.error is not None:
                call.error = f"error in the stream: {event.error.message}"
                return
            if any(choice.text for choice in event.choices):
                call.arrivals.append(time.perf_counter() - began)
            if event.usage is not None:
                call.answer_tokens = event.usage.completion_tokens
    call.error = "the stream ended before its end"


def summarise(url: str, load: Load, bounds: Bounds, calls: list[Call]) -> dict[str, Any]:
    """All numbers of a measurement; times in seconds."""
    good = [call for call in calls if call.error is None]
    if not good:
        raise OctavoError(f"no request of {len(calls)} was answered; the first: {calls[0].error}")
    seconds = max(call.ended for call in calls)
    report: dict[str, Any] = {
        "octavo": octavo.__version__,
        "url": url,
        "load": {
            "requests": load.requests,
            "rate": load.rate,
            "concurrency": load.concurrency,
            "prompt_tokens": load.prompt_tokens.text,
            "answer_tokens": load.answer_tokens.text,
            "seed": load.seed,
        },
        "seconds": seconds,
        "answered": len(good),
        "errors": dict(Counter(call.error for call in calls if call.error is not None)),
        "prompt_tokens": sum(len(call.prompt) for call in good),
        "answer_tokens": sum(call.answer_tokens for call in good),
        "requests_per_second": len(good) / seconds,
        "answer_tokens_per_second": sum(call.answer_tokens for call in good) / seconds,
        "first_token": percentiles([call.first_token for call in good]),
        "inter_token": percentiles([gap for call in good for gap in call.gaps] or [0.0]),
        "latency": percentiles([call.latency for call in good]),
        "calls": [
            {
                "sent": call.sent,
                "prompt_tokens": len(call.prompt),
                "answer_tokens": call.answer_tokens,
                "error": call.error,
                "first_token": call.first_token if call.error is None else None,
                "inter_token": call.inter_token if call.error is None else None,
                "latency": call.latency,
            }
            for call in calls
        ],
    }
    if bounds.given:
        within = sum(call.within(bounds) for call in calls)
        report["goodput"] = {"bounds": bounds.given, "requests": within, "requests_per_second": within / seconds}
    return report


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    load = report["load"]
    how = f"{load['rate']:g} a second by chance" if load["rate"] is not None else f"{load['concurrency']} at a time"
    lines = [
        f"{load['requests']} requests of {load['prompt_tokens']} + {load['answer_tokens']} tokens, {how}: "
        f"{report['answered']} answered in {report['seconds']:.2f} s",
        f"throughput        {report['requests_per_second']:10.2f} requests/s"
        f"{report['answer_tokens_per_second']:12.1f} answer tokens/s",
    ]
    for name, label in (("first_token", "first token"), ("inter_token", "between tokens"), ("latency", "whole answer")):
        values = "  ".join(f"{percentile} {value * 1e3:.1f} ms" for percentile, value in report[name].items())
        lines.append(f"{label:<18}{values}")
    if "goodput" in report:
        goodput = report["goodput"]
        bounds = ", ".join(f"{name.replace('_', ' ')} {bound * 1e3:g} ms" for name, bound in goodput["bounds"].items())
        rate = goodput["requests_per_second"]
        lines.append(f"goodput           {rate:10.2f} requests/s: {goodput['requests']} requests within {bounds}")
    lines += [f"failed            {count:10d} {error}" for error, count in report["errors"].items()]
    return lines
