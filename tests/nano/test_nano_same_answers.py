"""octavo-nano gives the same token ids however it is run: replayed or not, in chunks, alone or among others.

Mode ``reference`` promises equality bit by bit, so each answer is the same tokens. Unlike random weights, which are
all but indifferent to the entries that an indexer picks, this model would answer otherwise; that is shown at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from octavo import Engine, EngineConfig, SamplingParams
from octavo.model.packaged import nano_path
from octavo.runtime.prompt import encode_chat
from octavo.runtime.suites import arithmetic, facts, recall
from octavo.runtime.suites.base import Item
from tests.conftest import ReportCount
from tests.nano.nano_data import nano_tokenizer
from tools.train_nano.ablations import ablations, broken_kernels

PARAMS = SamplingParams(max_tokens=64)
QUICK: dict[str, dict[str, Any]] = {
    "replayed, chunks of 64": {"graphs": "on", "chunk": 64, "buckets": "1,8,64"},
    "eager, chunks of 333": {"graphs": "eager", "chunk": 333, "buckets": "1,8,64"},
    "poison, chunks of 64": {"graphs": "poison", "chunk": 64, "buckets": "1,8,64"},
    "two ranks, chunks of 333": {"graphs": "on", "chunk": 333, "buckets": "1,8,64,167", "ranks": 2},
}
"""Each way differs from :data:`BASE` in everything that it names, so that few engines cover all."""
LONG: dict[str, dict[str, Any]] = {
    f"{mode}, chunk {chunk}, {requests} at once": {
        "graphs": mode,
        "chunk": chunk,
        "max_requests": requests,
        "buckets": "1,8,16,64" if chunk == 64 else "1,8,16,64,333",
    }
    for mode, chunk, requests in itertools.product(("on", "eager", "off", "poison"), (64, 333, 8192), (1, 16))
} | {f"{ranks} ranks": {"graphs": "on", "chunk": 1024, "ranks": ranks} for ranks in (2, 4)}
BASE: dict[str, Any] = {"graphs": "off", "max_requests": 16}


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts with what they ask and the ids of their answers, as the plain engine gives them."""

    items: tuple[Item, ...]
    prompts: tuple[list[int], ...]
    answers: list[list[int]]


def few_steps(count: int) -> list[Item]:
    """Problems of one step: their answers are short, and every token costs a step."""
    drawn = (arithmetic.item(0, index) for index in itertools.count())
    return list(itertools.islice((item for item in drawn if item.reasoning.count(". ") == 1), count))


def items_of(long_form: bool) -> tuple[Item, ...]:
    """The first three are one of each suite."""
    found = [few_steps(1)[0], facts.item(0, 0), recall.item(0, 0, tokens=300)]
    more = 6 if long_form else 3
    found += few_steps(more)[1:] + [facts.item(0, index) for index in range(1, more)]
    if long_form:
        found += [arithmetic.item(0, index) for index in range(3)]
        found += [recall.item(0, index, tokens=300) for index in range(1, 3)] + [recall.item(0, 0, tokens=1000)]
    return tuple(found)


def ask(prompts: Sequence[list[int]], changes: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
    """Answers and the engine's counters."""
    with Engine(EngineConfig(device="cpu", kv_tokens=8192, **BASE | changes)) as engine:
        results = engine.generate(prompts, PARAMS)
        return [result.ids for result in results], engine.stats()


@pytest.fixture(scope="module")
def asked(long_form: bool) -> Asked:
    items = items_of(long_form)
    tokenizer = nano_tokenizer()
    prompts = tuple(
        encode_chat(tokenizer, [{"role": "user", "content": item.question}], thinking=False) for item in items
    )
    answers, stats = ask(prompts, {})
    assert not stats["replays"]
    right = sum(tokenizer.decode(ids).startswith(item.response) for item, ids in zip(items, answers, strict=True))
    assert right >= 0.9 * len(items), "equal answers are worth something if they are answers"
    return Asked(items, prompts, answers)


@pytest.mark.parametrize("way", [*QUICK, *(pytest.param(way, marks=pytest.mark.soak) for way in LONG)])
def test_the_way_of_running_changes_no_answer(way: str, asked: Asked, report_count: ReportCount) -> None:
    changes = (QUICK | LONG)[way]
    answers, stats = ask(asked.prompts, changes)
    assert answers == asked.answers
    replayed, steps = sum(stats["replays"].values()), stats["steps"]
    assert (replayed > steps / 2) == (changes["graphs"] in ("on", "poison")), "it ran as it should"
    if changes["chunk"] == 64 and replayed:
        assert replayed == steps and stats["replays"][64] >= 5, "chunks and single rows alike"
    report_count("answers equal to the plain engine's", len(answers), "octavo-nano, bitwise")


def test_company_changes_no_answer(asked: Asked, report_count: ReportCount) -> None:
    """One of each suite, one after the other: each is alone in its steps."""
    answers, stats = ask(asked.prompts[:3], {"max_requests": 1})
    assert answers == asked.answers[:3]
    assert stats["steps"] == sum(map(len, answers)), "a step for every token"
    report_count("answers equal to the plain engine's", len(answers), "octavo-nano, alone")


def test_another_selection_changes_the_answer(asked: Asked) -> None:
    """An engine that picks other entries is told apart, even by a prompt with few more than are picked."""
    (ablation,) = (one for one in ablations(nano_path()) if one.name == "index selection random")
    with broken_kernels(ablation):
        answers, _ = ask(asked.prompts[2:3], {})
    assert answers != asked.answers[2:3]
