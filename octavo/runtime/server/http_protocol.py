"""Uvicorn's protocol with bounds on what comes before a request is known to anyone: bytes and seconds of its head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0
"""For the head of a request: of a new connection's from its beginning, of later ones' from their first byte."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def bounded_protocol(most_bytes: int, seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """The protocol class for a server; a head beyond a bound ends its connection."""

    class BoundedProtocol(HttpToolsProtocol):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._head_bytes = 0
            self._head_ends: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            head = self._head_ends
            super().data_received(data)
            if head is None or self._head_ends is not head:  # it is complete, or began in here
                return
            self._head_bytes += len(data)
            if self._head_bytes > most_bytes and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._head_ends is None:
                self._expect_head()

        def on_headers_complete(self) -> None:
            self._forget_head()
            super().on_headers_complete()

        def _expect_head(self) -> None:
            self._head_ends = self.loop.call_later(seconds, self.transport.close)

        def _forget_head(self) -> None:
            self._head_bytes = 0
            if self._head_ends is not None:
                self._head_ends.cancel()
                self._head_ends = None

    return BoundedProtocol
