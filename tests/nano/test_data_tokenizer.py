"""The packaged tokenizer: made by its script, official special tokens, digits and known words single tokens."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.model.packaged import nano_path, packaged_file
from octavo.model.token_classes import token_classes
from octavo.runtime.prompt import encode_request
from octavo.runtime.suites import words
from octavo.runtime.tokenizer import BEGIN_OF_SENTENCE, END_OF_SENTENCE
from tests.nano.nano_data import nano_backend, nano_tokenizer
from tests.tokenizer_data import GOLDENS, published_backend
from tools.train_nano.train_tokenizer import FIRST, TEMPLATE, VOCABULARY, configuration, train

RENDERED = [
    case for case in json.loads((GOLDENS / "encoding.json").read_text(encoding="utf-8"))["cases"] if "ids" in case
]
KNOWN = [
    *(words.FIRST_NAMES + words.LAST_NAMES + words.PLACES + words.COLOURS + words.BIRDS + words.TREES + words.STONES),
    *(words.CRAFTS + words.POSSESSIONS + words.COUNTED + words.ADJECTIVES + words.NOUNS + words.PLACED + words.BESIDE),
]


def test_packaged_files_are_what_the_script_makes() -> None:
    packaged = json.loads((nano_path() / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(train().to_str()) == packaged
    assert json.loads((nano_path() / "tokenizer_config.json").read_text(encoding="utf-8")) == configuration()


def test_ids_and_flags_of_special_tokens() -> None:
    backend, published = nano_backend(), published_backend().get_added_tokens_decoder()
    assert backend.get_vocab_size() == VOCABULARY <= 2048 and VOCABULARY % 32 == 0
    assert [backend.token_to_id(token) for token in FIRST] == [0, 1, 2]
    assert [backend.token_to_id(token) for token in TEMPLATE] == list(range(VOCABULARY - len(TEMPLATE), VOCABULARY))
    flags = {token.content: token for token in published.values()}
    own = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in FIRST + TEMPLATE:
        assert own[content].special == flags[content].special
        assert own[content].normalized == flags[content].normalized
    assert flags[BEGIN_OF_SENTENCE].special and not flags["<think>"].special, "both kinds are there"
    published_file = json.loads(packaged_file("released", "tokenizer.json"))
    assert backend.token_to_id(END_OF_SENTENCE) == 1 and published_file["added_tokens"][1]["content"] == END_OF_SENTENCE


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: case["name"])
def test_official_prompts_can_be_encoded(case: dict[str, object]) -> None:
    request = case["request"]
    assert isinstance(request, dict)
    prompt = encode_request(nano_tokenizer(), request)
    assert nano_tokenizer().decode(prompt.ids) == prompt.text
    assert prompt.ids[0] == 0 and prompt.ids[-1] in {nano_tokenizer().special_id(t) for t in ("<think>", "</think>")}


def test_every_known_word_is_one_token() -> None:
    assert len(KNOWN) == len(set(KNOWN)) > 400
    for word in KNOWN:
        assert len(nano_tokenizer().encode_text(f" {word}")) == 1, word


def test_digits_are_single_tokens() -> None:
    encode, decode = nano_tokenizer().encode_text, nano_tokenizer().decode
    assert [decode([i]) for i in encode("Start with 175.")] == ["Start", " with", " 1", "7", "5", "."]
    for number in range(1000):
        assert len(encode(str(number))) == len(encode(f" {number}")) == len(str(number))


def test_engram_classes_join_case_and_space() -> None:
    classes = token_classes(nano_backend(), VOCABULARY)
    assert int(classes.max()) + 1 == 1722, "engram_compressed_vocab_size of the nano configuration"
    (spaced,), (plain,) = nano_tokenizer().encode_text(" The"), nano_tokenizer().encode_text("The")
    (small,) = nano_tokenizer().encode_text(" the")
    assert classes[spaced] == classes[plain] == classes[small]
    (four,), (spaced_four,) = nano_tokenizer().encode_text("4"), nano_tokenizer().encode_text(" 4")
    assert classes[four] == classes[spaced_four] != classes[plain]


@given(text=st.text() | st.lists(st.sampled_from([" ", "4", "a", "\n", "-", "(", "The"]), max_size=12).map("".join))
def test_any_text_comes_back(text: str) -> None:
    if not re.search("[\ud800-\udfff]", text):
        assert nano_tokenizer().decode(nano_tokenizer().encode_text(text)) == text
