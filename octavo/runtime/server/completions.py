"""``POST /v1/completions``: text or token ids to continue, without any template."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import UsageError
from octavo.runtime.server import openapi
from octavo.runtime.server.bodies import (
    Count,
    ResponseFormat,
    Sampling,
    Stops,
    StopText,
    StreamOptions,
    TopLogprobs,
    grammar_of,
    refuse_stream_options,
    sampling_of,
)
from octavo.runtime.server.conversion import LARGE_TEXT, finish_reason
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.events import DONE, error_event, event
from octavo.runtime.server.limits import check_answers, read_json
from octavo.runtime.server.messages import Finished, Logprob, Tokens
from octavo.runtime.server.service import Service
from octavo.runtime.token_ids import check_prompt_ids
from octavo.runtime.tokenizer import IncrementalDecoder, Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, which clients of this route count on."""
MOST_PROMPTS = 256
"""Of one request."""


Choice = dict[str, Any]


class CompletionBody(Sampling, kw_only=True):
    """A request for a completion."""

    model: str
    prompt: str | list[int | str | list[int]]
    """Text, token ids, or a list of either: one prompt each."""
    max_tokens: Count | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Stops | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    """Begin the answer with the prompt."""
    response_format: ResponseFormat | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    user: str | None = None
    """Has no effect."""


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=openapi.body(CompletionBody), responses=openapi.STREAMED)
    async def completions(request: Request) -> Response:
        """Continue text or token ids, in OpenAI's form."""
        body = await read_json(request, CompletionBody, service.config)
        service.check_model(body.model)
        check_answers(body.n or 1, service.config)
        refuse_stream_options(body.stream_options, body.stream)
        grammar = grammar_of(body.response_format, "response_format", service.config, with_tools=False)
        prompts = await encode_prompts(_each(body.prompt), service)
        params = sampling_of(body, service.config) | {"n": body.n or 1}
        params["max_tokens"] = _max_tokens(body, max(len(prompt.ids) for prompt in prompts), service)
        if body.stop is not None:
            params["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if body.logprobs is not None:
            params["logprobs"] = body.logprobs
            if body.echo:
                params["prompt_logprobs"] = body.logprobs
        name = f"cmpl-{secrets.token_hex(16)}"
        writer = CompletionWriter(service, body, name, prompts)
        stream = service.open(request, name, [prompt.ids for prompt in prompts], params, grammar)
        return service.answer(stream, writer, streamed=bool(body.stream))

    return router


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt."""

    ids: list[int]
    shown: list[int]
    """Those that the client sent: without the beginning of sentence that text gets."""
    text: str | None
    """If the client sent text."""


def _each(prompt: str | list[Any]) -> list[Any]:
    """The prompts of a request."""
    if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
        return [prompt]
    if len(prompt) > MOST_PROMPTS:
        raise ApiError(400, f"There are {len(prompt)} prompts; {MOST_PROMPTS} are allowed.", param="prompt")
    return prompt


async def encode_prompts(prompts: list[Any], service: Service) -> list[Prompt]:
    """Prompts as text or token ids, where that holds up nobody. Raises :class:`ApiError` that names the field."""
    if any(isinstance(prompt, int) or not prompt for prompt in prompts):
        message = "A prompt is text or a list of token ids, with at least one character or token id."
        raise ApiError(400, message, param="prompt")

    def encode() -> list[Prompt]:
        return [_encode(prompt, service) for prompt in prompts]

    return await asyncio.to_thread(encode) if sum(map(len, prompts)) >= LARGE_TEXT else encode()


def _encode(prompt: str | list[int], service: Service) -> Prompt:
    if isinstance(prompt, str):
        ids = service.tokenizer.encode_text(prompt)
        return Prompt([service.model_config.bos_token_id, *ids], ids, prompt)
    try:
        check_prompt_ids(prompt, service.model_config)
    except UsageError as error:
        raise ApiError(400, str(error), param="prompt") from None
    return Prompt(prompt, prompt, None)


def _max_tokens(body: CompletionBody, prompt_tokens: int, service: Service) -> int:
    room = service.max_model_len - prompt_tokens
    max_tokens = body.max_tokens or min(service.config.default_max_tokens or DEFAULT_MAX_TOKENS, max(room, 1))
    if max_tokens > room:
        message = (
            f"The prompt has {prompt_tokens} tokens and the answer may have {max_tokens}; together there is room for "
            f"{service.max_model_len}."
        )
        raise ApiError(400, message, param="max_tokens" if room > 0 else "prompt", code="context_length_exceeded")
    return max_tokens


class CompletionWriter:
    """Chunks and whole answers of a completion. A piece is a choice as OpenAI has it."""

    def __init__(self, service: Service, body: CompletionBody, name: str, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self._n = body.n or 1
        self._decode = service.tokenizer.decode
        self._echo = bool(body.echo)
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        answers = len(prompts) * self._n
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": service.model}
        self._logprobs = [_Logprobs(service.tokenizer) for _ in range(answers)]
        self._choices = [_choice(index, "") for index in range(answers)]
        self._begun: set[int] = set()
        self._answer_tokens = 0

    def begin(self) -> list[Choice]:
        return []

    def push(self, message: Tokens) -> list[Choice]:
        index, text = message.index, message.text
        entries: list[tuple[int, Logprob | None]] = []
        if self._echo and index not in self._begun:
            self._begun.add(index)
            prompt = self._prompts[index // self._n]
            text = (self._decode(prompt.shown) if prompt.text is None else prompt.text) + text
            if message.prompt_logprobs is not None:
                entries += zip(prompt.shown, message.prompt_logprobs[-len(prompt.shown) :], strict=True)
        if message.logprob is not None:
            entries.append((message.logprob.id, message.logprob))
        if not text and not entries:
            return []
        return [_choice(index, text, self._logprobs[index].add(entries) if entries else None)]

    def stopped(self, index: int) -> bool:
        """Stop strings are the engine's."""
        return False

    def finish(self, message: Finished) -> list[Choice]:
        reason = finish_reason(message)
        self._answer_tokens += message.answer_tokens
        return [_choice(message.index, "", finish_reason=reason)]

    def frame(self, piece: Choice) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return event(msgspec.json.encode(self._head | {"choices": [piece]} | usage))

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(msgspec.json.encode(self._head | {"choices": [], "usage": self._usage()})) + DONE

    def take(self, piece: Choice) -> None:
        whole = self._choices[piece["index"]]
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            if whole["logprobs"] is None:
                whole["logprobs"] = {name: [] for name in piece["logprobs"]}
            for name, entries in piece["logprobs"].items():
                whole["logprobs"][name] += entries

    def whole(self) -> bytes:
        return msgspec.json.encode(self._head | {"choices": self._choices, "usage": self._usage()})

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _usage(self) -> dict[str, int]:
        prompt, answer = sum(len(prompt.ids) for prompt in self._prompts), self._answer_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class _Logprobs:
    """OpenAI's older form of log probabilities, of one answer as it grows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._offset = 0

    def add(self, entries: list[tuple[int, Logprob | None]]) -> dict[str, list[Any]]:
        """Tokens with what is known of each; the first of a prompt has nothing before it."""
        offsets = []
        for token, _ in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token))
        return {
            "tokens": [self._name(token) for token, _ in entries],
            "token_logprobs": [entry and entry.logprob for _, entry in entries],
            "top_logprobs": [entry and {self._name(id): value for id, value in entry.top} for _, entry in entries],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token's text; its bytes where they are no whole characters."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _choice(
    index: int, text: str, logprobs: dict[str, list[Any]] | None = None, finish_reason: str | None = None
) -> Choice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
