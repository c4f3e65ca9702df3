"""Who may ask: with ``--api-key`` every request brings one of the keys, except for what tells whether we live."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.runtime.server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/openapi.json"})
"""What shows nothing of anyone's requests: probes, scrapers and the page itself have no key."""


class Authentication:
    """ASGI middleware: refuses requests without a key, and leaves the key in ``request.state.owner``, else ``""``.

    A key comes as ``Authorization: Bearer KEY`` or, as Anthropic's clients send it, as ``x-api-key: KEY``.
    """

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            owner = self._owner(Headers(scope=scope)) if self._keys else ""
            if owner is None and scope["path"] not in OPEN_PATHS:
                error = ApiError(
                    401,
                    "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response(scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner or ""
        await self._app(scope, receive, send)

    def _owner(self, headers: Headers) -> str | None:
        """The key of a request, compared in constant time with every key that there is."""
        given = headers.get("x-api-key", "")
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = credentials.strip()
        matches = [key for key in self._keys if hmac.compare_digest(key.encode(), given.encode())]
        return matches[0] if matches else None
