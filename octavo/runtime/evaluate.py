"""Grading: questions through an engine, answers compared strictly, accuracy with its interval.

An answer counts only if the model ended it and it names its result in a form that leaves no doubt.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Protocol

from octavo.errors import UsageError
from octavo.runtime.engine import Prompt, Result
from octavo.runtime.prompt import encode_chat
from octavo.runtime.request import FinishReason
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.suites.registry import item_of, suite_names
from octavo.runtime.suites.words import FIRST_NAMES
from octavo.runtime.tokenizer import Tokenizer

GENERATED_MAX_TOKENS = 128
FILE_MAX_TOKENS = 2048
"""Most tokens of an answer unless the caller says otherwise: of a generated suite, and of a file."""

_FORM = 'Each line is a JSON object such as {"question": "What is 6 times 7?", "answer": "42"}.'
_THINK_END = "</think>"
_SENTENCE = re.compile(r"\bthe answer is:?\s+(.+)$", re.IGNORECASE | re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_GSM8K = re.compile(r"####\s*(.+?)\s*$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_NINETY_FIVE = 1.959963984540054
"""Standard deviations on each side of a normal distribution that hold 95 % of it."""


class Answerer(Protocol):
    """What grading needs of an engine; :class:`octavo.runtime.engine.Engine` has it."""

    tokenizer: Tokenizer

    @property
    def max_model_len(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Result]: ...


@dataclass(frozen=True, slots=True)
class Question:
    """One question and the answer that counts."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Suite:
    """Questions that are graded together."""

    name: str
    questions: tuple[Question, ...]
    max_tokens: int
    """Most tokens of an answer."""
    words: tuple[str, ...] = ()
    """Words that have a token of their own in the vocabulary that the suite is made for; none for any vocabulary."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A question, what the model said, and the verdict."""

    question: Question
    text: str
    ids: list[int]
    given: str | None
    """The final answer as the model named it, or None if it named none."""
    correct: bool
    finish_reason: FinishReason
    error: str | None


@dataclass(frozen=True, slots=True)
class Score:
    """A graded suite."""

    suite: str
    graded: tuple[Graded, ...]
    prompt_tokens: int
    seconds: float
    """Wall clock of all its answers together."""

    @property
    def correct(self) -> int:
        return sum(one.correct for one in self.graded)

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.graded)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.correct, len(self.graded))

    @property
    def answer_tokens(self) -> int:
        return sum(len(one.ids) for one in self.graded)


def generated_suites(
    name: str, items: int, seed: int, max_tokens: int | None = None, thinking: bool = False
) -> list[Suite]:
    """The first ``items`` held-out items of a suite, or of each of a group. Raises :class:`UsageError` for no such."""
    suites = []
    for one in suite_names(name):
        drawn = (item_of(one, thinking)(seed, index) for index in range(items))
        questions = tuple(Question(item.question, item.answer) for item in drawn)
        suites.append(Suite(one, questions, max_tokens or GENERATED_MAX_TOKENS, FIRST_NAMES))
    return suites


