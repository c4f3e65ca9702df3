"""The engine process as the HTTP process has it: started, talked to, watched and ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.errors import OctavoError, UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.server.engine_interface import EngineGone, EngineState, NotReady, Overloaded, RequestStream
from octavo.runtime.server.messages import (
    Abort,
    AskStats,
    Broken,
    Finished,
    FromEngine,
    Ready,
    Refused,
    Starting,
    Stats,
    Stop,
    Submit,
    ToEngine,
    Tokens,
    frame,
    from_engine,
)

_END_SECONDS = 15.0
"""For the process to end by itself, which it bounds too."""
_MOST_RETRY_SECONDS = 60.0

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""``progress(phase, done, total)`` of a start."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that the engine has."""

    stream: RequestStream
    owner: str
    answers: int
    """That have not ended."""


class EngineProcess:
    """Implements :class:`~octavo.runtime.server.engine_interface.EngineClient`."""

    def __init__(self, config: EngineConfig, max_queue: int, progress: Progress | None = None) -> None:
        """``max_queue``: answers that may wait beyond those that the engine computes at once.

        Made in the event loop in which it is used.
        """
        self._config = config
        self._max_queue = max_queue
        self._progress = progress
        self._state = EngineState(phase="starting", detail="the engine's process")
        self._open: dict[str, _Open] = {}
        self._answers = 0
        """Of all open requests."""
        self._ends: deque[float] = deque(maxlen=64)
        """When answers ended lately."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(asyncio.Future.exception)  # perhaps nobody waits any more
        self._stopping = False

    @property
    def state(self) -> EngineState:
        return self._state

    async def start(self) -> None:
        """Start the process; returns before the engine is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            config = msgspec.json.encode(dataclasses.asdict(self._config), enc_hook=str).decode()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "octavo.runtime.server.engine_process", str(theirs.fileno()), config),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the HTTP process, which drains
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._listening = asyncio.create_task(self._listen())

    async def ready(self) -> None:
        """Wait for the engine. Raises what it ended of if it cannot start."""
        await asyncio.shield(self._ready)

    def open(self, submit: Submit, owner: str = "") -> RequestStream:
        if self._state.phase != "ready":
            raise NotReady(_why_not(self._state))
        ready = self._state.ready
        assert ready is not None
        answers = len(submit.prompts) * submit.params.get("n", 1)
        most = ready.max_requests + self._max_queue
        if answers > most:
            raise UsageError(f"n: the request asks for {answers} answers; this server takes at most {most} at once")
        room = most - self._answers
        if answers > room:
            raise Overloaded(
                f"{self._answers} answers are in work or wait, and there is room for {max(room, 0)} more. Try later.",
                self._retry_after(),
            )
        assert submit.id not in self._open, f"two requests {submit.id}"
        data = frame([submit])  # before it counts as open, as it raises for what cannot be encoded
        stream = RequestStream(submit, lambda index: self._send(Abort(id=submit.id, index=index)))
        self._open[submit.id] = _Open(stream, owner, answers)
        self._answers += answers
        self._idle.clear()
        self._writer.write(data)
        return stream

    async def stats(self) -> dict[str, Any]:
        if self._state.ready is None or self._state.phase == "broken":
            raise NotReady(_why_not(self._state))
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(AskStats(number=number))
        try:
            return await answer
        finally:
            del self._asked[number]

    def abort(self, request_id: str, owner: str = "") -> bool:
        entry = self._open.get(request_id)
        if entry is None or entry.owner != owner:
            return False
        self._send(Abort(id=request_id))
        return True

    def drain(self) -> None:
        """Take no more requests; those in work go on."""
        if self._state.phase in ("starting", "ready"):
            self._state = dataclasses.replace(self._state, phase="draining", detail="the server is being stopped")

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    async def close(self) -> None:
        """End the process, with what is left aborted; whatever does not end by itself is killed."""
        self.drain()
        self._stopping = True
        self._send(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            self._kill()
        await self._listening
        self._writer.close()

    def _send(self, message: ToEngine) -> None:
        """A process that is gone hears nothing; its streams end by what :meth:`_listen` finds."""
        self._writer.write(frame([message]))

    def _retry_after(self) -> int:
        """Seconds in which half of the queue should be through, at the pace of the last answers."""
        if len(self._ends) < 2:
            return 1
        pace = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return round(min(max(self._max_queue / 2 / pace, 1.0), _MOST_RETRY_SECONDS))

    def _kill(self) -> None:
        """The process and whatever it started: they have a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        """Take messages until the engine's end of the socket is closed."""
        try:
            while True:
                head = await self._reader.readexactly(4)
                for message in from_engine(await self._reader.readexactly(int.from_bytes(head, "little"))):
                    self._take(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # a bug of ours; everybody who waits is to hear of it
            _log.exception("messages of the engine cannot be followed")
            self._break(f"{type(error).__name__}: {error}", 1)
        try:
            code = await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            self._kill()
            code = await self._process.wait()
        self._kill()
        if self._state.phase != "broken":
            cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            reason = f"The engine's process {cause} without a word. Its messages are on the server's stderr."
            self._break("The server has been stopped." if self._stopping else reason, 1)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Tokens | Finished | Refused):
            self._deliver(message)
        elif isinstance(message, Stats):
            answer = self._asked.get(message.number)
            if answer is not None and not answer.done():  # nobody waits for it any more
                answer.set_result(message.stats)
        elif isinstance(message, Starting) and self._state.phase == "starting":
            self._state = EngineState(phase="starting", detail=message.phase, done=message.done, total=message.total)
            if self._progress is not None:
                self._progress(message.phase, message.done, message.total)
        elif isinstance(message, Ready) and self._state.phase == "starting":
            self._state = EngineState(phase="ready", detail="", ready=message)
            self._ready.set_result(None)
        elif isinstance(message, Broken):
            self._break(message.reason, message.exit_code)

    def _deliver(self, message: Tokens | Finished | Refused) -> None:
        entry = self._open.get(message.id)
        if entry is None:  # its stream has heard that the engine is broken
            return
        entry.stream.put(message)
        if isinstance(message, Tokens):
            return
        ended = 1 if isinstance(message, Finished) else entry.answers
        self._ends.append(time.monotonic())
        entry.answers -= ended
        self._answers -= ended
        if not entry.answers:
            del self._open[message.id]
            if not self._open:
                self._idle.set()

    def _break(self, reason: str, exit_code: int) -> None:
        """The engine is gone: everybody who waits hears why."""
        first_line = reason.split("\n")[0]  # clients see no traces
        self._state = dataclasses.replace(self._state, phase="broken", detail=first_line, done=0, total=0)
        if not self._ready.done():
            kind = UsageError if exit_code == UsageError.exit_code else OctavoError
            self._ready.set_exception(kind(reason))
        elif not self._stopping:
            _log.error("the engine is broken: %s", reason)
        for entry in self._open.values():
            entry.stream.put(EngineGone(first_line))
        self._open.clear()
        self._answers = 0
        self._idle.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineGone(first_line))


def _why_not(state: EngineState) -> str:
    if state.phase == "starting":
        return f"The engine is starting ({state.detail}). Try again when /health answers 200."
    if state.phase == "draining":
        return "The server is being stopped and takes no more requests."
    return f"The engine is broken: {state.detail}"
