"""Training batches: the official format, weights on answers alone, no evaluation item, the same in every process."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from octavo.runtime.prompt import Effort, encode_chat
from octavo.runtime.suites import arithmetic, facts, recall
from octavo.runtime.suites.base import split_of
from octavo.runtime.suites.words import BIRDS, COLOURS, FIRST_NAMES, LAST_NAMES, POSSESSIONS, STONES, TREES
from tests.conftest import ReportCount
from tests.nano.nano_data import nano_tokenizer
from tools.train_nano import english
from tools.train_nano.corpus import KINDS, Corpus
from tools.train_nano.render import ChatFormat, Conversation, PieceEncoder

PAD = 2
VALUES = (*COLOURS, *BIRDS, *TREES, *STONES)
"""First words of the records' values."""
PROJECT = Path(__file__).parents[2]
USER, ASSISTANT, END = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"


def texts() -> list[str]:
    rng = Random(0)
    items = [arithmetic.draw(rng) for _ in range(500)] + [facts.draw(rng) for _ in range(500)]
    items += [facts.single(rng) for _ in range(200)] + [recall.item(0, i, traced=i % 2 == 0) for i in range(20)]
    found = [text for item in items for text in (item.question, item.response, item.final, f" {item.final}")]
    return (
        found + list(english.sentences()) + ["Reasoning (1-100, the higher)\n\n", "a  b", "x\n 4", "don't - stop", ""]
    )


def test_pieces_concatenate_to_what_the_tokenizer_gives(report_count: ReportCount) -> None:
    encoder, tokenizer = PieceEncoder(nano_tokenizer()), nano_tokenizer()
    for text in texts():
        assert encoder.encode(text) == tokenizer.encode_text(text), text
    report_count("texts encoded in pieces", len(texts()))


def test_pieces_cut_elsewhere_would_be_other_ids() -> None:
    text = texts()[0]
    assert [i for word in text.split() for i in nano_tokenizer().encode_text(word)] != nano_tokenizer().encode_text(
        text
    )


