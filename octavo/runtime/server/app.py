"""The HTTP application: its routes, and the layers that a request passes on its way to them."""

from __future__ import annotations

from pathlib import Path

import deepseek_recipe as recipe
from fastapi import FastAPI

from octavo import __version__
from octavo.model.config import ModelConfig
from octavo.runtime.server import anthropic, chat, completions, errors, openapi, page, responses, tokenize
from octavo.runtime.server.access_log import AccessLog
from octavo.runtime.server.auth import Authentication
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.engine_interface import EngineClient
from octavo.runtime.server.limits import HeaderLimit
from octavo.runtime.server.metrics import Metrics
from octavo.runtime.server.service import Service
from octavo.runtime.server.status import AbortBody, status_router
from octavo.runtime.tokenizer import Tokenizer

_BODIES: list[type] = [
    AbortBody,
    chat.ChatBody,
    completions.CompletionBody,
    responses.ResponsesBody,
    anthropic.MessagesBody,
    anthropic.MessagesPrompt,
    tokenize.TokenizeBody,
    tokenize.DetokenizeBody,
]


def create_app(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    *,
    model: str,
    dump_dir: Path | None,
) -> FastAPI:
    """The application over an engine, which is served as ``model``; the page at ``/`` links its dump's report."""
    metrics = Metrics(model)
    service = Service(
        config=config,
        client=client,
        tokenizer=tokenizer,
        answer_tokenizer=recipe.Tokenizer.from_str(tokenizer.backend.to_str()),
        model_config=model_config,
        model=model,
    )
    # No pages for people: those that FastAPI makes load scripts from elsewhere.
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None)
    for module in (chat, completions, responses, anthropic, tokenize):
        app.include_router(module.routes(service), responses=openapi.FAILURES)
    app.include_router(status_router(config, client, metrics, model), responses=openapi.FAILURES)
    app.include_router(page.routes(dump_dir))
    errors.install(app)
    openapi.install(app, _BODIES)
    # The last one added is the first that a request meets.
    app.add_middleware(errors.Failures)
    app.add_middleware(Authentication, keys=config.api_key)
    app.add_middleware(HeaderLimit, most_bytes=config.max_header_bytes)
    app.add_middleware(AccessLog, metrics=metrics, decode=tokenizer.decode if config.log_prompts else None)
    return app
