"""JSON schemas drawn at random from what answers can be held to: nesting, enum, oneOf, pattern, bounds, Unicode.

Everything is bounded, so that a model that draws tokens by chance comes to an end.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "größe", "值", "a b", 'quo"te', "🐙", "back\\slash", "count", "inner", "")
TEXTS = ("red", "grün", "青い", "🐙🦑", 'say "so"', "a\nb", "tab\there", "", "null", "0")
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z][a-zé]{0,5}-[0-9]{2}$",
    r"^\d{4}-\d{2}$",
    "^(yes|no|vielleicht)$",
    "^[äöü日本]{2,4}$",
    r"^\w{1,5}@\w{1,5}\.(com|org)$",
    '^"?[a-c]*"$',
)


def draw_schema(draw: random.Random, depth: int) -> Schema:
    """``depth`` bounds how far arrays and objects nest; from 1 on the outermost schema is one of them."""
    plain = (_string, _pattern, _format, _integer, _number, _enum, _const, _some_type)
    nested = (_object, _object, _object, _array, _tuple, _one_of, _any_of, _all_of, _link)
    return draw.choice(nested)(draw, depth - 1) if depth > 0 else draw.choice(plain)(draw)


def _inner(draw: random.Random, depth: int) -> Schema:
    """Often shallower than it may be."""
    return draw_schema(draw, draw.choice((0, depth, depth)))


def _string(draw: random.Random) -> Schema:
    shortest = draw.randrange(4)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + draw.randrange(12)}


def _pattern(draw: random.Random) -> Schema:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(("date", "uuid", "ipv4"))}


def _integer(draw: random.Random) -> Schema:
    low = draw.randrange(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "maximum": low + draw.choice((0, 7, 900))}
    return schema | draw.choice(({}, {"multipleOf": 1}, {"exclusiveMaximum": low + 1}))


def _number(draw: random.Random) -> Schema:
    return {"type": "number", "exclusiveMinimum": -1.5, "maximum": draw.choice((0, 2.25, 1000)), "multipleOf": 0.01}


def _enum(draw: random.Random) -> Schema:
    return {"enum": draw.sample([*TEXTS, 1, -2.5, True, None, [1, "x"], {"k": "v"}], draw.randrange(1, 6))}


def _const(draw: random.Random) -> Schema:
    return {"const": draw.choice([*TEXTS, 12, False])}


def _some_type(draw: random.Random) -> Schema:
    return {"type": draw.sample(("null", "boolean"), draw.randrange(1, 3)), "description": "of one of these types"}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _inner(draw, depth) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    shortest = draw.randrange(3)
    return {
        "type": "array",
        "items": _inner(draw, depth),
        "minItems": shortest,
        "maxItems": shortest + draw.randrange(3),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    first = [_inner(draw, depth) for _ in range(draw.randrange(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _one_of(draw: random.Random, depth: int) -> Schema:
    """Exactly one applies: each kind has its own constant."""
    kinds = draw.sample(TEXTS[:4], draw.randrange(2, 4))
    return {"oneOf": [_tagged(draw, kind, depth) for kind in kinds]}


def _tagged(draw: random.Random, kind: str, depth: int) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, "value": _inner(draw, depth)},
        "required": ["kind", "value"],
        "additionalProperties": False,
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_inner(draw, depth) for _ in range(draw.randrange(1, 4))]}


def _all_of(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(100)
    return {"allOf": [{"type": "integer"}, {"minimum": low}, {"maximum": low + depth + 1}]}


def _link(draw: random.Random, depth: int) -> Schema:
    return {"$ref": "#/$defs/link"}


def draw_document(draw: random.Random, depth: int = 3) -> Schema:
    """A whole schema, with what its parts refer to: a chain of links, which refer to themselves."""
    following = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]}
    link = {"type": "object", "properties": {"next": following}, "required": ["next"], "additionalProperties": False}
    return {"$defs": {"link": link}} | draw_schema(draw, depth)
