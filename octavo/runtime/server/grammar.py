"""What an answer must match, compiled for llguidance: checked in the HTTP process, enforced in the engine's.

Nothing here knows a vocabulary; :mod:`octavo.runtime.grammar_mask` puts a compiled grammar onto one.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from octavo.errors import OctavoError, UsageError
from octavo.runtime.server.messages import Grammar

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Of one answer's grammar: a state takes 1 to 2 kB. Errors hold no part of an answer."""

MAX_MULTIPLE = 10_000
MAX_COMBINED_PATTERNS = 8

_JSON_OPTIONS = {
    "x-guidance": {
        # Nothing, a space, or a new line with an indent: a model that could write blanks without end sometimes would.
        "whitespace_pattern": r"( |\n {0,32})",
        "coerce_one_of": False,
        "lenient": False,
    }
}
# No end of reasoning may be spelled in characters: whoever reads the answer's text could not tell it from the token.
_REASONING = r"/(?s:.*)/ & ~/(?s:.*)<\/think>(?s:.*)/"


def check_grammar(grammar: Grammar) -> None:
    """Raise :class:`UsageError` for a grammar that no answer can be held to: it is wrong, too large or unsupported."""
    compiled = compile_grammar(grammar)
    # It panics when it cuts a message inside a character.
    with panics_raise(unusable(grammar, "a keyword has a value of the wrong type")):
        failed, messages = LLMatcher.validate_grammar_with_warnings(compiled, limits=LIMITS)
    if failed:
        raise unusable(grammar, messages[0])


@contextlib.contextmanager
def panics_raise(error: OctavoError) -> Iterator[None]:
    """Raise ``error`` if llguidance panics: what it raises then is no :class:`Exception`, and would end the engine."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        raise error from None


def compile_grammar(grammar: Grammar, think_end: int | None = None) -> str:
    """The grammar in llguidance's form.

    With ``think_end``, the token that ends reasoning, the answer begins with reasoning of any text and this token.
    Raises :class:`UsageError` if the source is not JSON or configures llguidance itself.
    """
    answer = _regex(grammar.source) if grammar.kind == "regex" else {"json_schema": _schema(grammar)}
    if think_end is None:
        return json.dumps({"grammars": [answer]})
    reasoned = f"start: REASONING <[{think_end}]> @answer\nREASONING: {_REASONING}"
    return json.dumps({"grammars": [{"lark_grammar": reasoned}, {"name": "answer", **answer}]})


def unusable(grammar: Grammar, message: str) -> UsageError:
    """What to raise for llguidance's message, which may quote the grammar around its one sentence."""
    found = re.search(r"^error: (.*)", message, re.MULTILINE)
    reason = found[1] if found else re.sub(r"^at \d+\(\d+\): ", "", message.split("\n")[0])
    return UsageError(f"{grammar.kind}: cannot be enforced: {reason}")


def _regex(source: str) -> dict[str, Any]:
    grammars: list[dict[str, Any]] = json.loads(LLMatcher.grammar_from_regex(source))["grammars"]
    return {"lark_grammar": grammars[0]["lark_grammar"]}


def _schema(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"type": "object"} | _JSON_OPTIONS
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"json_schema: the schema is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UsageError("json_schema: the schema must be a JSON object, or true")
    if "x-guidance" in schema:
        raise UsageError("json_schema: x-guidance is not supported: remove it")
    _check_cost(list(_objects(schema)))
    return schema | _JSON_OPTIONS


def _check_cost(objects: list[dict[str, Any]]) -> None:
    """Raise :class:`UsageError` for what takes exponential time, which the limits of llguidance do not count."""
    multiples = [_fraction(one["multipleOf"]) for one in objects if "multipleOf" in one]
    unit = math.lcm(*(multiple.denominator for multiple in multiples))
    if math.lcm(*(int(multiple * unit) for multiple in multiples)) > MAX_MULTIPLE:
        raise UsageError(
            "json_schema: multipleOf: the least common multiple of all values in a schema must be at most "
            f"{MAX_MULTIPLE} of the smallest decimal place that they use"
        )
    patterns = sum(len(one.keys() & {"pattern", "format"}) for one in objects)
    combined = any(
        "allOf" in one or len(one.keys() & {"pattern", "format", "$ref", "anyOf", "oneOf"}) > 1 for one in objects
    )
    if combined and patterns > MAX_COMBINED_PATTERNS:
        raise UsageError(
            f"json_schema: {patterns} uses of pattern and format: a schema that puts several on one value, by allOf or "
            f"$ref, may have at most {MAX_COMBINED_PATTERNS} in all"
        )


def _fraction(value: object) -> Fraction:
    """A number of a schema; 1 for what is none, about which llguidance complains."""
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    return Fraction(str(value)) if is_number else Fraction(1)


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """All JSON objects in a value."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)
