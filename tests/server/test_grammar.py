"""Answers that must match a grammar do, whatever the model would say; what cannot be enforced is refused."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import pytest
import torch
from llguidance import LLMatcher

from octavo.errors import OctavoError, UsageError
from octavo.model.packaged import nano_path
from octavo.runtime.config import EngineConfig
from octavo.runtime.engine import Engine
from octavo.runtime.grammar_mask import GrammarMasks
from octavo.runtime.sampling import SamplingParams, TokenMask
from octavo.runtime.server.grammar import check_grammar
from octavo.runtime.server.messages import Grammar
from octavo.runtime.tokenizer import Tokenizer
from tests.conftest import ReportCount
from tests.server.random_schemas import Schema, draw_document
from tests.tokenizer_data import config, mini_tokenizer, published_tokenizer

SCHEMAS = 200
MOST_TOKENS = 400
CONFIG = config(nano_path())
EOS = CONFIG.eos_token_id
Choice = Callable[[list[int]], int]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(nano_path(), CONFIG)


@pytest.fixture(scope="module")
def masks(tokenizer: Tokenizer) -> GrammarMasks:
    return GrammarMasks(tokenizer, EOS)


def of_schema(schema: Schema) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


def allowed(mask: TokenMask, answer: Sequence[int]) -> list[int]:
    tokens = mask(answer)
    assert isinstance(tokens, torch.Tensor) and tokens.dtype == torch.bool
    found: list[int] = tokens.nonzero().flatten().tolist()
    return found


def write(mask: TokenMask, choose: Choice, most: int = MOST_TOKENS) -> tuple[list[int], bool]:
    """An answer of tokens that the mask allows -> (without its end, whether it came to one)."""
    answer: list[int] = []
    while len(answer) < most:
        token = choose(allowed(mask, answer))
        if token == EOS:
            return answer, True
        answer.append(token)
    return answer, False


def feed(mask: TokenMask, tokens: Sequence[int]) -> list[int]:
    """Say these tokens, each of which must be allowed -> what may follow."""
    for place, token in enumerate(tokens):
        assert token in allowed(mask, tokens[:place]), f"token {place} of {len(tokens)}: {token}"
    return allowed(mask, tokens)


def test_random_tokens_match_random_schemas(
    masks: GrammarMasks, tokenizer: Tokenizer, report_count: ReportCount
) -> None:
    """Tokens are drawn by chance from those allowed: the worst model. Validated by a library of other authors."""
    draw = random.Random(7)
    finished, tokens = 0, 0
    for _ in range(SCHEMAS):
        schema = draw_document(draw)
        check_grammar(of_schema(schema))
        answer, ended = write(masks.mask(of_schema(schema)), draw.choice)
        finished += ended
        tokens += len(answer)
        if ended:
            jsonschema_rs.validate(schema, json.loads(tokenizer.decode(answer)))
    assert finished >= 0.95 * SCHEMAS, f"{SCHEMAS - finished} answers did not come to an end"
    report_count("answers of random tokens that match their random schema", finished, f"of {SCHEMAS} answers")
    report_count("tokens drawn from grammar masks", tokens)


def test_octavo_nano_matches_random_schemas(long_form: bool, report_count: ReportCount) -> None:
    """The same through an engine, many at once; in short fewer and flat schemas, and the model's first layers."""
    draw = random.Random(8)
    schemas = [draw_document(draw, depth=3 if long_form else 1) for _ in range(SCHEMAS if long_form else 16)]
    prompt = [{"role": "user", "content": "Answer as JSON."}]
    layers = None if long_form else 2
    with Engine(
        EngineConfig(device="cpu", max_requests=32, kv_tokens=32 * 1024, graphs="off", layers=layers)
    ) as engine:
        masks = GrammarMasks(engine.tokenizer, engine.model_config.eos_token_id)
        params = [
            SamplingParams(max_tokens=MOST_TOKENS, temperature=1.0, seed=1, token_mask=masks.mask(of_schema(schema)))
            for schema in schemas
        ]
        results = engine.generate([prompt] * len(schemas), params)
    finished = 0
    for schema, result in zip(schemas, results, strict=True):
        assert result.finish_reason in ("stop", "length"), result.answers[0].error
        if result.finish_reason == "stop":
            finished += 1
            jsonschema_rs.validate(schema, json.loads(result.text))
    assert finished >= 0.95 * len(schemas), f"{len(schemas) - finished} answers did not come to an end"
    report_count("answers of octavo-nano that match their random schema", finished, f"of {len(schemas)} answers")


