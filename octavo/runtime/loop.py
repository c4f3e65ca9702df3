"""The engine's own thread: it steps the core, takes requests in, and ends loudly when it cannot go on.

Clients talk to it through a queue and hear from it through their requests' sinks, so no client can slow a step down,
and a client that is interrupted leaves the engine whole.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from octavo.errors import OctavoError
from octavo.runtime.core import EngineCore
from octavo.runtime.request import Request

Command = Callable[[], None]
T = TypeVar("T")


class EngineFailure(OctavoError):
    """The engine has ended and cannot answer any more; the message says at what."""


class EngineLoop:
    """Runs a core in a thread of its own until :meth:`close`, a failing step, or a step beyond its deadline."""

    def __init__(self, core: EngineCore, step_deadline: float) -> None:
        """``step_deadline``: seconds after which a step counts as hung and the engine ends."""
        self._core = core
        self._step_deadline = step_deadline
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: list[tuple[list[Request], Callable[[EngineFailure], None]]] = []
        self._failure: EngineFailure | None = None
        self._closing = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="octavo-watchdog", daemon=True)
        self._stopped = threading.Event()
        self._thread.start()
        self._watchdog.start()

    def submit(self, requests: list[Request], on_failure: Callable[[EngineFailure], None]) -> None:
        """Queue requests, which fit. Raises :class:`EngineFailure` if the engine has ended.

        ``on_failure`` is called, once, if the engine ends before all of them do.
        """

        def add() -> None:
            for request in requests:
                self._core.add(request)

        with self._lock:
            self._check_open()
            self._open.append((requests, on_failure))
            self._commands.put(add)

    def abort(self, request: Request) -> None:
        """End a request as it is; its sink gets the finished answer."""
        with self._lock:
            if self._failure is None and not self._closing:
                self._commands.put(lambda: self._core.abort(request))

    def ask(self, question: Callable[[EngineCore], T]) -> T:
        """Evaluate ``question`` between two steps and return its result."""
        answer: Future[T] = Future()

        def run() -> None:
            answer.set_result(question(self._core))

        with self._lock:
            self._check_open()
            self._commands.put(run)
        while True:
            try:
                return answer.result(timeout=0.1)
            except TimeoutError:
                with self._lock:
                    self._check_open()

    def close(self) -> None:
        """Abort what is left and end the thread. Nothing happens the second time."""
        with self._lock:
            self._closing = True
            self._commands.put(_nothing)
        self._thread.join(timeout=self._step_deadline)
        self._stopped.set()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineFailure("The engine is closed.")

    def _run(self) -> None:
        core = self._core
        try:
            while True:
                self._take_commands(wait=not core.busy and not self._closing)
                if self._closing:
                    break
                self._step_began = time.monotonic()
                ended = core.step()
                self._step_began = None
                if ended:
                    self._forget_finished()
            for requests, _ in self._open:
                for request in requests:
                    core.abort(request)
        except Exception as error:
            self._fail(EngineFailure(f"The engine ended while {core.doing}: {type(error).__name__}: {error}"))

    def _take_commands(self, wait: bool) -> None:
        """Everything that has been asked; when there is nothing to do, wait for something."""
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _forget_finished(self) -> None:
        with self._lock:
            self._open = [(r, on_failure) for r, on_failure in self._open if not all(request.done for request in r)]

    def _watch(self) -> None:
        """A step that hangs cannot be interrupted, but nobody has to wait for it."""
        while not self._stopped.wait(min(1.0, self._step_deadline / 4)):
            began = self._step_began
            if began is not None and time.monotonic() - began > self._step_deadline:
                self._fail(
                    EngineFailure(
                        f"The engine hangs while {self._core.doing}: the step has taken more than "
                        f"{self._step_deadline:g} s. Raise --step-deadline if it is only slow, else restart."
                    )
                )
                return

    def _fail(self, failure: EngineFailure) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            left, self._open = self._open, []
        for requests, on_failure in left:
            if not all(request.done for request in requests):
                on_failure(failure)


def _nothing() -> None:
    """Wakes the engine's thread."""
