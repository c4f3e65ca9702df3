"""The engine as the HTTP side sees it: a protocol, the stream of one request, and what can go wrong.

``EngineProcess`` implements it over a socket; tests implement it in the same process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import msgspec

from octavo.errors import OctavoError
from octavo.runtime.server.messages import Finished, Ready, Refused, Submit, Tokens

Phase = Literal["starting", "ready", "draining", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """Whether requests are taken, and if not, why."""

    phase: Phase
    detail: str
    """The part of the start that is under way; why the engine is broken."""
    done: int = 0
    total: int = 0
    """Of the part under way; 0 is unknown."""
    ready: Ready | None = None
    """What the engine said of itself when it had started."""


class NotReady(OctavoError):
    """No request is taken now: the engine starts, drains or is broken; the message says which."""


class Overloaded(OctavoError):
    """As many requests wait as may."""

    def __init__(self, message: str, retry_after: int) -> None:
        """``retry_after``: whole seconds, at least 1."""
        super().__init__(message)
        self.retry_after = retry_after


class EngineGone(OctavoError):
    """The engine ended before the answer did; the message says why."""


class RequestStream:
    """What comes for one request, in order: :class:`Tokens` and :class:`Finished` of each of its answers.

    The iteration ends after the last :class:`Finished` (one an answer) or after :class:`Refused`, and raises
    :class:`EngineGone` if the engine ends first. One task iterates. Whoever opened it calls :meth:`close` in a
    ``finally``, so that a client that leaves frees everything.
    """

    def __init__(self, submit: Submit, abort: Callable[[int | None], None]) -> None:
        """``abort(index)`` ends one answer at a stop string, ``abort(None)`` all that are left; each at most once."""
        self.submit = submit
        self.finished: list[Finished] = []
        """Answers that the iteration has brought to their end."""
        self._answers: int = len(submit.prompts) * submit.params.get("n", 1)
        self._abort = abort
        self._stopped: set[int] = set()
        self._arrived: deque[Tokens | Finished | Refused | EngineGone] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.over = False
        """The iteration has come to its end."""

    def put(self, message: Tokens | Finished | Refused | EngineGone) -> None:
        """The engine's side: what comes next. In the event loop's thread."""
        self._arrived.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finished | Refused:
        if self.over:
            raise StopAsyncIteration
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._arrived.popleft()
        if isinstance(message, Finished):
            if message.index in self._stopped:  # also if the engine ended it otherwise before it heard
                message = msgspec.structs.replace(message, reason="stop", error=None)
            self.finished.append(message)
            self.over = len(self.finished) == self._answers
        elif not isinstance(message, Tokens):
            self.over = True
        if isinstance(message, EngineGone):
            raise message
        return message

    def stop(self, index: int) -> None:
        """End one answer, whose text has come to a stop string; its :class:`Finished` still comes, with this reason."""
        if index not in self._stopped:
            self._stopped.add(index)
            self._abort(index)

    def close(self) -> None:
        """Abort what is left; the iteration is over. Nothing happens after the end, or the second time."""
        if not self.over:
            self.over = True
            self._abort(None)


class EngineClient(Protocol):
    """An engine in another process. Everything happens in the event loop's thread."""

    @property
    def state(self) -> EngineState: ...

    def open(self, submit: Submit, owner: str = "") -> RequestStream:
        """Begin to answer. ``owner`` is the API key under which the request came; only the same may abort it.

        Raises :class:`Overloaded` if the queue is full, :class:`NotReady` if the engine takes no requests, and
        :class:`~octavo.errors.UsageError` for more answers than it ever takes.
        """
        ...

    async def stats(self) -> dict[str, Any]:
        """``EngineBase.stats()``. Raises :class:`NotReady`, or :class:`EngineGone` if the engine ends meanwhile."""
        ...

    def abort(self, request_id: str, owner: str = "") -> bool:
        """End a request as it is; its stream still ends in order. False: this owner has none of that name."""
        ...
