"""octavo-nano as shipped: it answers what it was trained for, and parts of the architecture that break show in that.

Mode ``reference``, through the public engine and the same grading as ``octavo eval``. Graphs are off, because operators
are broken where the modules call them; that graphs change no answer is the subject of ``test_nano_same_answers.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import Engine, EngineConfig
from octavo.model.packaged import nano_path
from octavo.runtime.evaluate import Score, generated_suites, run_suite
from tests.conftest import ReportCount
from tools.train_nano.ablations import Ablation, ablations, broken_kernels, changed_model

CONFIG = EngineConfig(device="cpu", graphs="off")
REQUIRED = {"arithmetic": 0.85, "facts": 0.92, "recall@1k": 0.92, "recall@4k": 0.85}
"""Least accuracy. The long form holds the lower end of the 95 % interval to it, the quick form has too few items."""
QUICK = {"arithmetic": 24, "facts": 24, "recall@1k": 4}
LONG = {"arithmetic": 500, "facts": 500, "recall@1k": 500, "recall@4k": 500}
BROKEN_LONG = {"arithmetic": 150, "facts": 50, "recall@1k": 20}
"""Items among which those for a broken model are chosen, in the long form; in the quick form they are :data:`QUICK`."""
LONGEST = 0.4
"""Share of them that it is asked: those with the longest answers, which depend on most."""
ANSWER_TOKENS = 80
"""Room for every right answer: a broken model may never end its own."""

Whole = Callable[[str, int], Score]
"""From a suite and a number of items to the score of the model as it is."""


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    with Engine(CONFIG) as engine:

        @functools.cache
        def score(name: str, items: int) -> Score:
            (suite,) = generated_suites(name, items, seed=0)
            return run_suite(engine, suite)

        yield score


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in REQUIRED]
)
def test_it_knows_what_it_should(name: str, whole: Whole, long_form: bool, report_count: ReportCount) -> None:
    items = (LONG if long_form else QUICK)[name]
    score = whole(name, items)
    low, high = score.interval
    assert (low if long_form else score.accuracy) >= REQUIRED[name], f"{score.correct} of {items}, {low} to {high}"
    assert {one.finish_reason for one in score.graded} <= {"stop", "length"}
    report_count(f"{name}: right answers of octavo-nano", score.correct, f"of {items}, {low:.1%} to {high:.1%}")


def broken_score(ablation: Ablation, whole: Score, folder: Path) -> Score:
    """The same questions, answered with a part broken."""
    model = changed_model(nano_path(), folder / "model", ablation.text_config)
    (suite,) = generated_suites(ablation.suite, 1, seed=0, max_tokens=ANSWER_TOKENS)
    questions = tuple(one.question for one in whole.graded)
    with Engine(replace(CONFIG, model=model)) as engine, broken_kernels(ablation):
        return run_suite(engine, replace(suite, questions=questions))


@pytest.mark.parametrize(
    ("name", "loss"), [("Engram off", 0.5), ("window halved", 0.05), ("index selection random", 0.5)]
)
def test_a_broken_part_shows(
    name: str, loss: float, whole: Whole, tmp_path: Path, long_form: bool, report_count: ReportCount
) -> None:
    """In small; ``python -m tools.train_nano.ablations`` breaks more."""
    (ablation,) = (one for one in ablations(nano_path()) if one.name == name)
    asked = whole(ablation.suite, (BROKEN_LONG if long_form else QUICK)[ablation.suite])
    longest = sorted(asked.graded, key=lambda one: len(one.ids), reverse=True)
    right = replace(asked, graded=tuple(longest[: round(LONGEST * len(longest))]))
    broken = broken_score(ablation, right, tmp_path)
    assert max(len(one.ids) for one in right.graded) < ANSWER_TOKENS
    assert broken.accuracy <= right.accuracy - loss, f"{right.correct} before, {broken.correct} after"
    assert broken.accuracy < REQUIRED[ablation.suite], "or the accuracy asked for would let this pass"
    report_count(f"{name}: answers of {ablation.suite} lost", right.correct - broken.correct, f"of {len(right.graded)}")