def test_objects_and_regular_expressions(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """A free object ends when its braces do; a regular expression holds for the whole answer."""
    draw = random.Random(1)
    brace = tokenizer.encode_text("{")
    mask = masks.mask(Grammar(kind="json_object"))
    assert tokenizer.decode(allowed(mask, [])).strip(" \n") == "{"
    assert EOS not in feed(mask, [*brace, *tokenizer.encode_text('"a":[1,{"b":null}]')])
    whole = masks.mask(Grammar(kind="json_object"))
    assert feed(whole, tokenizer.encode_text('{"a":[1,{"b":null}]}')) == [EOS], "nothing follows the last brace"
    for source in (r"[0-9]{3}-[0-9]{4}", "a/b|(é|日本){2,3}", r"\"[^\"]{1,5}\"", "^x?y$", "(?i)yes|no"):
        answer, ended = write(masks.mask(Grammar(kind="regex", source=source)), draw.choice)
        assert ended and re.fullmatch(source, tokenizer.decode(answer)), source


def test_blanks_have_an_end(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """A model that would rather write blanks than anything comes to an end all the same."""
    blank = {token for token in range(tokenizer.vocab_size) if not tokenizer.token_bytes(token).strip(b" \n\t\r")}
    draw = random.Random(2)

    def choose(tokens: list[int]) -> int:
        return draw.choice([token for token in tokens if token in blank] or tokens)

    nulls = {"type": "array", "items": {"type": "null"}, "maxItems": 2}
    schema = {"type": "object", "properties": {"a": nulls}, "required": ["a"], "additionalProperties": False}
    answer, ended = write(masks.mask(of_schema(schema)), choose)
    text = tokenizer.decode(answer)
    assert ended and json.loads(text)["a"] is not None and "\n " in text


@pytest.mark.parametrize("name", ["nano", "published"])
def test_reasoning_comes_first(masks: GrammarMasks, tokenizer: Tokenizer, name: str) -> None:
    """Any text, then the token that ends it, which nothing else can spell; only then the grammar, and the end."""
    if name == "published":
        tokenizer = published_tokenizer()
        masks = GrammarMasks(tokenizer, EOS)
    end = tokenizer.special_id("</think>")
    grammar = of_schema({"const": "é"})

    def after(*tokens: int) -> list[int]:
        return feed(masks.mask(grammar, thinking=True), tokens)

    reasoning = tokenizer.encode_text('Let me see. {"a": </thinking is ünlimited 日本 🐙')
    for said in ([], reasoning):
        free = after(*said)
        assert end in free and EOS not in free and len(free) > 0.8 * tokenizer.vocab_size
        assert [tokenizer.token_bytes(token)[:1] for token in after(*said, end)].count(b'"') == len(after(*said, end))
    spelled = after(*tokenizer.encode_text("</think"))
    assert end in spelled and not any(tokenizer.token_bytes(token).startswith(b">") for token in spelled)
    assert after(*reasoning, end, *tokenizer.encode_text('"é"')) == [EOS]
    assert end not in feed(masks.mask(grammar), tokenizer.encode_text('"')), "without reasoning it cannot be said"


@pytest.mark.parametrize("vocabulary", [mini_tokenizer, published_tokenizer])
def test_added_tokens_are_no_text(vocabulary: Callable[[], Tokenizer]) -> None:
    """Added tokens are spelled in characters that a string may hold, and ids without a token read as U+FFFD."""
    tokenizer = vocabulary()
    added = tokenizer.backend.get_added_tokens_decoder().keys()
    plain = set(tokenizer.backend.get_vocab(with_added_tokens=False).values()) - added
    tokens = feed(GrammarMasks(tokenizer, EOS).mask(of_schema({"type": "string"})), tokenizer.encode_text('"'))
    assert tokens and plain.issuperset(tokens) and len(plain) < tokenizer.vocab_size


def test_answers_to_one_prompt_share_a_hook(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """They grow in turn, at first alike; each is held to the grammar by itself."""
    draw = random.Random(3)
    schema = {"type": "array", "items": {"enum": ["ab", "ac", "b"]}, "minItems": 2, "maxItems": 4}
    mask = masks.mask(of_schema(schema), answers=5)
    open_answers: list[list[int]] = [[] for _ in range(5)]
    ended = []
    while open_answers:
        for answer in list(open_answers):
            token = draw.choice(allowed(mask, answer))
            if token == EOS:
                open_answers.remove(answer)
                ended.append(tokenizer.decode(answer))
            else:
                answer.append(token)
    assert len(ended) == 5 and len(set(ended)) > 1
    for text in ended:
        jsonschema_rs.validate(schema, json.loads(text))


REFUSED: list[tuple[Any, str]] = [
    *[({"properties": {"a": {name: {}}}}, name) for name in ("not", "if", "then", "contains", "propertyNames")],
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {"unevaluatedItems": False}}, "unevaluatedItems"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    ({"type": "string", "format": "colour"}, "colour"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"type": "string", "pattern": "a("}, "unclosed group"),
    ({"type": "text"}, "text"),
    ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
    ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "multipleOf": 99_999_999}, "multipleOf"),
    ({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}, "multipleOf"),
    ({"allOf": [{"type": "string", "pattern": f"(a|b)*b{{{n}}}(c|d)*$"} for n in range(1, 30)]}, "pattern"),
    ({"maxProperties": [["object"]], "properties": {"not": {"x" * 44: "é🐙🐙🐙🐙🐙"}}}, "json_schema"),
    ([], "JSON object"),
    (False, "JSON object"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_what_cannot_be_enforced_is_refused(schema: Any, named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        check_grammar(Grammar(kind="json_schema", source=json.dumps(schema)))


def test_sources_that_are_wrong(masks: GrammarMasks) -> None:
    """No JSON, too deep, no regular expression; and what only the engine can find: nothing matches."""
    for source, named in (('{"a', "not JSON"), ('{"items":' * 100_000, "not JSON"), ("NaN", "JSON object")):
        with pytest.raises(UsageError, match=named):
            check_grammar(Grammar(kind="json_schema", source=source))
    for source, named in (("a(", "unclosed group"), (r"(a)\1", "backreferences"), (r"\bword", "lookarounds")):
        with pytest.raises(UsageError, match=f"^regex: .*{named}"):
            check_grammar(Grammar(kind="regex", source=source))
    endless = of_schema({"$ref": "#"})
    check_grammar(endless)
    with pytest.raises(UsageError, match="cannot be enforced"):
        masks.mask(endless)


class PanicException(BaseException):
    """As what Rust raises is called, and what it is."""


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_panic_ends_its_answer_alone(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """Whenever it comes, it becomes an error of the one request, which the engine expects."""
    calls = 0

    class Panicking:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._matcher = LLMatcher(*arguments, **options)
            self.consume_token = self._matcher.consume_token
            self.is_error = self._matcher.is_error

        def deep_copy(self) -> Panicking:
            return self

        def compute_bitmask(self) -> bytes:
            nonlocal calls
            calls += 1
            if calls > good:
                raise PanicException("index out of bounds")
            return self._matcher.compute_bitmask()

    monkeypatch.setattr("octavo.runtime.grammar_mask.LLMatcher", Panicking)
    grammar = Grammar(kind="regex", source="a+")
    if good == 0:
        with pytest.raises(UsageError, match="regex: cannot be enforced: llguidance fails at it"):
            masks.mask(grammar)
        return
    mask = masks.mask(grammar)
    answer: list[int] = []
    for _ in range(good - 1):
        answer.append(allowed(mask, answer)[0])
    with pytest.raises(OctavoError, match="cannot go on"):
        mask(answer)


def test_checks_need_no_torch() -> None:
    """As they run in the HTTP process."""
    code = "import sys, octavo.runtime.server.grammar; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
