"""One JSON line on stderr for every HTTP request, and its ``X-Request-Id``; the outermost layer of the application.

Nothing in a line is text of the user's, unless the server was told to log prompts.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.runtime.server.engine_interface import RequestStream
from octavo.runtime.server.metrics import Metrics

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_MOST_PATH = 200


@dataclass(slots=True)
class RequestRecord:
    """What is told of a request when it has ended; handlers find it in ``request.state.record``."""

    request_id: str
    """The client's ``X-Request-Id`` where it is a plain one, else made here; the answer carries it too."""
    stream: RequestStream | None = None
    """Set by the handler that opened it."""


class AccessLog:
    """ASGI middleware: times, counts and logs requests, and names them."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        decode: Callable[[list[int]], str] | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        """``decode``: text of prompt ids, if prompts are to be logged; ``write`` takes lines instead of stderr."""
        self._app = app
        self._metrics = metrics
        self._decode = decode
        self._write = write if write is not None else _to_stderr

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        scope.setdefault("state", {})["record"] = record
        status, complete = 0, False
        began = time.perf_counter()

        async def note(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - began
            self._metrics.observe_request(_route(scope), status, seconds, record.stream)
            self._write(msgspec.json.encode(self._line(scope, record, status, complete, seconds)).decode())

    def _line(self, scope: Scope, record: RequestRecord, status: int, complete: bool, seconds: float) -> dict[str, Any]:
        client = scope.get("client")
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": record.request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:_MOST_PATH],
            "status": status,
            "complete": complete,
            "seconds": round(seconds, 6),
        }
        if record.stream is not None:
            line |= _answers(record.stream)
            if self._decode is not None:
                line["prompts"] = list(map(self._decode, record.stream.submit.prompts))
        return line


def _answers(stream: RequestStream) -> dict[str, Any]:
    """What the engine said of the answers that ended before the HTTP request did."""
    line: dict[str, Any] = {
        "id": stream.submit.id,
        "prompt_tokens": sum(map(len, stream.submit.prompts)),
        "answer_tokens": sum(answer.answer_tokens for answer in stream.finished),
        "finish": [answer.reason for answer in stream.finished],
        "preemptions": sum(answer.preemptions for answer in stream.finished),
    }
    if stream.finished:
        first = stream.finished[0]
        line |= {
            "queue_seconds": round(first.queue_seconds, 6),
            "prefill_seconds": round(first.prefill_seconds, 6),
            "decode_seconds": round(first.decode_seconds, 6),
        }
    return line


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GIVEN_ID.fullmatch(value):
            given: bytes = value
            return given.decode()
    return secrets.token_hex(16)


def _route(scope: MutableMapping[str, Any]) -> str:
    """The route's pattern, so that labels of metrics are few whatever paths are asked for."""
    return scope["route"].path if "route" in scope else "none"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
