"""Routes about the server itself: /health, /metrics, /stats, /abort, /v1/models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from octavo.runtime.server import openapi
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.engine_interface import EngineClient, EngineGone, NotReady
from octavo.runtime.server.errors import RETRY_SECONDS, ApiError
from octavo.runtime.server.limits import read_json
from octavo.runtime.server.metrics import Metrics

_SCRAPE_SECONDS = 5.0
"""A step may take longer, and a scrape not wait for it: its own numbers are told without the engine's."""


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /abort``."""

    id: str
    """Of an answer, as its response has it."""


def status_router(config: ServerConfig, client: EngineClient, metrics: Metrics, model: str) -> APIRouter:
    """The routes; ``model`` is the name under which it is served."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/health")
    async def health() -> Response:
        """200 if requests are taken, else 503 with the phase; asks no step and no rank."""
        state = client.state
        body: dict[str, Any] = {"status": state.phase, "model": model, "detail": state.detail}
        if state.phase == "starting":
            body |= {"done": state.done, "total": state.total}
        if state.phase == "ready":
            return JSONResponse(body)
        return JSONResponse(body, 503, headers={"Retry-After": str(RETRY_SECONDS)})

    @router.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus' text format."""
        stats = None
        with contextlib.suppress(NotReady, EngineGone, TimeoutError):
            stats = await asyncio.wait_for(client.stats(), _SCRAPE_SECONDS)
        return Response(metrics.render(client.state, stats), media_type=CONTENT_TYPE_LATEST)

    @router.get("/stats")
    async def show_stats() -> Response:
        """The engine's counters since its start, and what is in use now."""
        stats = await client.stats()
        ready = client.state.ready
        assert ready is not None, "an engine that counts has started"
        body = {"model": model, "phase": client.state.phase, "engine": msgspec.structs.asdict(ready), "stats": stats}
        return Response(msgspec.json.encode(body), media_type="application/json")

    @router.post("/abort", openapi_extra=openapi.body(AbortBody))
    async def abort(request: Request) -> Response:
        """End an answer as it is; its client gets what there is, with finish reason ``length``."""
        body = await read_json(request, AbortBody, config)
        if not client.abort(body.id, request.state.owner):
            raise ApiError(404, f"No answer {body.id!r} is in work under this key.", param="id")
        return JSONResponse({"id": body.id, "aborted": True})

    def card() -> dict[str, Any]:
        ready = client.state.ready
        length = ready.max_model_len if ready is not None else None
        return {"id": model, "object": "model", "created": created, "owned_by": "octavo", "max_model_len": length}

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that there is."""
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The same by its name."""
        if name != model:
            raise ApiError(404, f"The model {name!r} does not exist; there is {model!r}.", code="model_not_found")
        return JSONResponse(card())

    return router
