"""Requests of the three chat protocols to prompts, and an answer's tokens to chunks, through ``deepseek-recipe``.

The package knows DeepSeek's formats: how a conversation and its tools are written for the model, and where reasoning,
text and tool calls are in what it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import deepseek_recipe as recipe
import msgspec

from octavo.runtime.prompt import encode_converted
from octavo.runtime.server.bodies import Body
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.messages import Finished, Tokens
from octavo.runtime.server.service import Service

Generator = recipe.ChatCompletionChunkGenerator | recipe.ResponsesChunkGenerator | recipe.MessagesChunkGenerator

LARGE_TEXT = 1 << 16
"""Bytes of a body from which on its conversion would hold up other clients, and goes to a thread."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A request, converted and encoded."""

    request: recipe.ConversationRequest
    prompt: list[int]
    max_tokens: int
    """Of the answer: as asked for, else what is usual and fits."""

    @property
    def thinking(self) -> bool:
        """The answer begins with reasoning."""
        stage = self.request.parsing_options.thinking_initial_stage
        return stage is not None and stage.starts_in_reasoning()


@contextlib.contextmanager
def conversion_errors(body: Body) -> Iterator[None]:
    """What the package refuses is a 400; its field is the place in the body at which the message begins, if any."""
    try:
        yield
    except (recipe.ConversionError, ValueError, TypeError) as error:
        message = str(error)
        place = re.match(r"Invalid '?((\w+)[\w.\[\]]*)('| value,)", message)
        param = place[1] if place is not None and place[2] in body.__struct_fields__ else None
        raise ApiError(400, message, param=param) from None


def encode(service: Service, request: recipe.ConversationRequest) -> Conversation:
    """Write a converted request as the model's prompt, and settle how long its answer may be.

    Raises :class:`ApiError` if it holds images, or if prompt and answer do not fit.
    """
    prompt = encode_converted(service.tokenizer, request)
    if prompt.image_sources:
        raise ApiError(
            400, "Images are not understood yet: send text alone.", param=prompt.image_sources[0].path.lstrip(".")
        )
    room = service.max_model_len
    try:
        max_tokens = request.resolve_max_tokens(len(prompt.ids), room)
    except recipe.ConversionError as error:
        raise ApiError(400, str(error), param="messages", code="context_length_exceeded") from None
    if request.inference_options.max_tokens is None and service.config.default_max_tokens is not None:
        max_tokens = min(service.config.default_max_tokens, max(room - len(prompt.ids), 1))
    return Conversation(request=request, prompt=prompt.ids, max_tokens=max_tokens)


async def off_loop(work: Callable[[bytes], T], body: Body) -> T:
    """Do ``work`` on a body, as JSON, where it holds up nobody."""
    data = msgspec.json.encode(body)
    return await asyncio.to_thread(work, data) if len(data) >= LARGE_TEXT else work(data)


class AnswerParser:
    """Reads one answer as its tokens come, and gives out chunks of the generator's protocol.

    Stop strings are looked for here and not in the engine: they end the answer's text and not its reasoning.
    """

    def __init__(
        self, service: Service, conversation: Conversation, generator: Generator, ending: frozenset[int]
    ) -> None:
        self._processor = recipe.StreamProcessor(
            generator, conversation.request.parsing_options, service.answer_tokenizer
        )
        self._prompt_tokens = len(conversation.prompt)
        self._ending = ending

    @property
    def finished(self) -> bool:
        """The answer is complete: its end was told, or a stop string was found."""
        return self._processor.finished

    def begin(self) -> list[Any]:
        """What comes before the first token."""
        usage = recipe.PromptUsage(prompt_tokens=self._prompt_tokens)
        return self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage))

    def push(self, message: Tokens) -> list[Any]:
        """Add a token."""
        if message.token is None or self.finished:
            return []
        if message.token in self._ending:  # counts, but has no text
            return self._processor.push(recipe.InferenceChunk.text("", 1))
        logprobs = None if message.logprob is None else [(message.logprob.logprob, message.logprob.top)]
        return self._processor.push(recipe.InferenceChunk.tokens([message.token], logprobs))

    def finish(self, message: Finished) -> list[Any]:
        """The engine has ended the answer. Raises :class:`ApiError` if it failed."""
        if self.finished:
            return []
        stopped = finish_reason(message) == "stop"
        ending = recipe.InferenceFinishReason.Stop if stopped else recipe.InferenceFinishReason.Length
        return self._processor.push(recipe.InferenceChunk.finish(ending))


def finish_reason(message: Finished) -> Literal["stop", "length"]:
    """Why an answer ended, in words that every client knows: one that was cut short by time or an abort is cut short.

    Raises :class:`ApiError` if it failed.
    """
    if message.reason == "error":
        raise ApiError(500, f"The answer failed: {message.error}")
    return "stop" if message.reason == "stop" else "length"
