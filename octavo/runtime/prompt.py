"""Chat messages to prompt ids, through the official ``deepseek-recipe`` package.

The package converts and renders; it also says which parts of the prompt are template tokens. Those are looked up by
their text, everything between them is encoded as plain text, so no message can inject a token.
Source: spec/model.md 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import deepseek_recipe as recipe

from octavo.errors import UsageError
from octavo.runtime.tokenizer import IMAGE, Tokenizer

Effort = Literal["low", "high", "max"]
"""How thoroughly to reason: 50, 75 and 100 of 100."""

# The package's own spelling of the image placeholder is not the published tokenizer's.
_SPELLINGS = recipe.SpecialTokens(image=IMAGE)
_ENCODING = recipe.DeepseekV41Encoding().with_special_tokens(_SPELLINGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A rendered request."""

    text: str
    ids: list[int]
    """One id for each image, whatever its size."""
    image_sources: list[recipe.ImageSource]
    """The images, in the order of their ids in ``ids``."""
    request: recipe.ConversationRequest
    """The converted request: sampling options, and how the answer is to be parsed."""


def encode_request(tokenizer: Tokenizer, request: Mapping[str, Any]) -> ChatPrompt:
    """Encode the body of an OpenAI-style chat completion request (spec/model.md 5).

    ``model`` may be any name. Keys unknown to ``deepseek-recipe`` are ignored.
    Raises :class:`UsageError` if the request is not valid, :class:`OctavoError` if the tokenizer lacks a token.
    """
    try:
        body = recipe.ChatCompletionRequest(dict(request))
        converted = body.convert(conversion_options(body.model))
    except (recipe.ConversionError, ValueError, TypeError) as error:
        raise UsageError(f"The chat request is not valid: {error}") from error
    return encode_converted(tokenizer, converted)


def conversion_options(model: str) -> recipe.ConversionOptions:
    """How requests for ``model``, whatever its name is, are converted: as the released model's."""
    options = recipe.ConversionOptions().with_special_tokens(_SPELLINGS)
    return options.with_model_versions_by_name({model: recipe.ModelVersion.DeepseekV41Flash})


def encode_converted(tokenizer: Tokenizer, request: recipe.ConversationRequest) -> ChatPrompt:
    """Encode a converted request of any protocol. Raises :class:`OctavoError` if the tokenizer lacks a token."""
    rendered = _ENCODING.render_conversation(request.conversation)
    return ChatPrompt(
        text=rendered.prompt,
        ids=_encode(tokenizer, rendered),
        image_sources=rendered.image_sources,
        request=request,
    )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Iterable[Mapping[str, Any]],
    *,
    thinking: bool = True,
    effort: Effort | None = None,
) -> list[int]:
    """Encode OpenAI-style messages (``role``, ``content``, ...) up to where the assistant's answer begins.

    ``effort`` needs ``thinking`` and is "high" unless given. Raises :class:`UsageError` for what is not valid.
    """
    request: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [dict(message) for message in messages],
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    if effort is not None:
        if effort not in get_args(Effort) or not thinking:
            raise UsageError(f"effort {effort!r}: one of {', '.join(get_args(Effort))}, and only with thinking.")
        request["reasoning_effort"] = effort
    prompt = encode_request(tokenizer, request)
    if prompt.image_sources:
        raise UsageError("The messages hold an image. Images are not understood yet: send text alone.")
    return prompt.ids


def _encode(tokenizer: Tokenizer, rendered: recipe.RenderedPrompt) -> list[int]:
    prompt, ids, position = rendered.prompt, [], 0
    for start, end in rendered.special_ranges:
        ids += tokenizer.encode_text(prompt[position:start])
        ids.append(tokenizer.special_id(prompt[start:end]))
        position = end
    return ids + tokenizer.encode_text(prompt[position:])
