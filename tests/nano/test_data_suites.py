"""The suites: answers are right, contexts fit, training and evaluation share nothing, and memory alone fails."""

from __future__ import annotations

import re
from random import Random

import pytest

from octavo.errors import UsageError
from octavo.runtime.prompt import encode_chat
from octavo.runtime.suites import arithmetic, facts, recall
from octavo.runtime.suites.base import Item, Split, split_of
from octavo.runtime.suites.registry import GROUPS, SUITES, item_of, suite_names
from octavo.runtime.suites.words import BIRDS, COLOURS, FIRST_NAMES, LAST_NAMES, POSSESSIONS, STONES, TREES
from tests.conftest import ReportCount
from tests.nano.nano_data import nano_tokenizer
from tools.train_nano import baseline

VALUES = (*COLOURS, *BIRDS, *TREES, *STONES)
"""First words of the records' values; two digits follow."""
WINDOW = 64
"""Of octavo-nano: a question whose record lies in it would not test retrieval."""
SIDES: tuple[Split, Split] = ("train", "evaluate")


@pytest.mark.parametrize("name", SUITES)
def test_items_are_a_function_of_seed_and_index(name: str) -> None:
    draw = SUITES[name]
    assert draw(3, 5) == draw(3, 5)
    assert len({draw(3, 5).question, draw(3, 6).question, draw(4, 5).question}) == 3


@pytest.mark.parametrize("name", SUITES)
def test_the_final_sentence_ends_the_response(name: str) -> None:
    """Steps come first, but for what is answered at once."""
    item = SUITES[name](0, 0)
    assert item.final == f"The answer is {item.answer}."
    assert item.response == (item.final if name.startswith("trace") else f"{item.reasoning} {item.final}")


@pytest.mark.parametrize("name", SUITES)
def test_training_and_evaluation_do_not_overlap(name: str, report_count: ReportCount) -> None:
    count = 100 if "@" in name else 3000
    sides = {side: [SUITES[name](1, index, side) for index in range(count)] for side in SIDES}
    for side, items in sides.items():
        assert {split_of(item.content) for item in items} == {side}
    contents = [{item.content for item in items} for items in sides.values()]
    questions = [{item.question for item in items} for items in sides.values()]
    assert not contents[0] & contents[1] and not questions[0] & questions[1]
    report_count("items held apart", 2 * count)


def test_without_the_split_they_would_overlap() -> None:
    contents = [{arithmetic.draw(Random(f"{side}{i}")).content for i in range(3000)} for side in SIDES]
    assert contents[0] & contents[1]


def test_the_split_is_the_size_it_says() -> None:
    held_out = sum(split_of(f"content {i}") == "evaluate" for i in range(16_000))
    assert 850 <= held_out <= 1150, "one in 16, within five standard deviations"


def test_each_family_has_a_million_items() -> None:
    starts, numbers = 89, 98
    two_sums_each_way = starts * numbers * numbers * 2
    assert two_sums_each_way > 10**6
    assert len(FIRST_NAMES) * len(LAST_NAMES) * len(VALUES) * 90 * len(POSSESSIONS) > 10**6
    assert len(facts.SUBJECTS) * (len(facts.SUBJECTS) - 1) > 10**6


def computed(item: Item) -> int:
    """The answer from the operations that the item's content names, from left to right."""
    value = 0
    for sign, number in re.findall(r"([-+*]?)(\d+)", item.content):
        value = {"": 0, "+": value, "-": value, "*": value}[sign]
        match sign:
            case "*":
                value *= int(number)
            case "-":
                value -= int(number)
            case _:
                value += int(number)
    return value


def test_arithmetic_is_right(report_count: ReportCount) -> None:
    expressions, steps, bare = 0, set(), 0
    for index in range(2000):
        item = arithmetic.item(0, index)
        assert int(item.answer) == computed(item) and 0 < int(item.answer) <= 999
        bare += item.question.startswith("What is ")
        numbers = re.findall(r"\d+", item.content)
        assert re.findall(r"\d+", item.question) == numbers, "the question gives each number, in order"
        sentences = item.reasoning.removesuffix(".").split(". ")
        assert sentences[0] == f"Start with {numbers[0]}"
        steps.add(len(sentences) - 1)
        for sentence in sentences[1:]:
            values = {eval(part) for part in sentence.split(" = ")}
            assert len(values) == 1, sentence
            expressions += sentence.count("=")
    assert steps == {1, 2, 3} and 50 < bare < 500
    report_count("equations", expressions)


def test_no_step_asks_for_more_than_one_place() -> None:
    """Adding tens or ones alone; products of a digit by a digit with its zeros."""
    for value in range(11, 100):
        for number in range(2, 100):
            for sign in "+-" if number < value else "+":
                parts = arithmetic.step(value, sign, number)[0].removesuffix(".").split(" = ")
                last = int(re.split(r" [-+] ", parts[-2])[1])
                assert last < 10 or last % 10 == 0


