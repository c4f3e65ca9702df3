"""The engine's own thread: it steps the core, takes requests in, and ends loudly when it cannot go on.

Clients talk to it through a queue and hear from it through their requests' sinks, so no client can slow a step down,
and a client that is interrupted leaves the engine whole.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from octavo.errors import OctavoError
from octavo.runtime.core import EngineCore
from octavo.runtime.request import FinishReason, Request

Command = Callable[[], None]
T = TypeVar("T")


class EngineFailure(OctavoError):
    """The engine has ended and cannot answer any more; the message says at what."""


class EngineLoop:
    """Runs a core in a thread of its own until :meth:`close`, a failing step, or a step beyond its deadline."""

    def __init__(self, core: EngineCore, step_deadline: float, waits_for: Callable[[], str] = str) -> None:
        """``step_deadline``: seconds after which a step counts as hung and the engine ends; ``waits_for`` tells then
        what it may be waiting for, if that can be seen."""
        self._core = core
        self._waits_for = waits_for
        self._step_deadline = step_deadline
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: list[tuple[list[Request], Callable[[EngineFailure], None]]] = []
        self._forgotten = 0
        self._failure: EngineFailure | None = None
        self._closing = False
        self._over = threading.Event()
        """Set when everybody has heard all that they will hear from this engine."""
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="octavo-watchdog", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, requests: list[Request], on_failure: Callable[[EngineFailure], None]) -> None:
        """Queue requests, all or none of them.

        ``on_failure`` is called at most once, if the engine fails; perhaps when they have just got their answers.
        Raises :class:`EngineFailure` if it has ended, :class:`~octavo.errors.UsageError` for a request that never fits.
        """
        for request in requests:
            self._core.scheduler.check_room(request)

        def add() -> None:
            for request in requests:
                self._core.add(request)

        with self._lock:
            self._check_open()
            self._open.append((requests, on_failure))
            self._commands.put(add)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request as it is; its sink gets the finished answer. Another reason than ``abort`` counts as that."""
        with self._lock:
            if self._failure is None and not self._closing:
                self._commands.put(lambda: self._core.abort(request, reason))

    def ask(self, question: Callable[[EngineCore], T]) -> T:
        """Evaluate ``question`` between two steps; returns or raises what it does."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question(self._core))
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            self._check_open()
            self._commands.put(run)
        while not wait([answer], timeout=0.1).done:
            self._check_failure()
        return answer.result()

    def wait(self) -> EngineFailure | None:
        """Block until the engine has ended -> what it ended of, None if it was closed."""
        self._over.wait()
        return self._failure

    def close(self) -> None:
        """Abort what is left and end the thread. Nothing happens the second time."""
        with self._lock:
            self._closing = True
            self._commands.put(_nothing)
        if not self._over.wait(self._step_deadline):
            self.fail(self._hang())
        if self._failure is None:  # else it may hang for ever
            self._thread.join()
        # It ends now that all is over. Left alone it could be the last to hold the engine, and free its tensors while
        # the interpreter is being taken down, which ends the process with an abort.
        self._watchdog.join()

    def _check_failure(self) -> None:
        """Each caller gets an exception of its own, as it collects a traceback."""
        if self._failure is not None:
            raise EngineFailure(str(self._failure)) from self._failure

    def _check_open(self) -> None:
        self._check_failure()
        if self._closing:
            raise EngineFailure("The engine is closed.")

    def _run(self) -> None:
        core = self._core
        try:
            while not self._closing and self._failure is None:
                self._take_commands(wait=not core.busy)
                self._step_began = time.monotonic()
                core.step()
                self._step_began = None
                self._forget_ended()
            self._step_began = time.monotonic()
            core.read()  # so that nothing is computed any more when the engine is taken down
            self._step_began = None
            self._take_commands(wait=False)  # what was submitted before close()
            for requests, _ in self._open:
                for request in requests:
                    core.abort(request)
        except BaseException as error:  # whatever it is, clients wait
            doing = core.doing
            if self._failure is None:
                with contextlib.suppress(Exception):  # what the step before has drawn may end answers
                    core.read()
            failure = EngineFailure(f"The engine ended while {doing}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)
        finally:
            self._over.set()

    def _take_commands(self, wait: bool) -> None:
        """Everything that has been asked; when there is nothing to do, wait for something."""
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _forget_ended(self) -> None:
        """When it may be half of them, so that each answer bears little of the search."""
        if 2 * (self._core.ended - self._forgotten) >= len(self._open):
            self._forgotten = self._core.ended
            with self._lock:
                self._open = [(r, on_failure) for r, on_failure in self._open if not all(one.done for one in r)]

    def _watch(self) -> None:
        """A step that hangs cannot be interrupted, but nobody has to wait for it."""
        while not self._over.wait(min(1.0, self._step_deadline / 4)):
            began = self._step_began
            if began is not None and time.monotonic() - began > self._step_deadline:
                self.fail(self._hang())

    def _hang(self) -> EngineFailure:
        return EngineFailure(
            f"The engine hangs while {self._core.doing}: the step has taken more than {self._step_deadline:g} s. "
            f"{self._waits_for()}Raise --step-deadline if it is only slow, else restart."
        )

    def fail(self, failure: EngineFailure) -> None:
        """End the engine because of what somebody else has noticed; only the first failure counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            left, self._open = self._open, []
        for _, on_failure in left:
            with contextlib.suppress(Exception):  # a client that is gone; the others are to hear of it
                on_failure(failure)
        self._over.set()


def _nothing() -> None:
    """Wakes the engine's thread."""
