"""Grading is strict: what counts as the final answer, when two answers are the same, and how sure the share is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from octavo.errors import UsageError
from octavo.runtime.engine import Prompt, Result
from octavo.runtime.evaluate import (
    Question,
    Suite,
    differences,
    file_suite,
    final_answer,
    generated_suites,
    run_suite,
    same_answer,
    wilson,
)
from octavo.runtime.request import Answer, FinishReason
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.suites import arithmetic
from tests.nano.nano_data import nano_tokenizer
from tests.tokenizer_data import mini_tokenizer


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("14 + 23 = 37. The answer is 37.", "37"),
        ("The answer is red and heron.", "red and heron"),
        ("the answer is: **42**", "**42**"),
        ("The answer is 1. No: the answer is 2.\n", "2"),
        ("The answer is 3.5.", "3.5"),
        ("So it is 42\n#### 42", "42"),
        ("#### 42 \n", "42"),
        ("We find \\boxed{42}, which is even.", "42"),
        ("First \\boxed{1}, then \\boxed{2}", "2"),
        ("The answer is $\\boxed{42}$.", "42"),
        ("The answer is 37. Or is it", "37. Or is it"),
        ("The answer is", None),
        ("#### 42\nsurely", None),
        ("It is 42.", None),
        ("42", None),
        ("", None),
    ],
)
def test_final_answer(text: str, given: str | None) -> None:
    assert final_answer(text) == given


def test_thinking_does_not_count() -> None:
    assert final_answer("The answer is 1.</think>The answer is 2.", thinking=True) == "2"
    assert final_answer("The answer is 1.</think>Well.", thinking=True) is None
    assert final_answer("The answer is 1.", thinking=True) is None, "it never stopped thinking"


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("37", "37", True),
        ("Red  and Heron", "red and heron", True),
        ("**42**", "42", True),
        ("$1,234", "1234", True),
        ("1_234", "1234", False),
        ("42.0", "42", True),
        ("1,2", "12", False),
        ("37 coins", "37", False),
        ("37. Or is it", "37", False),
        ("137", "37", False),
        ("7", "37", False),
        ("", "37", False),
        ("red", "red and heron", False),
        ("heron and red", "red and heron", False),
        ("blue 47", "blue 4", False),
    ],
)
def test_same_answer(given: str, expected: str, same: bool) -> None:
    assert same_answer(given, expected) is same


def test_wilson_intervals() -> None:
    """Against the score interval's published values (Newcombe 1998, table I: method 3)."""
    for correct, items, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(correct, items) == pytest.approx((low, high), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


class Parrot:
    """An engine that says what ``reply`` makes of the text of a prompt."""

    def __init__(self, reply: Callable[[str], str], reason: FinishReason = "stop", room: int = 65536) -> None:
        self.tokenizer = nano_tokenizer()
        self.reply = reply
        self.reason: FinishReason = reason
        self.max_model_len = room
        self.asked: list[str] = []
        self.params: SamplingParams | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Result]:
        self.params = params
        results = []
        for count, prompt in enumerate(prompts, 1):
            ids = [token for token in prompt if isinstance(token, int)]
            self.asked.append(self.tokenizer.decode(ids))
            text = self.reply(self.asked[-1])
            error = "no" if self.reason == "error" else None
            made = self.tokenizer.encode_text(text)
            answer = Answer(text, made, self.reason, None, error, None, len(ids), 0.0, 0.0, 0.0, 0)
            results.append(Result(ids, None, [answer]))
            if on_progress is not None:
                on_progress(count, len(prompts))
        return results


def knowing(suite: Suite, wrong: int = 0) -> Callable[[str], str]:
    """Answers every question of a suite, the last ``wrong`` ones badly."""
    good = len(suite.questions) - wrong

    def reply(prompt: str) -> str:
        position = next(i for i, question in enumerate(suite.questions) if f">{question.text}<" in prompt)
        return f"The answer is {suite.questions[position].answer if position < good else 'unknown'}."

    return reply


@pytest.mark.parametrize("name", ["arithmetic", "recall@1k", "facts"])
def test_a_model_that_knows_is_graded_by_what_it_knows(name: str) -> None:
    (suite,) = generated_suites(name, 20, seed=0)
    seen: list[tuple[int, int]] = []
    parrot = Parrot(knowing(suite, wrong=3))
    score = run_suite(parrot, suite, on_progress=lambda done, total: seen.append((done, total)))
    assert (score.correct, len(score.graded), score.accuracy) == (17, 20, 0.85)
    assert score.interval == wilson(17, 20)
    assert seen == [(count, 20) for count in range(1, 21)]
    assert score.prompt_tokens == sum(len(nano_tokenizer().encode_text(q.text)) + 4 for q in suite.questions)
    assert score.answer_tokens == sum(len(one.ids) for one in score.graded) > 0
    assert parrot.params == SamplingParams(max_tokens=128) and parrot.params.temperature == 0
    assert all(text.endswith("</think>") for text in parrot.asked)


