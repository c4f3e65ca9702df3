"""Answers of the two protocols whose events have names, which ``deepseek-recipe`` writes whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepseek_recipe as recipe

from octavo.runtime.server.conversion import AnswerParser
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.events import event
from octavo.runtime.server.messages import Finished, Tokens

Whole = recipe.ResponsesResponse | recipe.MessagesResponse


class EventWriter:
    """Events and whole answers. A piece is one of the package's events."""

    def __init__(self, parser: AnswerParser, whole: Whole, error: Callable[[ApiError, int], bytes]) -> None:
        """``error(error, number)``: the event that says it, the ``number``-th of the stream from 0 on."""
        self._parser = parser
        self._whole = whole
        self._error = error
        self._events = 0

    def begin(self) -> list[Any]:
        return self._parser.begin()

    def push(self, message: Tokens) -> list[Any]:
        return self._parser.push(message)

    def stopped(self, index: int) -> bool:
        return self._parser.finished

    def finish(self, message: Finished) -> list[Any]:
        return self._parser.finish(message)

    def frame(self, piece: Any) -> bytes:
        self._events += 1
        return event(piece.to_json().encode(), self._whole.sse_event_name(piece))

    def end(self) -> bytes:
        return b""

    def take(self, piece: Any) -> None:
        self._whole.accumulate(piece)

    def whole(self) -> bytes:
        return self._whole.to_json().encode()

    def error(self, error: ApiError) -> bytes:
        return self._error(error, self._events)
