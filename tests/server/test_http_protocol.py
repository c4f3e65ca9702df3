"""Bounds on the head of a request: what is larger or slower ends its own connection, and no other."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import Receive, Scope, Send

from octavo.runtime.server.http_protocol import bounded_protocol

HEAD_SECONDS = 0.3
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that says Hello once the body has come."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"Hello"})


async def exchange(*parts: bytes, pause: float = 0.0) -> list[bytes]:
    """Send parts on one connection and read until it is closed; another connection still has its answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        protocol = bounded_protocol(4096, HEAD_SECONDS)
        server = uvicorn.Server(uvicorn.Config(hello, http=protocol, log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = listener.getsockname()[:2]
        reader, writer = await asyncio.open_connection(*address)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        heard = await asyncio.wait_for(reader.read(), 10)
        other_reader, other_writer = await asyncio.open_connection(*address)
        other_writer.write(REQUEST + b"\r\n")
        assert b"Hello" in await other_reader.readuntil(b"Hello")
        for each in (writer, other_writer):
            each.close()
        server.should_exit = True
        await serving
    return heard.split(b"HTTP/1.1 ")[1:]


def test_requests_within_the_bounds() -> None:
    """A head in pieces, then a body that takes longer than a head may, then another request on the connection."""
    first = (REQUEST, b"Content-Length: 4\r\n\r\nab")
    last = (b"", b"", b"cd", REQUEST + b"Connection: close\r\n\r\n")
    assert [one[:3] for one in asyncio.run(exchange(*first, *last, pause=HEAD_SECONDS / 2))] == [b"200", b"200"]


def test_slow_head() -> None:
    assert asyncio.run(exchange(REQUEST)) == []


def test_silent_connection() -> None:
    assert asyncio.run(exchange()) == []


def test_large_head() -> None:
    (answer,) = asyncio.run(exchange(REQUEST, b"X: " + b"y" * 5000, pause=0.05))
    assert answer.startswith(b"431")


def test_a_body_is_not_counted_to_the_head_of_the_next_request() -> None:
    """Though both come at once."""
    first = REQUEST + b"Content-Length: 5000\r\n\r\n" + b"y" * 5000
    answers = asyncio.run(exchange(first + REQUEST, b"Connection: close\r\n\r\n", pause=0.05))
    assert [one[:3] for one in answers] == [b"200", b"200"]


def test_slow_head_of_a_later_request() -> None:
    (answer,) = asyncio.run(exchange(REQUEST + b"\r\n", b"GET", pause=0.05))
    assert answer.startswith(b"200")
