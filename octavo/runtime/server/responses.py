"""``POST /v1/responses``: OpenAI's newer protocol. Nothing is kept between requests."""

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
from octavo.runtime.server.bodies import (
    Body,
    Count,
    Effort,
    Empty,
    JsonObjectFormat,
    Sampling,
    SchemaFormat,
    TextFormat,
    TopLogprobs,
    grammar_of,
    refuse_one_call,
    refuse_strict,
    sampling_of,
)
from octavo.runtime.server.conversion import AnswerParser, Conversation, conversion_errors, encode, off_loop
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.event_writer import EventWriter
from octavo.runtime.server.events import event
from octavo.runtime.server.limits import check_json, read_json
from octavo.runtime.server.service import Service


class InputText(Body, tag_field="type", tag="input_text"):
    text: str


class OutputText(Body, tag_field="type", tag="output_text"):
    text: str
    annotations: Empty | None = None
    logprobs: list[Any] | None = None
    """Has no effect, as in an answer that comes back."""


class InputImage(Body, tag_field="type", tag="input_image"):
    """Refused in words of its own, once the prompt is written."""

    image_url: str
    detail: str | None = None


class Item(Body, kw_only=True):
    id: str | None = None
    """Has no effect."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """Has no effect."""


class MessageItem(Item, kw_only=True, tag_field="type", tag="message"):
    """The type may be left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText | InputImage]
    phase: str | None = None
    """Has no effect."""


class FunctionCall(Item, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Item, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText | InputImage]


class ReasoningText(Body, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Item, kw_only=True, tag_field="type", tag="reasoning"):
    content: list[ReasoningText]
    summary: Empty | None = None
    encrypted_content: str | None = None
    """Has no effect: the content says it."""


class FunctionTool(Body, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class Reasoning(Body):
    effort: Effort | None = None


class Text(Body):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None


class ResponsesBody(Sampling, kw_only=True):
    """A request for a response."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Text, or items."""
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    """Has no effect."""
    metadata: dict[str, str] | None = None
    """Has no effect."""
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=openapi.body(ResponsesBody), responses=openapi.STREAMED)
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's responses."""
        body = await read_json(request, ResponsesBody, service.config)
        service.check_model(body.model)
        _refuse_unsupported(body)
        with_tools = bool(body.tools) and body.tool_choice != "none"
        form = body.text.format if body.text is not None else None
        grammar = grammar_of(form, "text.format", service.config, with_tools=with_tools)
        echo, conversation = await off_loop(lambda data: _convert(data, body, service), body)
        params = sampling_of(body, service.config) | {"max_tokens": conversation.max_tokens}
        if body.top_logprobs is not None:
            params["logprobs"] = body.top_logprobs
        name = f"resp_{secrets.token_hex(16)}"
        generator = recipe.ResponsesRequest.chunk_generator(conversation.request, name, service.model).with_echo(echo)
        parser = AnswerParser(service, conversation, generator, service.ending(params))
        whole = recipe.ResponsesResponse(name, service.model, int(time.time()), len(conversation.prompt), 0)
        stream = service.open(request, name, [conversation.prompt], params, grammar, thinking=conversation.thinking)
        return service.answer(stream, EventWriter(parser, whole, _error), streamed=bool(body.stream))

    return router


def _refuse_unsupported(body: ResponsesBody) -> None:
    if body.parallel_tool_calls is False:
        refuse_one_call("parallel_tool_calls")
    for name in ("store", "background"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: nothing is kept between requests.", param=name)
    if isinstance(body.input, list):
        items = [{"type": "message"} | item for item in body.input]
        check_json(items, list[MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem], "input")
    for index, tool in enumerate(body.tools or ()):
        refuse_strict(tool.strict, f"tools[{index}].strict")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "There are no tools to choose from.", param="tool_choice")


def _convert(data: bytes, body: ResponsesBody, service: Service) -> tuple[recipe.ResponsesEcho, Conversation]:
    with conversion_errors(body):
        protocol = recipe.ResponsesRequest(data)
        echo = protocol.echo()
        request = protocol.convert(conversion_options(service.model))
    return echo, encode(service, request)


def _error(error: ApiError, number: int) -> bytes:
    fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": number}
    return event(msgspec.json.encode({"type": "error"} | fields), "error")