TURNS = [("What is 14 + 23?", "14 + 23 = 37."), ("Who are you?", "I am small."), ("Name the bird of Velmor.", "heron.")]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("system", ["", "You are a helpful assistant."])
@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
def test_conversation_is_the_official_prompt(count: int, system: str, effort: Effort | None) -> None:
    """The prompt of the last turn; in thinking mode the format drops the reasoning of the turns before."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    conversation = Conversation(ChatFormat(nano_tokenizer()), effort, system)
    for question, answer in TURNS[: count - 1]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        conversation.user(question)
        if effort is None:
            conversation.answer("never said", "", answer)
        else:
            conversation.history(answer)
    question, answer = TURNS[count - 1]
    messages.append({"role": "user", "content": question})
    conversation.user(question)
    conversation.answer("a thought", "a step.", answer)
    prompt = encode_chat(nano_tokenizer(), messages, thinking=effort is not None, effort=effort)
    assert conversation.ids[: len(prompt)] == prompt
    said = "a thought</think>" + answer if effort else "a step. " + answer
    assert nano_tokenizer().decode(conversation.ids[len(prompt) :]) == said + END
    assert conversation.weights[len(prompt) :] == [1.0] * (len(conversation.ids) - len(prompt))
    if effort is not None or count == 1:
        assert not any(conversation.weights[: len(prompt)])


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str) -> None:
    tokenizer, length = nano_tokenizer(), KINDS[kind][1]
    ids, weights = Corpus(tokenizer).batch(kind, 40, length, step=3)
    assert ids.shape == weights.shape == (40, length) and ids.dtype == np.int64 and weights.dtype == np.float32
    assert (ids[:, 0] == 0).all() and not weights[ids == PAD].any() and set(np.unique(weights)) == {0.0, 1.0}
    assert (ids != PAD).mean() > 0.7 and weights.mean() > 0.1
    thinking = 0
    for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        row, weight = row[: row.index(PAD) if PAD in row else length], np.array(weight)
        text = tokenizer.decode(row)
        assert text.endswith(END) and text.count(USER) == text.count(ASSISTANT) == text.count(END)
        learned = "".join(tokenizer.decode([i]) for i, w in zip(row, weight, strict=False) if w)
        shown = re.findall(rf"{re.escape(ASSISTANT)}(?:<think>|</think>)(.*?{re.escape(END)})", text)
        dropped = "<think>" in text and text.count("<think>") < len(shown)
        assert learned == ("".join(shown) if not dropped else shown[-1])
        thinking += "<think>" in text
    assert 2 <= thinking <= 20


def test_batches_are_a_function_of_their_arguments() -> None:
    first, used = Corpus(nano_tokenizer(), seed=1), Corpus(nano_tokenizer(), seed=1)
    used.batch("facts", 2, 128, 0)
    for kind in KINDS:
        ids, weights = first.batch(kind, 4, 256, 7)
        again = used.batch(kind, 4, 256, 7)
        assert (ids == again[0]).all() and (weights == again[1]).all()
        others = [first.batch(kind, 4, 256, 8), Corpus(nano_tokenizer(), seed=2).batch(kind, 4, 256, 7)]
        assert all((ids != other).any() for other, _ in others)


def test_another_process_makes_the_same_batches() -> None:
    """Worker processes hash strings differently each time; nothing may depend on that."""
    code = (
        "import zlib; from tests.nano.nano_data import nano_tokenizer; "
        "from tools.train_nano.corpus import KINDS, Corpus; "
        "print([zlib.crc32(Corpus(nano_tokenizer()).batch(kind, 3, 256, 1)[0].tobytes()) for kind in KINDS])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=PROJECT, timeout=60
    )
    batches = [Corpus(nano_tokenizer()).batch(kind, 3, 256, 1)[0] for kind in KINDS]
    assert done.stdout.strip() == str([zlib.crc32(ids.tobytes()) for ids in batches]), done.stderr


def contents(text: str) -> list[str]:
    """What the questions of a conversation ask, read from its answers' steps."""
    found = []
    for question, answer in re.findall(rf"{re.escape(USER)}(.*?){re.escape(ASSISTANT)}(.*?){re.escape(END)}", text):
        if start := re.search(r"Start with (\d+)\.", answer):
            steps = re.findall(r"\. \d+ ([-+*]) (\d+) =", answer)
            found.append(start[1] + "".join(f"{sign}{number}" for sign, number in steps))
        elif pair := re.fullmatch(r"[\w ]+ the (\w+ of \w+) and the (\w+ of \w+)[.?]", question):
            found.append(f"{pair[1]}, {pair[2]}")
        elif asked := re.search(rf"(What is|Name) the ({'|'.join(POSSESSIONS)}) of (\w+ \w+)[?.]$", question):
            kind = "recall" if asked[1] == "What is" else "trace"
            link = re.search(rf"{asked[3]} is with (\w+ \w+) now\.", text)
            value = re.findall(r"The answer is ([\w ]+)\.", answer)[0]
            found.append(f"{kind}, {asked[2]}, {asked[3]}, {link[1] if link else None}, {value}")
    return found


def test_no_evaluation_item_is_trained(report_count: ReportCount) -> None:
    corpus, total = Corpus(nano_tokenizer()), 0
    for kind in ("arithmetic", "facts", "mixed", "recall", "trace"):
        ids, _ = corpus.batch(kind, 300, 256, 11)
        found = [c for row in ids.tolist() for c in contents(nano_tokenizer().decode(i for i in row if i != PAD))]
        assert len(found) > 300 and {split_of(content) for content in found} == {"train"}, kind
        total += len(found)
    report_count("trained questions", total)


def test_the_reader_of_questions_sees_an_evaluation_item() -> None:
    records = [recall.item(0, index, traced=traced) for index in range(20) for traced in (False, True)]
    assert len({(item.direct, ", None, " in item.content) for item in records}) == 4, "with and without a link"
    for item in (arithmetic.item(0, 0), facts.item(0, 0), *records):
        (content,) = contents(f"{USER}{item.question}{ASSISTANT}{item.response}{END}")
        assert content == item.content and split_of(content) == "evaluate"


def test_recall_rows_with_one_question_are_like_evaluation() -> None:
    ids, _ = Corpus(nano_tokenizer()).batch("recall", 40, 1024, 5)
    texts = [nano_tokenizer().decode(i for i in row if i != PAD) for row in ids.tolist()]
    single = [text for text in texts if text.count(USER) == 1]
    assert 4 <= len(single) <= 24 and max(text.count(USER) for text in texts) > 8
    for text in single:
        assert len(nano_tokenizer().encode_text(text.partition(USER)[2])) > 900


@functools.cache
def word(token: int) -> str:
    return nano_tokenizer().decode([token]).strip()


