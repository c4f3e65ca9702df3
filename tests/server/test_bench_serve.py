"""``octavo bench serve`` against a stub whose times are known, and against what can go wrong."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from typer.testing import CliRunner, Result

from octavo.errors import OctavoError, UsageError
from octavo.runtime.bench_serve import Bounds, Call, Lengths, Load, measure_server
from octavo.runtime.cli import app
from octavo.runtime.server.engine_interface import EngineState
from octavo.runtime.server.messages import Submit
from tests.server.running import Served, serve

KEY = "measure"
FIRST, BETWEEN = 0.05, 0.01


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(api_key=(KEY,)) as running:
        yield running


@pytest.fixture
def server(served: Served) -> Iterator[Served]:
    """A stub that takes 50 ms to the first token and at least 10 ms to each other, and has much to say."""
    served.stub.reset()
    watch(served)
    served.stub.first_token_seconds, served.stub.token_seconds = FIRST, BETWEEN
    yield served
    served.wait_until_free()


def bench(server: Served, *options: object, key: str = KEY) -> Result:
    arguments = ["bench", "serve", str(server.http.base_url), "--api-key", key, *map(str, options)]
    return CliRunner().invoke(app, arguments)


def watch(server: Served) -> list[list[int]]:
    """Prompts of the answers that are asked for from now on; all of them have much to say."""
    prompts: list[list[int]] = []

    def answer(submit: Submit, index: int) -> str:
        prompts.extend(submit.prompts)
        return "a b " * 100

    server.stub.answer = answer
    return prompts


def measure(server: Served, tmp_path: Path, *options: object) -> dict[str, Any]:
    file = tmp_path / "numbers.json"
    result = bench(server, "--json", file, *options)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_fixed_concurrency(server: Served, tmp_path: Path) -> None:
    """Lengths are as asked, never more requests at once, and the times are the stub's."""
    prompts = watch(server)
    options = ("--requests", 9, "--concurrency", 3, "--prompt-tokens", "5-9", "--answer-tokens", 8)
    report = measure(server, tmp_path, *options, "--plot", tmp_path / "plot.svg")
    assert report["answered"] == 9 and report["errors"] == {} and "goodput" not in report
    spans = [(call["sent"], call["sent"] + call["latency"]) for call in report["calls"]]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 3
    assert {call["answer_tokens"] for call in report["calls"]} == {8} and report["answer_tokens"] == 72
    lengths = [len(prompt) for prompt in prompts]
    assert sorted(lengths) == sorted(call["prompt_tokens"] for call in report["calls"])
    assert set(lengths) <= set(range(5, 10)) and len(set(lengths)) > 1
    assert report["first_token"]["p50"] >= FIRST and report["latency"]["p50"] >= FIRST + 7 * BETWEEN
    assert report["inter_token"]["p50"] >= BETWEEN / 2
    assert report["requests_per_second"] <= 3 / (FIRST + 7 * BETWEEN)
    drawing = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    texts = [element.text or "" for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "first token" in texts and texts[0].startswith("9 of 9 requests answered")


def test_goodput(server: Served, tmp_path: Path) -> None:
    """Requests count that keep all bounds; one that fails keeps none."""
    options = ("--requests", 6, "--prompt-tokens", 6, "--answer-tokens", 3)
    wide = measure(server, tmp_path, *options, "--first-token-bound", 60_000, "--latency-bound", 60_000)
    assert wide["goodput"]["requests"] == 6 and wide["goodput"]["bounds"] == {"first_token": 60.0, "latency": 60.0}
    assert measure(server, tmp_path, *options, "--inter-token-bound", 0.01)["goodput"]["requests"] == 0
    result = bench(server, *options, "--latency-bound", 60_000)
    assert "goodput" in result.output and "6 requests within latency 60000 ms" in result.output
    failed = Call([1], 1, arrivals=[1.0], ended=1.0, error="status 429")
    assert not failed.within(Bounds()) and Call([1], 1, arrivals=[1.0], ended=1.0).within(Bounds(first_token=1.0))


def test_arrivals_by_chance(server: Served, tmp_path: Path) -> None:
    """With --rate requests come whatever is still open, and the same seed sends the same."""
    server.stub.first_token_seconds = 0.3
    prompts = watch(server)
    options = ("--requests", 20, "--rate", 100, "--prompt-tokens", "~4", "--answer-tokens", 1, "--seed", 5)
    report = measure(server, tmp_path, *options)
    assert report["answered"] == 20
    sent = [call["sent"] for call in report["calls"]]
    assert sent == sorted(sent) and sent[-1] - sent[0] < 0.3 * 19, "later ones do not wait for the answers before them"
    server.stub.first_token_seconds = 0.0
    again = watch(server)
    measure(server, tmp_path, *options)
    assert len(prompts) == 20 and sorted(again) == sorted(prompts)


def test_failures_are_counted(server: Served, tmp_path: Path) -> None:
    """Requests that are sent away, break off, or fail in the stream are told by their reason; others are measured."""
    server.stub.most_open = 2
    report = measure(server, tmp_path, "--requests", 12, "--concurrency", 6, "--answer-tokens", 2)
    assert report["errors"].keys() == {"status 429"}
    assert report["answered"] + report["errors"]["status 429"] == 12
    server.stub.most_open, server.stub.gone_after = None, 2
    result = bench(server, "--requests", 2, "--answer-tokens", 9)
    assert isinstance(result.exception, OctavoError)
    assert "no request of 2 was answered" in str(result.exception) and "killed" in str(result.exception)


TOKEN = {"choices": [{"text": "a"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 1}}


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([TOKEN, USAGE], None),
        ([TOKEN], "an answer without usage"),
        ([USAGE], "an answer without text"),
        ([TOKEN, {"choices": [{}]}, USAGE], "missing required field `text`"),
        ([TOKEN, {"choices": [5]}, USAGE], "Expected `object`, got `int`"),
        ([TOKEN, [], USAGE], "Expected `object`, got `array`"),
        ([TOKEN, {"choices": [], "usage": {"completion_tokens": "many"}}], "Expected `int`, got `str`"),
        ([TOKEN, {"error": "text alone"}], "Expected `object | null`, got `str`"),
        ([TOKEN, {"error": {"message": "no room"}}], "error in the stream: no room"),
    ],
)
def test_odd_events_are_failures_of_their_call_alone(
    monkeypatch: pytest.MonkeyPatch, events: list[Any], error: str | None
) -> None:
    """Every second call gets them; the others are answered."""
    calls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "some"}]})
        calls += 1
        told = events if calls % 2 else [TOKEN, USAGE]
        return httpx.Response(200, text="".join(f"data: {json.dumps(one)}\n\n" for one in told) + "data: [DONE]\n\n")

    client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("octavo.runtime.bench_serve.httpx.AsyncClient", client)
    one = Lengths("1")
    load = Load(requests=4, rate=None, concurrency=1, prompt_tokens=one, answer_tokens=one, seed=0, timeout=10.0)
    measured = asyncio.run(measure_server("http://some", None, load, lambda done, total: None))
    told = [call.error for call in measured]
    assert told[1::2] == [None, None]
    assert told[::2] == [None, None] if error is None else all(each and error in each for each in told[::2]), told


