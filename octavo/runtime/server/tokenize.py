"""``POST /tokenize`` and ``/detokenize``: what the model would read, and what tokens say."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from octavo.runtime.server import openapi
from octavo.runtime.server.bodies import Body, Effort, Thinking
from octavo.runtime.server.chat import ChatBody, ChatMessage, Tool, convert_chat
from octavo.runtime.server.completions import encode_prompts
from octavo.runtime.server.conversion import off_loop
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.limits import read_json
from octavo.runtime.server.service import Service


class TokenizeBody(Body, kw_only=True):
    """Text as ``/v1/completions`` takes it, or messages as ``/v1/chat/completions`` does."""

    model: str | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | None = None
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[int]


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=openapi.body(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt, as the model would get them."""
        body = await read_json(request, TokenizeBody, service.config)
        service.check_model(body.model or service.model)
        tokens = await _tokens(body, service)
        answer = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.decode([token]) for token in tokens]
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.post("/detokenize", openapi_extra=openapi.body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids; bytes that are no whole characters read as U+FFFD."""
        body = await read_json(request, DetokenizeBody, service.config)
        service.check_model(body.model or service.model)
        text = service.tokenizer.decode(body.tokens)
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    return router


async def _tokens(body: TokenizeBody, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either a prompt or messages.", param="prompt")
    if body.prompt is not None:
        return (await encode_prompts([body.prompt], service))[0].ids
    assert body.messages is not None
    chat = ChatBody(
        model=service.model,
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        thinking=body.thinking,
        reasoning_effort=body.reasoning_effort,
    )
    return (await off_loop(lambda data: convert_chat(data, chat, service), chat)).prompt
