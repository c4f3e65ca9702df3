"""What the HTTP process and the engine process say to each other: typed messages, many to a frame.

Frames go both ways over one stream socket: a length of 4 bytes, little-endian, then a MessagePack array of messages.
This module imports no torch, as nothing in the HTTP process does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from octavo.runtime.sampling import SamplingParams

MOST_BYTES = 1 << 30
"""Of a frame; a longer one means that the two sides have lost each other."""

GrammarKind = Literal["json_object", "json_schema", "regex"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must match."""

    kind: GrammarKind
    source: str = ""
    """The schema as JSON text, or the regular expression."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer prompts. ``id`` names the request until its last answer has finished."""

    id: str
    prompts: list[list[int]]
    """Each gets ``n`` answers; the answers to the first come first in their numbering."""
    params: dict[str, Any]
    """Fields of :class:`SamplingParams` by name, without ``token_mask``."""
    grammar: Grammar | None = None
    thinking: bool = False
    """The answer begins with reasoning, to which the grammar does not apply."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request as it is; one that is not known has ended."""

    id: str
    index: int | None = None
    """Of one answer, in which its client's side has found a stop string: it alone ends, with reason ``stop``."""


class AskStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by :class:`Stats` with the same number."""

    number: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Abort what is left and end the process."""


class Starting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far the start is; ``total`` 0 is unknown."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests can be answered from now on."""

    description: str
    max_model_len: int
    max_requests: int
    vocab_size: int
    timeline: list[tuple[str, float]]
    """Phases of the start and their seconds."""


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log probability, and the likeliest tokens at its place."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step added to one answer of a request."""

    id: str
    index: int
    text: str
    token: int | None
    logprob: Logprob | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    """With an answer's first token, if asked for."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of one answer; its last :class:`Tokens` came before."""

    id: str
    index: int
    reason: Literal["stop", "length", "abort", "timeout", "error"]
    error: str | None
    answer_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request that cannot be answered, because of itself; nothing else comes for it."""

    id: str
    message: str


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``EngineBase.stats()``."""

    number: int
    stats: dict[str, Any]


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot answer any more, or could not start; the last message of its process."""

    reason: str
    exit_code: int
    """Of the command, if the engine could not start."""


ToEngine = Submit | Abort | AskStats | Stop
FromEngine = Starting | Ready | Tokens | Finished | Refused | Stats | Broken

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def frame(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    """Messages as they go over the socket."""
    body = _encoder.encode(messages)
    if len(body) > MOST_BYTES:
        raise ValueError(f"{len(messages)} messages take {len(body)} bytes; a frame has at most {MOST_BYTES}")
    return len(body).to_bytes(4, "little") + body


def for_engine(body: bytes) -> list[ToEngine]:
    """The messages of a frame without its length."""
    return _to_engine.decode(body)


def from_engine(body: bytes) -> list[FromEngine]:
    """The same in the other direction."""
    return _from_engine.decode(body)


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """The parameters of a :class:`Submit`. Raises :class:`UsageError` for a field or value that is wrong."""
    bias = {int(token): bias for token, bias in values.get("logit_bias", {}).items()}
    return SamplingParams(**(values | {"logit_bias": bias}))
