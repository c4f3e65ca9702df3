"""An application over a stub, listening in a thread of this process, and clients as users have them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from octavo.runtime.server.app import create_app
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.messages import Submit
from tests.server.stub_client import MODEL, MODEL_CONFIG, TOKENIZER, StubClient


@dataclass(frozen=True, slots=True)
class Served:
    """A server with its engine and its clients."""

    stub: StubClient
    http: httpx.Client
    openai: openai.OpenAI

    def post(self, path: str, **body: Any) -> httpx.Response:
        """``body`` as JSON, with the model's name."""
        return self.http.post(path, json={"model": MODEL, **body})

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of OpenAI's envelope that ``body`` is answered with."""
        response = self.post(path, **body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def events(self, path: str, **body: Any) -> list[tuple[str | None, Any]]:
        """Name and data of every event of a stream; comments are ``("", text)``."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("\n\n")
        return [_event(block) for block in response.text.split("\n\n")[:-1]]

    @property
    def submit(self) -> Submit:
        """What the engine was asked last."""
        return self.stub.submitted[-1]

    def wait_until_free(self) -> None:
        """Wait until the engine has nothing to do, which takes it one round of the event loop."""
        for _ in range(200):
            if not self.stub.open_requests:
                return
            time.sleep(0.01)
        raise AssertionError(f"still open: {list(self.stub.open_requests)}")


def _event(block: str) -> tuple[str | None, Any]:
    if block.startswith(":"):
        return "", block[1:].strip()
    name = None
    if block.startswith("event: "):
        first, block = block.split("\n", 1)
        name = first.removeprefix("event: ")
    assert block.startswith("data: ") and "\n" not in block, block
    data = block.removeprefix("data: ")
    return name, data if data == "[DONE]" else json.loads(data)


def application(stub: StubClient, dump_dir: Path | None = None, **options: Any) -> FastAPI:
    """The application over a stub, with ``options`` of its :class:`ServerConfig`."""
    return create_app(ServerConfig(**options), stub, TOKENIZER, MODEL_CONFIG, model=MODEL, dump_dir=dump_dir)


@contextlib.contextmanager
def serve(**options: Any) -> Iterator[Served]:
    """A server with ``options`` of :func:`application`."""
    stub = StubClient()
    server = uvicorn.Server(
        uvicorn.Config(application(stub, **options), log_level="warning", lifespan="off", access_log=False)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with (
                httpx.Client(base_url=url, timeout=20) as http,
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                yield Served(stub, http, client)
        finally:
            server.should_exit = True
            thread.join()