def parsed(context: str) -> dict[str, str]:
    """What each name's record says, by name."""
    return dict(re.findall(r"(\w+ \w+) (\w+ \d\d|is with \w+ \w+ now)\.", context))


def told(text: str) -> set[str]:
    """Words of records, whole or cut, in a text."""
    return set(re.findall(r"\w+", text)) & {*FIRST_NAMES, *LAST_NAMES, *VALUES, "with", "now"} | set(
        re.findall(r"\d", text)
    )


@pytest.mark.parametrize(("tokens", "count", "traced"), [(1000, 150, False), (4000, 60, False), (1000, 150, True)])
def test_recall_items(tokens: int, count: int, traced: bool, report_count: ReportCount) -> None:
    links = 0
    for index in range(count):
        item = recall.item(0, index, tokens=tokens, traced=traced)
        asking = "Name the" if traced else "What is the"
        found = re.fullmatch(rf"(.*) {asking} \w+ of (\w+ \w+)[?.]", item.question)
        assert found is not None
        context, asked = found.groups()
        records = parsed(context)
        said = records[asked]
        if said.startswith("is with "):
            links += 1
            said = records[said.removeprefix("is with ").removesuffix(" now")]
        assert item.answer == said
        word, _, digits = said.partition(" ")
        assert word in VALUES and re.fullmatch(r"\d\d", digits)
        assert len(re.findall(rf"(?<!with ){asked} ", context)) == 1, "a name has one record"
        prompt = [{"role": "user", "content": item.question}]
        ids = encode_chat(nano_tokenizer(), prompt, thinking=False)
        answer = nano_tokenizer().encode_text(item.response)
        assert 0.96 * tokens <= len(ids) + len(answer) <= tokens
        thinking = encode_chat(nano_tokenizer(), prompt, thinking=True)
        thought = nano_tokenizer().encode_text(item.reasoning)
        assert len(thinking) + len(thought) + len(answer) + 3 <= (1060 if tokens == 1000 else 4096)
        prose, _, question = nano_tokenizer().decode(ids[-WINDOW:]).partition(f" {asking}")
        assert not told(prose) and told(context), "a record in the window"
        assert set(asked.split()) == told(question), "the window holds the question, and no value"
    assert (0.35 if traced else 0.15) * count < links < (0.65 if traced else 0.45) * count
    report_count("recall items", count)


def test_distractors_share_names() -> None:
    item = recall.item(0, 1)
    asked = re.findall(r"of (\w+) (\w+)\?", item.question)[0]
    others = [name.split() for name in parsed(item.question)]
    assert sum(first == asked[0] for first, _ in others) > 1 or sum(last == asked[1] for _, last in others) > 1


def test_facts_follow_from_the_world() -> None:
    for index in range(1000):
        item = facts.item(0, index)
        first, second = re.findall(r"the (\w+ of \w+)", item.question)
        assert item.answer == f"{facts.WORLD[first]} and {facts.WORLD[second]}" and first != second


def test_a_fact_is_named_by_the_four_tokens_before_it() -> None:
    assert 1000 <= len(facts.WORLD) <= 2000
    grams = set()
    for subject, value in facts.WORLD.items():
        ids = nano_tokenizer().encode_text(f" The {subject} is {value}.")
        assert len(ids) == 7, "value, full stop, and five before them"
        grams.add(tuple(ids[1:5]))
    assert len(grams) == len(facts.WORLD)


@pytest.mark.parametrize(("suite", "items", "training"), [("arithmetic", 200, 3000), ("recall@1k", 60, 300)])
def test_the_nearest_training_item_does_not_help(suite: str, items: int, training: int) -> None:
    """In small; ``python -m tools.train_nano.baseline`` compares with 20,000."""
    assert baseline.nearest_accuracy(suite, items, training) < 0.2


def test_the_baseline_finds_an_item_that_it_knows() -> None:
    known = [arithmetic.item(0, index, "train") for index in range(300)]
    assert baseline.nearest_share(known[:50], known, None) == 1.0


def test_recall_is_made_for_the_prompt_it_is_asked_in() -> None:
    """The opener before the records is a token longer or shorter behind the line that sets the effort."""
    for name in ("recall@1k", "recall@4k", "trace@1k"):
        direct, thinking = (item_of(name, thinks)(0, 0) for thinks in (False, True))
        assert direct == SUITES[name](0, 0)
        assert direct.question != thinking.question and direct.content == thinking.content
    for name in ("arithmetic", "facts"):
        assert item_of(name, True)(0, 0) == item_of(name, False)(0, 0)


def test_suite_names() -> None:
    assert suite_names("recall") == GROUPS["recall"] == ("recall@1k", "recall@4k")
    assert suite_names("facts") == ("facts",)
    with pytest.raises(UsageError, match=r"--suite gsm8k: there is no such suite.*arithmetic, recall@1k.*\.jsonl"):
        suite_names("gsm8k")