def record_starts(ids: list[int]) -> list[int]:
    """Positions where the records of a conversation's first user message begin."""
    words = [word(token) for token in ids]
    words = words[: words.index(ASSISTANT)]
    starts = [
        at
        for at, (first, last, value) in enumerate(zip(words, words[1:], words[2:], strict=False))
        if first in FIRST_NAMES and last in LAST_NAMES and value in (*VALUES, "is")
    ]
    written = re.findall(r"\w+ \w+ (?:\w+ \d\d|is with \w+ \w+ now)\.", nano_tokenizer().decode(ids[: len(words)]))
    assert len(starts) == len(written), "the tokens show as many records as the text"
    assert len(starts) >= 4, "the first question comes with its context"
    return starts


def share_entries(starts: list[int]) -> bool:
    """Each last name is at an even position and the first token of what follows at the odd one behind it."""
    return all(start % 2 == 1 and (start + 1) // 2 == (start + 2) // 2 for start in starts)


def prompt_of(question: str, thinking: bool) -> list[int]:
    return encode_chat(nano_tokenizer(), [{"role": "user", "content": question}], thinking=thinking)


@pytest.mark.parametrize(("tokens", "count"), [(1000, 40), (4000, 10)])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_records_of_evaluation_start_at_odd_positions(
    tokens: int, count: int, traced: bool, thinking: bool, report_count: ReportCount
) -> None:
    start = recall.THINKING_START if thinking else recall.CHAT_START
    items = [recall.item(0, index, tokens=tokens, traced=traced, start=start) for index in range(count)]
    prompts = [prompt_of(item.question, thinking) for item in items]
    assert {[word(token) for token in prompt].index(USER) + 1 for prompt in prompts} == {start}
    found = [record_starts(prompt) for prompt in prompts]
    assert all(map(share_entries, found)) and sum(map(len, found)) > count * tokens / 30
    report_count("records at odd positions", sum(map(len, found)))


@pytest.mark.parametrize("kind", ["recall", "trace"])
def test_records_of_training_start_at_odd_positions(kind: str, report_count: ReportCount) -> None:
    corpus, plain, thinking, total = Corpus(nano_tokenizer()), 0, [], 0
    for length, rows in ((128, 200), (256, 60), (512, 40), (1024, 40), (4096, 20)):
        for row in corpus.batch(kind, rows, length, step=1)[0].tolist():
            starts = record_starts(row)
            assert share_entries(starts), length
            begin = [word(token) for token in row].index(USER) + 1
            if "<think>" in map(word, row):
                thinking.append(begin)
            else:
                assert begin == recall.CHAT_START
                plain += 1
            total += len(starts)
    assert plain > 200 and len(thinking) > 60
    assert {begin % 2 for begin in thinking} == {0, 1}, "prompts that ask for effort need either opener"
    report_count("records at odd positions", total)


@pytest.mark.parametrize("start", [recall.CHAT_START - 1, recall.CHAT_START + 1])
def test_a_context_for_another_start_has_them_at_even_positions(start: int) -> None:
    for index in range(20):
        starts = record_starts(prompt_of(recall.draw_context(Random(index), 500, 64, start).text, thinking=False))
        assert not any(share_entries([at]) for at in starts)


def test_rows_too_short_for_a_turn_are_refused() -> None:
    with pytest.raises(ValueError, match="no room for a turn"):
        Corpus(nano_tokenizer()).batch("arithmetic", 1, 16, 0)


@pytest.mark.parametrize("kind", ["recall", "mixed"])
def test_a_core_makes_batches_faster_than_a_gpu_needs_them(kind: str) -> None:
    """About 2 million tokens/s where nothing else runs; processor time, so that others on the machine do not count."""
    corpus = Corpus(nano_tokenizer())
    corpus.batch(kind, 8, 1024, 0)
    began = time.process_time()
    corpus.batch(kind, 64, 1024, 1)
    assert 64 * 1024 / (time.process_time() - began) > 300_000


def test_traces_ask_for_two_records_as_often_as_for_one() -> None:
    ids, _ = Corpus(nano_tokenizer()).batch("trace", 60, 512, 2)
    asked = [content for row in ids.tolist() for content in contents(nano_tokenizer().decode(i for i in row if i != 2))]
    direct = [content.split(", ")[3] == "None" for content in asked]
    assert len(asked) > 300 and 0.4 < sum(direct) / len(direct) < 0.7
    assert all(content.startswith("trace") for content in asked)