def test_a_model_that_says_the_same_always_scores_nothing() -> None:
    suites = (
        generated_suites("recall", 10, 0) + generated_suites("facts", 50, 0) + generated_suites("arithmetic", 50, 0)
    )
    assert [suite.name for suite in suites] == ["recall@1k", "recall@4k", "facts", "arithmetic"]
    for suite in suites:
        assert run_suite(Parrot(lambda _: "The answer is 30."), suite).accuracy <= 0.1


def test_thinking_is_asked_for_and_left_out() -> None:
    (suite,) = generated_suites("facts", 5, 0)
    know = knowing(suite)
    parrot = Parrot(lambda prompt: f"The answer is nothing.</think>{know(prompt)}")
    assert run_suite(parrot, suite, thinking=True).accuracy == 1
    assert all(text.endswith("<think>") and "Reasoning Effort" in text for text in parrot.asked)
    assert run_suite(Parrot(know), suite, thinking=True).accuracy == 0


@pytest.mark.parametrize("reason", ["length", "abort", "timeout", "error"])
def test_an_answer_that_did_not_end_does_not_count(reason: FinishReason) -> None:
    (suite,) = generated_suites("facts", 5, 0)
    score = run_suite(Parrot(knowing(suite), reason), suite)
    assert score.correct == 0 and all(one.given is None for one in score.graded)
    assert {one.error for one in score.graded} == {"no" if reason == "error" else None}


def test_a_context_too_short_is_refused_before_anything_is_asked() -> None:
    (suite,) = generated_suites("recall@1k", 3, 0)
    parrot = Parrot(knowing(suite), room=1000)
    with pytest.raises(UsageError, match=r"recall@1k: its longest question has 9\d\d tokens.* room for 1000 together"):
        run_suite(parrot, suite)
    assert not parrot.asked


def test_another_vocabulary_is_refused_by_generated_suites_alone(tmp_path: Path) -> None:
    """The mini checkpoint has every template token, so only its words tell it apart."""
    for suite in [*generated_suites("recall", 1, 0), *generated_suites("facts", 1, 0)]:
        parrot = Parrot(knowing(suite))
        parrot.tokenizer = mini_tokenizer()
        with pytest.raises(UsageError, match=rf"{suite.name}: made for the vocabulary of octavo-nano, where 'Mara' is"):
            run_suite(parrot, suite)
        assert not parrot.asked
    suite = file_suite(write(tmp_path, GOOD), 1)
    parrot = Parrot(knowing(suite))
    parrot.tokenizer = mini_tokenizer()
    assert run_suite(parrot, suite).correct == 1


def test_generated_questions_are_the_held_out_items() -> None:
    (suite,) = generated_suites("arithmetic", 5, seed=3, max_tokens=9)
    items = [arithmetic.item(3, index) for index in range(5)]
    assert suite.questions == tuple(Question(item.question, item.answer) for item in items)
    assert suite.max_tokens == 9


def test_differences_are_told_by_tokens() -> None:
    (suite,) = generated_suites("facts", 6, 0)
    first, same = (run_suite(Parrot(knowing(suite)), suite) for _ in range(2))
    assert differences(first, same) == []
    assert differences(first, run_suite(Parrot(knowing(suite, wrong=2)), suite)) == [4, 5]


def write(folder: Path, *lines: str) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


GOOD = json.dumps({"question": "What is 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42", "id": 3})


def test_files_in_the_way_of_gsm8k(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, "", json.dumps({"question": "Who?", "answer": " Mara "}))
    suite = file_suite(file, 500)
    assert suite.name == "questions.jsonl" and suite.max_tokens == 2048
    assert suite.questions == (Question("What is 6 times 7?", "42"), Question("Who?", "Mara"))
    told = file_suite(file, 1, 7, "Be brief.")
    assert told.questions == (Question("What is 6 times 7?\n\nBe brief.", "42"),) and told.max_tokens == 7
    assert run_suite(Parrot(lambda _: "It is\n#### 42"), suite).correct == 1


def test_lines_end_where_json_says(tmp_path: Path) -> None:
    """Other separators of lines may stand in a JSON string as they are."""
    line = json.dumps({"question": "one\u2028two\u0085three", "answer": "x"}, ensure_ascii=False)
    (question,) = file_suite(write(tmp_path, line), 500).questions
    assert question.text == "one\u2028two\u0085three"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, not an object"),
        ('{"question": "x"}', "'answer' is missing, empty or no string"),
        ('{"question": 3, "answer": "x"}', "'question' is missing, empty or no string"),
        ('{"question": " ", "answer": "x"}', "'question' is missing, empty or no string"),
        ('{"question": "x", "answer": "a ####"}', "nothing follows the ####"),
    ],
)
def test_a_malformed_line_is_named(line: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"questions\.jsonl, line 3: {what}.*Each line is a JSON object"):
        file_suite(write(tmp_path, GOOD, "", line), 500)


def test_files_without_questions(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no question"):
        file_suite(write(tmp_path, "", " "), 500)
    with pytest.raises(UsageError, match=r"gone\.jsonl: cannot be read"):
        file_suite(tmp_path / "gone.jsonl", 500)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        file_suite(tmp_path / "bytes.jsonl", 500)