def test_a_server_that_is_none(server: Served) -> None:
    refused = bench(server, key="wrong").exception
    assert isinstance(refused, OctavoError) and "401" in str(refused)
    nobody = CliRunner().invoke(app, ["bench", "serve", "http://127.0.0.1:9", "--requests", "1"]).exception
    assert isinstance(nobody, OctavoError) and "/v1/models does not answer" in str(nobody)
    server.stub.state = EngineState(phase="starting", detail="weights")
    starting = bench(server, "--requests", 1).exception
    assert isinstance(starting, OctavoError) and "status 503" in str(starting)


def test_a_request_that_takes_too_long(server: Served) -> None:
    server.stub.first_token_seconds = 5.0
    one = Lengths("1")
    load = Load(requests=1, rate=None, concurrency=1, prompt_tokens=one, answer_tokens=one, seed=0, timeout=0.1)
    (call,) = asyncio.run(measure_server(str(server.http.base_url), KEY, load, lambda done, total: None))
    assert call.error == "TimeoutError" and 0.1 <= call.latency < 4


def test_lengths() -> None:
    source = random.Random(0)
    assert {Lengths("7").draw(source) for _ in range(20)} == {7}
    assert {Lengths("2-4").draw(source) for _ in range(100)} == {2, 3, 4}
    drawn = [Lengths("~50").draw(source) for _ in range(4000)]
    # The mean of 4,000 exponential draws with mean 50 has a standard deviation of 0.8.
    assert min(drawn) >= 1 and abs(statistics.mean(drawn) - 50) < 4 and max(drawn) > 200
    for wrong in ("0", "-1", "5-2", "~0", "a", "", "1-"):
        with pytest.raises(UsageError, match="lengths are"):
            Lengths(wrong)
    for rate, concurrency in ((None, None), (1.0, 1)):
        with pytest.raises(UsageError, match="--rate"):
            Load(
                requests=1,
                rate=rate,
                concurrency=concurrency,
                prompt_tokens=Lengths("1"),
                answer_tokens=Lengths("1"),
                seed=0,
                timeout=1.0,
            )
