"""Limits, clients that leave, and silences."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.runtime.server import limits
from tests.server.running import Served, serve
from tests.server.stub_client import MODEL

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize", "/abort"]


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serve(max_body_bytes=2000, max_header_bytes=1500) as served:
        yield served


@pytest.mark.parametrize("path", PATHS)
def test_a_large_body_is_refused(small: Served, path: str) -> None:
    response = small.http.post(path, content=b" " * 2001)
    assert response.status_code == 413 and "2000 bytes" in response.json()["error"]["message"]


def test_a_large_body_is_refused_though_its_length_is_not_told(small: Served) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 100

    assert small.http.post(CHAT, content=parts()).status_code == 413


def test_a_body_is_not_read_when_its_length_is_too_large(small: Served) -> None:
    with socket.create_connection((small.http.base_url.host, small.http.base_url.port or 0), timeout=5) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_not_waited_for(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.1)
    with socket.create_connection((small.http.base_url.host, small.http.base_url.port or 0), timeout=5) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_large_header_is_refused(small: Served) -> None:
    response = small.http.get("/v1/models", headers={"x-filler": "x" * 1500})
    assert response.status_code == 431 and "error" in response.json()
    assert small.http.get("/v1/models").status_code == 200


def test_a_large_prompt_holds_up_nobody(server: Served) -> None:
    """While text is encoded for a second or so, /health goes on to answer: no gap is near the encoding's time."""
    answered: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.http.base_url) as client:
            while not done.is_set():
                client.get("/health")
                answered.append(time.perf_counter())

    asking = threading.Thread(target=ask)
    asking.start()
    began = time.perf_counter()
    error = server.refused(CHAT, messages=[{"role": "user", "content": "many words " * 180_000}])
    ended = time.perf_counter()
    done.set()
    asking.join()
    assert error["code"] == "context_length_exceeded"
    times = [began, *(moment for moment in answered if began < moment < ended), ended]
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert longest < (ended - began) / 2, (longest, ended - began)


def test_silences_are_filled_with_comments(server: Served) -> None:
    server.stub.first_token_seconds = 0.35
    events = server.events(CHAT, messages=BODY["messages"])
    kinds = [name for name, _ in events]
    assert kinds[0] is None and events[0][1]["choices"][0]["delta"]["role"] == "assistant"  # the role comes at once
    assert 2 <= kinds.count("") <= 4  # every 0.1 s
    assert events[-1] == (None, "[DONE]")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", PATHS[:4])
def test_a_client_that_leaves_ends_its_answer(server: Served, path: str, streamed: bool) -> None:
    server.stub.token_seconds = 0.01
    server.stub.answer = lambda submit, index: "word " * 400
    what = {"prompt": "Hi"} if "completions" in path and "chat" not in path else BODY
    if path == "/v1/responses":
        what = {"input": "Hi"}
    elif path != CHAT:
        what = what | {"max_tokens": 500}
    with pytest.raises(httpx.ReadTimeout):
        if streamed:
            with server.http.stream(
                "POST", path, json=what | {"model": MODEL, "stream": True}, timeout=0.15
            ) as response:
                for number, _ in enumerate(response.iter_text()):
                    if number == 2:
                        raise httpx.ReadTimeout("enough")
        else:
            server.http.post(path, json=what | {"model": MODEL}, timeout=0.15)
    assert server.stub.submitted
    server.wait_until_free()
    assert list(server.stub.aborted) == [server.submit.id]


def test_an_abort_ends_an_answer_as_it_is(server: Served) -> None:
    server.stub.token_seconds = 0.01
    server.stub.answer = lambda submit, index: "word " * 400
    with server.http.stream("POST", CHAT, json=BODY | {"stream": True, "thinking": {"type": "disabled"}}) as response:
        lines = response.iter_lines()
        next(lines)
        aborted = httpx.post(server.http.base_url.join("/abort"), json={"id": server.submit.id})
        assert aborted.status_code == 200
        rest = list(lines)
    assert rest[-2] == "data: [DONE]" and '"finish_reason":"length"' in rest[-4]
    assert server.post("/abort").status_code == 400
    assert server.http.post("/abort", json={"id": "chatcmpl-0"}).status_code == 404
