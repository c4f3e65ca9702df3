"""Engram's tables and token map against the golden primes, multipliers, offsets, digests and ids."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from tokenizers import decoders, models

from octavo.errors import OctavoError
from octavo.model.config import TextConfig
from octavo.model.engram_hash import EngramHash, engram_hashes
from octavo.model.token_classes import pad_class, token_classes, token_map
from tests.tokenizer_data import GOLDENS, MINI, PUBLISHED, config, mini_backend, published_backend

REAL = json.loads((GOLDENS / "engram_real.json").read_text(encoding="utf-8"))
SMALL = json.loads((GOLDENS / "engram_mini.json").read_text(encoding="utf-8"))
REAL_TEXT = config(PUBLISHED).text_config
MINI_TEXT = config(MINI).text_config


def hash_ids(
    ids: Sequence[int], live: Sequence[bool], classes: Sequence[int], pad: int, engram: EngramHash
) -> list[list[int]]:
    """The definition in spec/model.md 3.11, one position after the other, in unbounded integers."""
    rows = []
    for position in range(len(ids)):
        history, broken = [], False
        for back in range(len(engram.multipliers)):
            broken = broken or position < back or not live[position - back]
            history.append(pad if broken else classes[ids[position - back]])
        mixed, row, column = history[0] * engram.multipliers[0], [], 0
        for order, primes in enumerate(engram.primes, start=1):
            product = history[order] * engram.multipliers[order]
            assert product < 2**63
            mixed ^= product
            for prime in primes:
                row.append(mixed % prime + engram.offsets[column])
                column += 1
        rows.append(row)
    return rows


@pytest.mark.parametrize(("text", "golden", "rows"), [(REAL_TEXT, REAL, None), (MINI_TEXT, SMALL, SMALL["table_rows"])])
def test_tables_are_the_golden_ones(text: TextConfig, golden: dict[str, Any], rows: list[int] | None) -> None:
    hashes = engram_hashes(text)
    assert [engram.layer_id for engram in hashes] == list(text.engram_layer_ids)
    assert [[list(primes) for primes in engram.primes] for engram in hashes] == golden["primes"]
    assert [list(engram.offsets) for engram in hashes] == golden["offsets"]
    assert [list(engram.multipliers) for engram in hashes] == golden["multipliers"]
    assert [engram.rows for engram in hashes] == (rows or list(text.engram_num_embeddings))


@pytest.fixture(scope="module")
def real_map() -> npt.NDArray[np.int64]:
    return token_map(published_backend(), REAL_TEXT)


def test_token_map_of_the_published_tokenizer(real_map: npt.NDArray[np.int64]) -> None:
    golden = REAL["token_map"]
    assert real_map.dtype == np.int64
    assert real_map.shape == (golden["length"],)
    assert int(real_map.max()) + 1 == golden["classes"]
    assert hashlib.sha256(real_map.astype("<i8").tobytes()).hexdigest() == golden["sha256_int64_le"]
    assert hashlib.sha256(real_map.astype("<i4").tobytes()).hexdigest() == golden["sha256_int32_le"]
    assert pad_class(real_map, REAL_TEXT) == REAL["pad_compressed"]


def test_token_map_of_the_mini_tokenizer() -> None:
    classes = token_map(mini_backend(), MINI_TEXT)
    np.testing.assert_array_equal(classes, np.load(MINI / "engram_token_map.npy"))
    assert pad_class(classes, MINI_TEXT) == SMALL["pad_compressed"]


@pytest.mark.parametrize("case", REAL["cases"], ids=lambda case: case["text"][:20])
def test_golden_hash_ids(case: dict[str, Any], real_map: npt.NDArray[np.int64]) -> None:
    classes = real_map.tolist()
    live = case.get("mask") or [True] * len(case["ids"])
    compressed = [classes[i] if alive else -1 for i, alive in zip(case["ids"], live, strict=True)]
    assert compressed == case["compressed"]
    pad = pad_class(real_map, REAL_TEXT)
    layers = [hash_ids(case["ids"], live, classes, pad, engram) for engram in engram_hashes(REAL_TEXT)]
    assert [list(position) for position in zip(*layers, strict=True)] == case["hash"]


def test_golden_hash_digest(real_map: npt.NDArray[np.int64]) -> None:
    golden, classes = REAL["digest_ids_0_3"], real_map.tolist()
    pad = pad_class(real_map, REAL_TEXT)
    layers = [hash_ids(golden["ids"], [True] * 2, classes, pad, engram) for engram in engram_hashes(REAL_TEXT)]
    array = np.array(layers, dtype="<i8").transpose(1, 0, 2)[None]
    assert list(array.shape) == golden["shape"]
    assert array[0].tolist() == REAL["input_0_3"]
    assert hashlib.sha256(array.tobytes()).hexdigest() == golden["sha256_int64_le"]


def test_largest_class_times_largest_multiplier_fits_int64() -> None:
    for text in (REAL_TEXT, MINI_TEXT):
        for engram in engram_hashes(text):
            assert all(m % 2 == 1 for m in engram.multipliers)
            assert max(engram.multipliers) * (text.engram_compressed_vocab_size - 1) < 2**63


def test_no_engram_layers_give_no_hashes() -> None:
    assert engram_hashes(dataclasses.replace(MINI_TEXT, engram_layer_ids=(), engram_num_embeddings=())) == ()


def test_wrong_row_count_is_named_with_both_values() -> None:
    text = dataclasses.replace(MINI_TEXT, engram_num_embeddings=(660, 863))
    with pytest.raises(OctavoError, match=r"engram_num_embeddings\[1\]: 863, .* sum to 864"):
        engram_hashes(text)


def test_wrong_class_count_is_named_with_both_values() -> None:
    text = dataclasses.replace(MINI_TEXT, engram_compressed_vocab_size=421)
    with pytest.raises(OctavoError, match=r"engram_compressed_vocab_size: 421, .* 420 classes"):
        token_map(mini_backend(), text)


def test_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(OctavoError, match=r"vocab_size: 511, .* up to 511"):
        token_classes(mini_backend(), 511)


def test_ids_without_a_token_share_one_class_at_the_end() -> None:
    classes = token_classes(mini_backend(), 515)
    np.testing.assert_array_equal(classes[:512], np.load(MINI / "engram_token_map.npy"))
    assert classes[512:].tolist() == [420] * 3


def test_classes_fold_case_accents_width_and_space() -> None:
    """Byte 0xE9 alone is no character: such tokens are told apart by their spelling."""
    words = ["a", "\u0120A", "\u00c3\u00a1", "\u00ef\u00bd\u0123", "\u0120", "\u010a\u0109", "\u00e9", "\u00e8", "b"]
    backend = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    decoded = [backend.decode([index]) for index in range(len(words))]
    assert decoded == ["a", " A", "\u00e1", "\uff41", " ", "\n\t", "\ufffd", "\ufffd", "b"]
    assert token_classes(backend, len(words)).tolist() == [0, 0, 0, 0, 1, 1, 2, 3, 4]
