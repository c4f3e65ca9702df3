"""The OpenAPI document: bodies are described by their msgspec types, answers by what they can be."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

_REFERENCE = "#/components/schemas/{name}"
_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be answered; the error names the field.", "content": _JSON},
    "5XX": {"description": "The engine cannot answer.", "content": _JSON},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, whole or as server-sent events.",
        "content": _JSON | {"text/event-stream": {"schema": {"type": "string"}}},
    },
}


def body(kind: type) -> dict[str, Any]:
    """For a route's ``openapi_extra``: its body is a ``kind``."""
    schema = {"$ref": _REFERENCE.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, kinds: list[type]) -> None:
    """Have the application's document describe ``kinds``."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            _, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return plain()

    app.openapi = document  # type: ignore[method-assign]
