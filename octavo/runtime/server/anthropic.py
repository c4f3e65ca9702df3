"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's protocol."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

import deepseek_recipe as recipe
import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from octavo.runtime.prompt import conversion_options
from octavo.runtime.server import openapi
from octavo.runtime.server.bodies import Body, Count, Empty, Stops, refuse_one_call, sampling_of
from octavo.runtime.server.conversion import AnswerParser, Conversation, conversion_errors, encode, off_loop
from octavo.runtime.server.errors import MESSAGES_PATH, ApiError
from octavo.runtime.server.event_writer import EventWriter
from octavo.runtime.server.events import event
from octavo.runtime.server.limits import read_json
from octavo.runtime.server.service import Service


class CacheControl(Body, kw_only=True):
    """Says what to keep for later requests; has no effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class MessagesTool(Body, kw_only=True):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Body, kw_only=True):
    """``any`` is not supported: only that the model may call, must not, or must call one function."""

    type: Literal["auto", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBudget(Body, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """A wish: how long the model reasons follows from ``output_config.effort``, and ``max_tokens`` bounds it."""


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class TextBlock(Body, tag_field="type", tag="text"):
    text: str
    citations: Empty | None = None
    cache_control: CacheControl | None = None


class ImageBlock(Body, tag_field="type", tag="image"):
    """Refused in words of its own, once the prompt is written."""

    source: dict[str, Any]
    cache_control: CacheControl | None = None


class ThinkingBlock(Body, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None
    """Has no effect."""


class ToolUse(Body, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResult(Body, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    """Has no effect: the model reads it from the content."""
    cache_control: CacheControl | None = None


class FromUser(Body, tag_field="role", tag="user"):
    content: str | list[TextBlock | ImageBlock | ToolResult]


class FromAssistant(Body, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUse]


class MessagesPrompt(Body, kw_only=True):
    """What the prompt of a message is made of."""

    model: str
    messages: Annotated[list[FromUser | FromAssistant], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingBudget | None = None
    output_config: OutputConfig | None = None


class MessagesBody(MessagesPrompt, kw_only=True):
    """A request for a message."""

    max_tokens: Count
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    metadata: dict[str, str] | None = None
    """Has no effect."""


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post(MESSAGES_PATH, openapi_extra=openapi.body(MessagesBody), responses=openapi.STREAMED)
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        body = await read_json(request, MessagesBody, service.config)
        _check(body, service)
        conversation = await off_loop(lambda data: _convert(data, body, service), body)
        params = sampling_of(body, service.config) | {"max_tokens": conversation.max_tokens}
        name = f"msg_{secrets.token_hex(16)}"
        generator = recipe.MessagesRequest.chunk_generator(conversation.request, name, service.model)
        parser = AnswerParser(service, conversation, generator, service.ending(params))
        whole = recipe.MessagesResponse(name, service.model, int(time.time()), len(conversation.prompt), 0)
        stream = service.open(request, name, [conversation.prompt], params, thinking=conversation.thinking)
        return service.answer(stream, EventWriter(parser, whole, _error), streamed=bool(body.stream))

    @router.post(f"{MESSAGES_PATH}/count_tokens", openapi_extra=openapi.body(MessagesPrompt))
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a message has."""
        body = await read_json(request, MessagesPrompt, service.config)
        _check(body, service)
        conversation = await off_loop(lambda data: _convert(data, body, service), body)
        return Response(msgspec.json.encode({"input_tokens": len(conversation.prompt)}), media_type="application/json")

    return router


def _check(body: MessagesPrompt, service: Service) -> None:
    service.check_model(body.model)
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        refuse_one_call("tool_choice.disable_parallel_tool_use")


def _convert(data: bytes, body: MessagesPrompt, service: Service) -> Conversation:
    with conversion_errors(body):
        request = recipe.MessagesRequest(data).convert(conversion_options(service.model))
    return encode(service, request)


def _error(error: ApiError, number: int) -> bytes:
    return event(msgspec.json.encode(error.anthropic()), "error")
