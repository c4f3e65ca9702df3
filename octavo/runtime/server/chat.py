"""``POST /v1/chat/completions``."""

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
    ResponseFormat,
    Sampling,
    Stops,
    StopText,
    StreamOptions,
    Thinking,
    TopLogprobs,
    grammar_of,
    refuse_one_call,
    refuse_stream_options,
    refuse_strict,
    sampling_of,
)
from octavo.runtime.server.conversion import (
    AnswerParser,
    Conversation,
    conversion_errors,
    encode,
    off_loop,
)
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.events import DONE, error_event, event
from octavo.runtime.server.limits import check_answers, read_json
from octavo.runtime.server.messages import Finished, Tokens
from octavo.runtime.server.service import Service

Piece = tuple[int, recipe.ChatCompletionChunk]


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made earlier."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class ImageUrl(Body):
    url: str
    detail: str | None = None


class TextPart(Body, tag_field="type", tag="text"):
    text: str


class ImagePart(Body, tag_field="type", tag="image_url"):
    """Refused in words of its own, once the prompt is written."""

    image_url: ImageUrl


Content = str | list[TextPart | ImagePart]


class SystemMessage(Body, tag_field="role", tag="system"):
    content: Content


class UserMessage(Body, tag_field="role", tag="user"):
    content: Content


class AssistantMessage(Body, tag_field="role", tag="assistant"):
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None
    """Go on from this message, the last one."""
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Empty | None = None


class ToolMessage(Body, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str


class LatestReminder(Body, tag_field="role", tag="latest_reminder"):
    content: str


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage | LatestReminder


class ChatBody(Sampling, kw_only=True):
    """A request for a chat completion."""

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Stops | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    """Has no effect."""
    metadata: dict[str, str] | None = None
    """Has no effect."""
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=openapi.body(ChatBody), responses=openapi.STREAMED)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, in OpenAI's form."""
        body = await read_json(request, ChatBody, service.config)
        service.check_model(body.model)
        check_answers(body.n or 1, service.config)
        _refuse_unsupported(body)
        with_tools = bool(body.tools) and body.tool_choice != "none"
        grammar = grammar_of(body.response_format, "response_format", service.config, with_tools=with_tools)
        conversation = await off_loop(lambda data: convert_chat(data, body, service), for_conversion(body))
        params = sampling_of(body, service.config) | {"max_tokens": conversation.max_tokens, "n": body.n or 1}
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        name = f"chatcmpl-{secrets.token_hex(16)}"
        writer = ChatWriter(service, conversation, body, name, service.ending(params))
        stream = service.open(request, name, [conversation.prompt], params, grammar, thinking=conversation.thinking)
        return service.answer(stream, writer, streamed=bool(body.stream))

    return router


def _refuse_unsupported(body: ChatBody) -> None:
    if body.parallel_tool_calls is False:
        refuse_one_call("parallel_tool_calls")
    if body.store:
        raise ApiError(400, "Answers are not stored.", param="store")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens says otherwise: send one of them.", param="max_completion_tokens")
    refuse_stream_options(body.stream_options, body.stream)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs = true.", param="top_logprobs")
    for index, tool in enumerate(body.tools or ()):
        refuse_strict(tool.function.strict, f"tools[{index}].function.strict")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "There are no tools to choose from.", param="tool_choice")


def for_conversion(body: ChatBody) -> ChatBody:
    """The body as ``deepseek-recipe`` knows it: with one answer, one name for the most tokens, and no seed, of which it
    knows fewer."""
    max_tokens = body.max_tokens or body.max_completion_tokens
    return msgspec.structs.replace(body, n=None, seed=None, max_tokens=max_tokens, max_completion_tokens=None)


def convert_chat(data: bytes, body: ChatBody, service: Service) -> Conversation:
    """Convert and encode ``data``, which is ``body`` as JSON. Raises :class:`ApiError`."""
    with conversion_errors(body):
        request = recipe.ChatCompletionRequest(data).convert(conversion_options(service.model))
    return encode(service, request)


class ChatWriter:
    """Chunks and whole answers of a chat completion. A piece is the number of an answer, and a chunk of it."""

    def __init__(
        self, service: Service, conversation: Conversation, body: ChatBody, name: str, ending: frozenset[int]
    ) -> None:
        request, model = conversation.request, service.model
        answers = range(body.n or 1)
        self._parsers = [
            AnswerParser(
                service, conversation, recipe.ChatCompletionRequest.chunk_generator(request, name, model), ending
            )
            for _ in answers
        ]
        created, prompt_tokens = int(time.time()), len(conversation.prompt)
        self._whole = [recipe.ChatCompletionResponse(name, model, created, prompt_tokens, 0) for _ in answers]
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._usages: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}

    def begin(self) -> list[Piece]:
        return [(index, chunk) for index, parser in enumerate(self._parsers) for chunk in parser.begin()]

    def push(self, message: Tokens) -> list[Piece]:
        return [(message.index, chunk) for chunk in self._parsers[message.index].push(message)]

    def stopped(self, index: int) -> bool:
        return self._parsers[index].finished

    def finish(self, message: Finished) -> list[Piece]:
        return [(message.index, chunk) for chunk in self._parsers[message.index].finish(message)]

    def frame(self, piece: Piece) -> bytes:
        """The package numbers no answers, and adds usage to the last chunk, where OpenAI has a chunk for it."""
        index, chunk = piece
        data = chunk.to_json().encode()
        if index == 0 and not self._parsers[index].finished:
            return event(data)
        fields = msgspec.json.decode(data)
        fields["choices"][0]["index"] = index
        usage = fields.pop("usage", None)
        if usage is not None:
            self._usages.append(usage)
        if self._include_usage:
            fields["usage"] = None
        self._last = fields
        return event(msgspec.json.encode(fields))

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(msgspec.json.encode(self._last | {"choices": [], "usage": _total(self._usages)})) + DONE

    def take(self, piece: Piece) -> None:
        index, chunk = piece
        self._whole[index].accumulate(chunk)

    def whole(self) -> bytes:
        if len(self._whole) == 1:
            return self._whole[0].to_json().encode()
        bodies = [msgspec.json.decode(whole.to_json()) for whole in self._whole]
        choices = [body["choices"][0] | {"index": index} for index, body in enumerate(bodies)]
        usage = _total([body["usage"] for body in bodies])
        return msgspec.json.encode(bodies[0] | {"choices": choices, "usage": usage})

    def error(self, error: ApiError) -> bytes:
        return error_event(error)


def _total(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several answers to one prompt, which counts once."""
    total = dict(usages[0])
    total["completion_tokens"] = sum(usage["completion_tokens"] for usage in usages)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    details = [usage["completion_tokens_details"] for usage in usages if "completion_tokens_details" in usage]
    if details:
        total["completion_tokens_details"] = {"reasoning_tokens": sum(each["reasoning_tokens"] for each in details)}
    return total
