"""From a configuration to a server that listens, until a signal has drained it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.model_source import model_config_of, served_name, tokenizer_of
from octavo.runtime.server.app import create_app
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.engine_client import EngineProcess
from octavo.runtime.server.http_protocol import bounded_protocol
from octavo.runtime.terminal import say, start_progress

_BACKLOG = 2048
_CLOSE_SECONDS = 5
"""For connections to take what has been written for them, once no answer is in work."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are taken by :func:`_serve`: the server goes on while requests in work end."""
        yield


def run_server(engine: EngineConfig, config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises :class:`OctavoError` if that cannot begin."""
    model_config = model_config_of(engine)
    tokenizer = tokenizer_of(engine, model_config)
    name = config.served_model_name or served_name(engine)

    def application(client: EngineProcess) -> FastAPI:
        return create_app(config, client, tokenizer, model_config, model=name, dump_dir=engine.dump_dir)

    # uvloop where it can be imported.
    with (
        listen(config.host, config.port) as listener,
        asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner,
    ):
        runner.run(_serve(engine, config, name, listener, application))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises :class:`UsageError` if it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}). Choose another --port, or 0 for a "
            "free one."
        ) from error


async def _serve(
    engine: EngineConfig,
    config: ServerConfig,
    name: str,
    listener: socket.socket,
    application: Callable[[EngineProcess], FastAPI],
) -> None:
    """Start everything, wait for a signal, and end it in order."""
    told_to_stop, told_twice = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (told_twice if told_to_stop.is_set() else told_to_stop).set()
        )
    bar = contextlib.ExitStack()
    client = EngineProcess(engine, config.max_queue, bar.enter_context(start_progress()))
    async with _running(client, application(client), listener, config.max_header_bytes):
        say(f"{name} starts at {_url(listener)}")
        with bar:
            await _first(client.ready(), told_to_stop.wait())
        if client.state.ready is not None:
            say(f"{client.state.ready.description}\nready at {_url(listener)}")
        await told_to_stop.wait()
        client.drain()
        say(f"requests in work have {config.drain_seconds:g} s to end; a second signal ends them now")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_first(client.idle(), told_twice.wait()), config.drain_seconds)


@contextlib.asynccontextmanager
async def _running(
    client: EngineProcess, app: FastAPI, listener: socket.socket, max_header_bytes: int
) -> AsyncIterator[None]:
    """The engine and the HTTP server; at the end what is left is aborted, and its clients are told so."""
    server = _Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(max_header_bytes),
            log_config=None,
            access_log=False,
            server_header=False,
            # These two would be taken from the environment.
            proxy_headers=False,
            workers=1,
            ws="none",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )
    await client.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        await client.close()
        server.should_exit = True
        await serving


async def _first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended; raises what it does."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