def file_suite(path: Path, items: int, max_tokens: int | None = None, instruction: str = "") -> Suite:
    """The first ``items`` lines of a file: JSON objects with the strings ``question`` and ``answer``.

    Of an answer in the way of GSM8K only what follows its last ``####`` counts. ``instruction`` is put below every
    question. Raises :class:`UsageError` that names the line for one that is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--suite {path}: cannot be read ({error}).") from error
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if len(questions) == items:
            break
        if line.strip():
            questions.append(_question(line, f"{path}, line {number}", instruction))
    if not questions:
        raise UsageError(f"--suite {path}: holds no question. {_FORM}")
    return Suite(path.name, tuple(questions), max_tokens or FILE_MAX_TOKENS)


def _question(line: str, where: str, instruction: str) -> Question:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error}). {_FORM}") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: a {type(entry).__name__}, not an object. {_FORM}")
    for key in ("question", "answer"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise UsageError(f"{where}: {key!r} is missing, empty or no string. {_FORM}")
    answer = entry["answer"].rpartition("####")[2].strip()
    if not answer:
        raise UsageError(f"{where}: nothing follows the #### in 'answer'. {_FORM}")
    return Question("\n\n".join(filter(None, [entry["question"], instruction])), answer)


def run_suite(
    engine: Answerer, suite: Suite, *, thinking: bool = False, on_progress: Callable[[int, int], None] | None = None
) -> Score:
    """Answer and grade a suite, greedily, all of its questions in work at once.

    Raises :class:`UsageError` before anything is answered if the suite is made for another vocabulary, or if prompt
    and answer of a question do not fit.
    """
    _check_vocabulary(suite, engine.tokenizer)
    prompts = [
        encode_chat(engine.tokenizer, [{"role": "user", "content": question.text}], thinking=thinking)
        for question in suite.questions
    ]
    longest = max(map(len, prompts))
    if longest + suite.max_tokens > engine.max_model_len:
        raise UsageError(
            f"{suite.name}: its longest question has {longest} tokens and an answer may have {suite.max_tokens}, but "
            f"there is room for {engine.max_model_len} together. Raise --kv-tokens or --max-model-len, lower "
            "--max-tokens, or choose another suite; the context of the model is the limit."
        )
    began = time.perf_counter()
    results = engine.generate(prompts, SamplingParams(max_tokens=suite.max_tokens), on_progress)
    seconds = time.perf_counter() - began
    graded = tuple(
        _grade(question, result, thinking) for question, result in zip(suite.questions, results, strict=True)
    )
    return Score(suite.name, graded, sum(map(len, prompts)), seconds)


def _check_vocabulary(suite: Suite, tokenizer: Tokenizer) -> None:
    for word in suite.words:
        count = len(tokenizer.encode_text(f" {word}"))
        if count != 1:
            raise UsageError(
                f"{suite.name}: made for the vocabulary of octavo-nano, where {word!r} is one token; this checkpoint "
                f"has {count} for it. Give a checkpoint with another vocabulary a --suite FILE.jsonl, or leave --model "
                "out."
            )


def _grade(question: Question, result: Result, thinking: bool) -> Graded:
    answer = result.answers[0]
    ended = answer.finish_reason == "stop"
    given = final_answer(answer.text, thinking) if ended else None
    correct = given is not None and same_answer(given, question.answer)
    return Graded(question, answer.text, answer.ids, given, correct, answer.finish_reason, answer.error)


def final_answer(text: str, thinking: bool = False) -> str | None:
    """The result that ``text`` names at its end, or None.

    It stands in the last of ``The answer is X.``, ``#### X`` (a line of its own) or ``\\boxed{X}``. The first two
    must end the text. Thinking does not count; of a text that should think and never ends to, nothing does.
    """
    if thinking:
        _, closed, text = text.rpartition(_THINK_END)
        if not closed:
            return None
    text = text.strip()
    last_line = text.rpartition("\n")[2]
    if found := _GSM8K.fullmatch(last_line):
        return found[1]
    sentences = list(re.finditer(r"\bthe answer is\b", text, re.IGNORECASE))
    if sentences and (found := _SENTENCE.match(text, sentences[-1].start())):
        given = found[1].strip().removesuffix(".")
        boxed = _BOXED.search(given)
        return boxed[1] if boxed else given
    boxes = _BOXED.findall(text)
    return boxes[-1] if boxes else None


def same_answer(given: str, expected: str) -> bool:
    """Equal as numbers, or as text without regard to case, runs of space, emphasis and a full stop at the end."""
    first, second = _normalised(given), _normalised(expected)
    if first == second:
        return True
    try:
        return "_" not in given and Decimal(first) == Decimal(second)
    except InvalidOperation:
        return False


def _normalised(text: str) -> str:
    words = " ".join(text.strip().strip("*$").split()).casefold().removesuffix(".").lstrip("$")
    return _THOUSANDS.sub("", words)


def wilson(correct: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson score), ``items`` at least 1."""
    z, share = _NINETY_FIVE, correct / items
    middle = share + z * z / (2 * items)
    spread = z * math.sqrt(share * (1 - share) / items + z * z / (4 * items * items))
    scale = 1 + z * z / items
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def differences(first: Score, second: Score) -> list[int]:
    """The questions, by their position, whose answers are not the same tokens."""
    pairs = zip(first.graded, second.graded, strict=True)
    return [index for index, (one, other) in enumerate(pairs) if one.ids != other.ids]
