"""What goes wrong, as clients expect to read it: OpenAI's envelope, and Anthropic's below ``/v1/messages``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import OctavoError, UsageError
from octavo.runtime.server.engine_interface import EngineGone, NotReady, Overloaded

MESSAGES_PATH = "/v1/messages"
RETRY_SECONDS = 5
"""When to ask an engine again that is not ready."""

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error. The message is for the client: no path of the server's and no stack trace."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``param``: the field that was wrong, as a path such as ``messages[0].role``."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def openai(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The same for clients of ``/v1/messages``, which look for no ``param``: the message names the field."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        message = f"{self.param}: {self.message}" if self.param is not None else self.message
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str) -> Response:
        """The whole answer to a request for ``path``."""
        body = self.anthropic() if path.startswith(MESSAGES_PATH) else self.openai()
        return Response(msgspec.json.encode(body), self.status, self.headers, "application/json")


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; one that nobody foresaw is told to the log, with its stack trace."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            return ApiError(429, str(error), code="overloaded", headers={"Retry-After": str(error.retry_after)})
        case NotReady():
            return ApiError(503, str(error), code="not_ready", headers={"Retry-After": str(RETRY_SECONDS)})
        case EngineGone():
            return ApiError(503, str(error), code="engine_gone")
        case UsageError():
            return ApiError(400, str(error), param=_field(str(error)))
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed at this request; its log says why.")


def install(app: FastAPI) -> None:
    """Answer every foreseen exception of a handler."""

    async def answer(request: Request, error: Exception) -> Response:
        return api_error(error).response(request.url.path)

    for kind in (ApiError, OctavoError, HTTPException):
        app.add_exception_handler(kind, answer)


class Failures:
    """ASGI middleware: answers exceptions that nobody foresaw."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            await api_error(error).response(scope["path"])(scope, receive, send)


def _field(message: str) -> str | None:
    """The field at the beginning of a message such as ``top_p 7: must be at most 1``."""
    found = re.match(r"([a-z_]+)( [^:]*)?: ", message)
    return found[1] if found else None
