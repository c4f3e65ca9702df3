"""Encoding never yields added tokens, decoding is that of the Rust library, whole characters at a time."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import OctavoError, UsageError
from octavo.model.config import ModelConfig
from octavo.runtime.tokenizer import BEGIN_OF_SENTENCE, IMAGE, IncrementalDecoder, Tokenizer
from tests.conftest import ReportCount
from tests.tokenizer_data import MINI, config, mini_backend, mini_tokenizer, published_json, published_tokenizer


@pytest.fixture(scope="module", params=[published_tokenizer, mini_tokenizer], ids=["published", "mini"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = request.param()
    assert isinstance(made, Tokenizer)
    return made


def added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items()}


def incrementally(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join(map(decoder.push, ids)) + decoder.finish()


def test_every_added_token_in_a_text_is_encoded_as_plain_text(tokenizer: Tokenizer) -> None:
    added = added_tokens(tokenizer)
    assert len(added) >= 19
    for content in added.values():
        text = f"a {content}b"
        assert set(tokenizer.backend.encode(text).ids) & set(added), "the library itself would inject it"
        ids = tokenizer.encode_text(text)
        assert not set(ids) & set(added)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello, world!",
        "x" * 3000,
        "1234567 \u4f60\u597d\uff0c\u4e16\n\n\t caf\u00e9 \U0001f600",
        "\0\x7f\ufeff",
    ],
    ids=lambda text: repr(text[:9]),
)
def test_text_without_added_tokens_has_the_ids_of_the_library(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_text(text) == tokenizer.backend.encode(text).ids


@given(text=st.text(max_size=40))
def test_encoding_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == incrementally(tokenizer, ids) == text


def test_every_token_decodes_as_by_the_library(tokenizer: Tokenizer, report_count: ReportCount) -> None:
    expected = tokenizer.backend.decode_batch([[i] for i in range(tokenizer.vocab_size)], skip_special_tokens=False)
    assert [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)] == expected
    report_count("single ids decoded as by the library", tokenizer.vocab_size)


def test_id_sequences_decode_as_by_the_library(
    tokenizer: Tokenizer, report_count: ReportCount, long_form: bool
) -> None:
    """Partial characters are drawn often, so that most sequences hold broken UTF-8 and some whole characters."""
    generator, everything = random.Random(0), range(tokenizer.vocab_size)
    partial = [i for i in everything if "\ufffd" in tokenizer.decode([i])]
    count, broken, repaired = 100_000 if long_form else 3000, 0, 0
    for _ in range(count):
        ids = [generator.choice(partial if generator.random() < 0.6 else everything) for _ in range(12)]
        expected = tokenizer.backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == expected
        assert incrementally(tokenizer, ids) == expected
        broken += "\ufffd" in expected
        repaired += expected.count("\ufffd") < sum(tokenizer.decode([i]).count("\ufffd") for i in ids)
    assert broken > count / 2
    assert repaired > count / 20
    report_count("id sequences decoded as by the library", count)


def test_characters_are_emitted_whole(tokenizer: Tokenizer) -> None:
    text = "\U0001f9d1\u200d\U0001f680 \u0e01\u0e33 \u00e9"
    ids = tokenizer.encode_text(text)
    decoder, emitted, held_back = IncrementalDecoder(tokenizer), "", 0
    for token_id in ids:
        piece = decoder.push(token_id)
        held_back += not piece
        emitted += piece
        assert text.startswith(emitted)
    assert held_back > 0
    assert emitted == text
    assert decoder.finish() == ""


def test_unfinished_character_becomes_one_replacement_and_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    first = tokenizer.encode_text("\U0001f680")[0]
    assert tokenizer.token_bytes(first)[:1] == b"\xf0"
    assert decoder.push(first) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push(tokenizer.encode_text("a")[0]) + decoder.finish() == "a"


def test_added_tokens_are_their_text(tokenizer: Tokenizer) -> None:
    for token_id, content in added_tokens(tokenizer).items():
        assert tokenizer.token_bytes(token_id) == content.encode()
        assert tokenizer.special_id(content) == token_id
    with pytest.raises(OctavoError, match="no added token 'Hello'"):
        tokenizer.special_id("Hello")


def test_ids_outside_the_vocabulary() -> None:
    """Rows of the embedding that have no token are visible, what is not even a row is an error."""
    text = dataclasses.replace(config(MINI).text_config, vocab_size=520)
    tokenizer = Tokenizer(mini_backend(), dataclasses.replace(config(MINI), text_config=text))
    assert tokenizer.decode([512, 519]) == incrementally(tokenizer, [512, 519]) == "\ufffd\ufffd"
    for token_id in (-1, 520):
        with pytest.raises(UsageError, match=f"id {token_id} is outside the vocabulary: 0 to 519"):
            tokenizer.token_bytes(token_id)


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        mini_tokenizer().encode_text("a\ud800")


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json there"):
        Tokenizer.from_checkpoint(tmp_path, config(MINI))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe\x00"])
def test_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(OctavoError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_checkpoint(tmp_path, config(MINI))


def test_tokenizer_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(published_json(), encoding="utf-8")
    with pytest.raises(OctavoError, match=r"tokenizer\.json: .*ids up to 129279, but text_config.vocab_size is 512"):
        Tokenizer.from_checkpoint(tmp_path, config(MINI))


@pytest.mark.parametrize(("key", "content"), [("bos_token_id", BEGIN_OF_SENTENCE), ("image_token_id", IMAGE)])
def test_special_ids_of_the_config_are_those_of_the_tokenizer(key: str, content: str) -> None:
    changed: dict[str, Any] = {**config(MINI).to_dict(), key: 300}
    with pytest.raises(OctavoError, match=f"{key} is 300 .*added token '{content}'"):
        Tokenizer(mini_backend(), ModelConfig.from_dict(changed))


def test_tokenizer_that_could_lose_text_is_refused() -> None:
    data = json.loads(mini_backend().to_str())
    data["model"]["vocab"] = {token: i for token, i in data["model"]["vocab"].items() if token != "Z"}
    data["model"]["merges"] = [merge for merge in data["model"]["merges"] if "Z" not in "".join(merge)]
    with pytest.raises(OctavoError, match="1 are missing"):
        Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), config(MINI))
    data = json.loads(mini_backend().to_str()) | {"decoder": None}
    with pytest.raises(OctavoError, match="not byte-level"):
        Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), config(MINI))
