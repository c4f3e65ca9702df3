"""How much one request may bring: header and body in bytes, answers, schemas; and how long it may take to bring it."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.errors import ApiError

BODY_SECONDS = 60.0
"""A body that has not arrived after so long never will."""

T = TypeVar("T")


class HeaderLimit:
    """ASGI middleware: refuses a header that is too large."""

    def __init__(self, app: ASGIApp, *, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = sum(len(name) + len(value) for name, value in scope["headers"])
            if size > self._most_bytes:
                error = ApiError(431, f"The header has {size} bytes; {self._most_bytes} are allowed.")
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_json(request: Request, kind: type[T], config: ServerConfig) -> T:
    """The body, checked against ``kind``. Raises :class:`ApiError`: 400 that names the field, 408, 413."""
    body = await _read(request, config.max_body_bytes)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error, "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not the JSON that it should be: {error}.") from None


def check_json(value: Any, kind: Any, field: str) -> None:
    """Raise :class:`ApiError` that names the place if the value of a body's field is no ``kind``."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error, field) from None


def check_answers(n: int, config: ServerConfig) -> None:
    """Raise :class:`ApiError` if a request wants more answers than one may."""
    if n > config.max_n:
        raise ApiError(400, f"n {n}: this server gives at most {config.max_n} answers to a request.", param="n")


def check_schema(source: str, param: str, config: ServerConfig) -> None:
    """Raise :class:`ApiError` if a schema or a regular expression is too large."""
    size = len(source.encode())
    if size > config.max_schema_bytes:
        raise ApiError(400, f"{param} has {size} bytes; {config.max_schema_bytes} are allowed.", param=param)


async def _read(request: Request, most_bytes: int) -> bytes:
    too_large = ApiError(413, f"The body is too large: {most_bytes} bytes are allowed.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:.0f} seconds.") from None
    except ClientDisconnect:
        raise ApiError(400, "The body is incomplete.") from None
    return b"".join(parts)


def _wrong_field(error: msgspec.ValidationError, within: str) -> ApiError:
    message, _, place = str(error).partition(" - at ")
    found = re.search(r"\$\.?([^`]*)`", place)
    path = within + (found[1] if found else "")
    return ApiError(400, _sentence(message, path), param=_param(message, path))


def _param(message: str, path: str) -> str | None:
    """The field that a validation error is about: the place, and a field that is unknown or missing there."""
    field = re.match(r"Object .* field `(.*)`", message)
    return ".".join(filter(None, (path, field and field[1]))) or None


def _sentence(message: str, path: str) -> str:
    hint = " It is not supported." if message.startswith("Object contains unknown field") else ""
    return f"{path}: {message}.{hint}" if path else f"{message}.{hint}"
