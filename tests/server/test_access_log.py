"""The line about a request; an engine's part in it is in test_lifecycle.py."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from octavo.runtime.server.access_log import AccessLog
from octavo.runtime.server.engine_interface import RequestStream
from octavo.runtime.server.messages import Finished, Submit
from octavo.runtime.server.metrics import Metrics


async def answering(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that opens a stream and answers."""
    scope["state"]["record"].stream = RequestStream(Submit(id="r", prompts=[[1], [2]], params={}), lambda index: None)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def leaving(scope: Scope, receive: Receive, send: Send) -> None:
    """One that begins an answer and fails."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError


def ask(application: Any, headers: list[tuple[bytes, bytes]], **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """One request -> its line, and the headers of its answer."""
    lines: list[str] = []
    sent: list[Any] = []
    log = AccessLog(application, metrics=Metrics("model"), write=lines.append, **options)
    scope = {"type": "http", "method": "POST", "path": "/v1/" + "x" * 999, "headers": headers, "client": ("::1", 5)}

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads")

    async def run() -> None:
        try:
            await log(scope, receive, send)
        except RuntimeError:
            assert application is leaving

    asyncio.run(run())
    (line,) = lines
    return json.loads(line), {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_prompts_are_logged_only_if_asked_for() -> None:
    line, _ = ask(answering, [])
    assert "prompts" not in line and (line["prompt_tokens"], line["finish"], line["client"]) == (2, [], "::1")
    assert len(line["path"]) == 200
    line, _ = ask(answering, [], decode=lambda ids: f"text of {ids}")
    assert line["prompts"] == ["text of [1]", "text of [2]"]


def test_answers_are_told_by_what_they_took() -> None:
    async def finishing(scope: Scope, receive: Receive, send: Send) -> None:
        await answering(scope, receive, send)
        times = {"queue_seconds": 0.5, "prefill_seconds": 0.25, "decode_seconds": 2.0}
        scope["state"]["record"].stream.finished = [
            Finished(id="r", index=index, reason="stop", error=None, answer_tokens=3, preemptions=2, **times)
            for index in range(2)
        ]

    line, _ = ask(finishing, [])
    assert (line["answer_tokens"], line["finish"], line["preemptions"]) == (6, ["stop", "stop"], 4)
    assert (line["queue_seconds"], line["prefill_seconds"], line["decode_seconds"]) == (0.5, 0.25, 2.0)


def test_an_answer_that_breaks_off_is_not_complete() -> None:
    assert ask(answering, [])[0]["complete"]
    line, _ = ask(leaving, [])
    assert line["status"] == 200 and not line["complete"]


@pytest.mark.parametrize("given", [b"", b"two words", b"x" * 129, b'"}', b"line\n"])
def test_a_request_id_that_is_not_plain_is_replaced(given: bytes) -> None:
    line, headers = ask(answering, [(b"x-request-id", given)])
    assert headers["x-request-id"] == line["request_id"] != given.decode()
    assert len(line["request_id"]) == 32 and headers["content-length"] == "2"


def test_a_plain_request_id_is_kept() -> None:
    line, headers = ask(answering, [(b"x-request-id", b"Trace-1.2_3")])
    assert headers["x-request-id"] == line["request_id"] == "Trace-1.2_3"
