"""What requests may hold, in parts that several routes share. A field that is not here is refused by name.

Fields whose only allowed value says "not used" are there because clients send them without being asked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct

from octavo.errors import UsageError
from octavo.runtime.sampling import MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOPS
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.errors import ApiError
from octavo.runtime.server.grammar import check_grammar
from octavo.runtime.server.limits import check_schema
from octavo.runtime.server.messages import Grammar

StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Count = Annotated[int, Meta(ge=1)]
Empty = Annotated[list[Any], Meta(max_length=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything in a request: unknown fields are errors, absent ones travel no further."""


class Sampling(Body):
    """How an answer is drawn: OpenAI's fields, and those of :class:`~octavo.runtime.sampling.SamplingParams`."""

    temperature: float | None = None
    """1 unless given."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    timeout: float | None = None
    """Seconds; the server's own limit holds too."""


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None


class TextFormat(Body, tag_field="type", tag="text"):
    """Answers are free."""


class JsonObjectFormat(Body, tag_field="type", tag="json_object"):
    """Answers are JSON objects."""

    def grammar(self) -> Grammar:
        return Grammar(kind="json_object")


class JsonSchema(Body):
    """Answers match ``schema``. With ``strict`` the official rules for schemas hold too."""

    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body, tag_field="type", tag="json_schema"):
    """OpenAI's form for chat completions."""

    json_schema: JsonSchema

    def grammar(self) -> Grammar:
        return Grammar(kind="json_schema", source=bytes(self.json_schema.schema).decode())


class SchemaFormat(JsonSchema, tag_field="type", tag="json_schema"):
    """OpenAI's form for responses."""

    def grammar(self) -> Grammar:
        return Grammar(kind="json_schema", source=bytes(self.schema).decode())


class RegexFormat(Body, tag_field="type", tag="regex"):
    """Answers match a regular expression as a whole."""

    regex: str

    def grammar(self) -> Grammar:
        return Grammar(kind="regex", source=self.regex)


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]


def sampling_of(body: Body, config: ServerConfig) -> dict[str, Any]:
    """Fields of ``SamplingParams`` that a body gives, with the server's own default and limit."""
    names = [name for name in Sampling.__struct_fields__ if name in body.__struct_fields__]
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    timeout = min(given.get("timeout", config.request_timeout), config.request_timeout)
    return {"temperature": 1.0} | given | {"timeout": timeout}


def refuse_stream_options(options: StreamOptions | None, streamed: bool | None) -> None:
    """Raise :class:`ApiError` if they are given for an answer that is not streamed."""
    if options is not None and not streamed:
        raise ApiError(400, "stream_options goes with stream = true.", param="stream_options")


def refuse_one_call(param: str) -> NoReturn:
    """Nothing holds the model to one call at a time."""
    raise ApiError(400, "The model may always make several calls at once.", param=param)


def refuse_strict(strict: bool | None, param: str) -> None:
    """Raise :class:`ApiError` if a tool's arguments are to be held to its schema."""
    if strict:
        message = "Arguments are not held to the schema in sampling: send strict as false, or leave it out."
        raise ApiError(400, message, param=param)


def grammar_of(
    form: ResponseFormat | SchemaFormat | None, param: str, config: ServerConfig, *, with_tools: bool
) -> Grammar | None:
    """What an answer must match; ``param`` is the field's name. Raises :class:`ApiError` if nothing can match it."""
    if form is None or isinstance(form, TextFormat):
        return None
    if with_tools:
        raise ApiError(400, f"{param} cannot be enforced together with tools: send one of them.", param=param)
    grammar = form.grammar()
    check_schema(grammar.source, param, config)
    try:
        check_grammar(grammar)
    except UsageError as error:
        raise ApiError(400, str(error), param=param) from None
    return grammar
