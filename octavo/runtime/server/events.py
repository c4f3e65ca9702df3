"""Answers as they go to the client: whole, or as server-sent events with comments in between where it takes long.

A client that leaves ends the answer, in either form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import UsageError
from octavo.runtime.server.engine_interface import RequestStream
from octavo.runtime.server.errors import ApiError, api_error
from octavo.runtime.server.messages import Finished, Refused, Tokens

HEARTBEAT = b": still at work\n\n"
DONE = b"data: [DONE]\n\n"

EngineMessage = Tokens | Finished | Refused

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """There is nobody to answer any more."""


class Writer(Protocol):
    """One protocol's form of what the engine says. ``Any`` is a piece of an answer, whatever the protocol has."""

    def begin(self) -> Iterable[Any]:
        """Pieces before the first token."""
        ...

    def push(self, message: Tokens) -> Iterable[Any]: ...

    def stopped(self, index: int) -> bool:
        """A stop string was found in this answer: none of its further tokens is needed."""
        ...

    def finish(self, message: Finished) -> Iterable[Any]:
        """Pieces at the end of one answer, unless it was stopped. Raises :class:`ApiError` if it failed."""
        ...

    def frame(self, piece: Any) -> bytes:
        """A piece as an event."""
        ...

    def end(self) -> bytes:
        """Events after the last piece."""
        ...

    def take(self, piece: Any) -> None:
        """Add a piece to the whole answer."""
        ...

    def whole(self) -> bytes:
        """The whole answer, JSON."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        ...


def event(data: bytes, name: str | None = None) -> bytes:
    """A server-sent event. JSON has no line breaks, so its data is one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error in the middle of one of OpenAI's streams; its client raises it."""
    return event(msgspec.json.encode(error.openai()))


class EngineAnswer(Response):
    """What the engine says of one request, written in one of its two forms. It closes the stream whatever happens."""

    media_type = "application/json"

    def __init__(self, engine: RequestStream, writer: Writer, *, streamed: bool, heartbeat_seconds: float) -> None:
        super().__init__()
        self._engine = engine
        self._writer = writer
        self._streamed = streamed
        self._heartbeat_seconds = heartbeat_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with client_present(receive):
                if self._streamed:
                    await self._stream(send)
                else:
                    await self._send_whole(scope, receive, send)
        except ClientLeft:
            pass
        finally:
            self._engine.close()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self._writer
        for piece in writer.begin():
            writer.take(piece)
        while not self._engine.over:
            for piece in self._pieces(await anext(self._engine)):
                writer.take(piece)
        await Response(writer.whole(), media_type=self.media_type)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """A failure before anything was sent has a status of its own; later it is an event."""
        writer = self._writer
        first = await self._next()
        frames = self._frames(writer.begin()) + self._message(first)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        try:
            while not self._engine.over:
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                frames = self._message(await self._next())
            frames += writer.end()
        except Exception as error:
            frames = writer.error(api_error(error))
        await send({"type": "http.response.body", "body": frames, "more_body": False})

    async def _next(self) -> EngineMessage | None:
        """What the engine says, or None when it has been silent for long."""
        try:
            async with asyncio.timeout(self._heartbeat_seconds):
                return await anext(self._engine)
        except TimeoutError:
            return None

    def _message(self, message: EngineMessage | None) -> bytes:
        return HEARTBEAT if message is None else self._frames(self._pieces(message))

    def _frames(self, pieces: Iterable[Any]) -> bytes:
        return b"".join(map(self._writer.frame, pieces))

    def _pieces(self, message: EngineMessage) -> Iterable[Any]:
        match message:
            case Tokens():
                pieces = self._writer.push(message)
                if self._writer.stopped(message.index):
                    self._engine.stop(message.index)
                return pieces
            case Finished():
                return self._writer.finish(message)
            case Refused():
                raise api_error(UsageError(message.message))


@contextlib.asynccontextmanager
async def client_present(receive: Receive) -> AsyncIterator[None]:
    """Cancels what is done inside when the client leaves, and raises :class:`ClientLeft`."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()
