"""Word problems of one to three steps with numbers of at most three digits.

Each step is written so that nothing harder than one place has to be added in the head: tens first, then ones.
"""

from __future__ import annotations

from random import Random

from octavo.runtime.suites.base import Item, Split, draw_on, stream_of
from octavo.runtime.suites.words import COUNTED, FIRST_NAMES

LARGEST = 999
BARE_SHARE = 0.15
"""Problems that are an expression instead of a story, where that is possible."""
_OPENERS = ("Today", "At first", "One day", "In spring")
_MORE = ("Then {name} finds {n} more.", "{name} buys {n} more.", "A friend brings {n} more.")
_LESS = ("Then {name} gives away {n}.", "{name} sells {n}.", "A storm takes away {n}.")
_TIMES = ("Now {name} gets {n} times as many.", "Soon there are {n} times as many.")
_QUESTIONS = ("How many {things} does {name} have now?", "How many {things} are there in the end?")
_SENTENCES = {"+": _MORE, "-": _LESS, "*": _TIMES}


def item(seed: int, index: int, side: Split = "evaluate") -> Item:
    """Item ``index`` of the stream ``seed``."""
    rng = stream_of("arithmetic", seed, index)
    return draw_on(side, lambda: draw(rng))


def draw(rng: Random) -> Item:
    """An item of either side."""
    start = value = rng.randint(11, 99)
    operations: list[tuple[str, int]] = []
    reasoning = [f"Start with {start}."]
    for _ in range(rng.choice((1, 2, 2, 3, 3))):
        sign, number = _operation(rng, value)
        operations.append((sign, number))
        steps, value = step(value, sign, number)
        reasoning.append(steps)
    # Read from left to right, as the steps are: a product later in the expression would come first.
    bare = rng.random() < BARE_SHARE and all(sign != "*" for sign, _ in operations[1:])
    return Item(
        question=_expression(start, operations) if bare else _story(rng, start, operations),
        reasoning=" ".join(reasoning),
        answer=str(value),
        content=f"{start}" + "".join(f"{sign}{number}" for sign, number in operations),
    )


def _expression(start: int, operations: list[tuple[str, int]]) -> str:
    return " ".join(["What is", str(start), *(f"{sign} {number}" for sign, number in operations)]) + "?"


def _story(rng: Random, start: int, operations: list[tuple[str, int]]) -> str:
    name, things = rng.choice(FIRST_NAMES), rng.choice(COUNTED)
    sentences = [f"{rng.choice(_OPENERS)} {name} has {start} {things}."]
    sentences += [rng.choice(_SENTENCES[sign]).format(name=name, n=number) for sign, number in operations]
    return " ".join([*sentences, rng.choice(_QUESTIONS).format(name=name, things=things)])


def _operation(rng: Random, value: int) -> tuple[str, int]:
    """A sign and a number that keep the value between 1 and ``LARGEST``."""
    kind = rng.random()
    if kind < 0.2 and 2 <= value <= 99:
        return "*", rng.randint(2, 5)
    if kind < 0.6 and value >= 12:
        return "-", rng.randint(2, min(99, value - 1))
    return "+", rng.randint(2, min(99, LARGEST - value))


def step(value: int, sign: str, number: int) -> tuple[str, int]:
    """One step as it is written, and its result: ``48 + 36 = 78 + 6 = 84.``"""
    if sign == "*":
        tens, ones = value // 10 * 10 * number, value % 10 * number
        parts = [f"{value} * {number}"]
        if tens and ones:
            parts += _sum(tens, "+", ones)
        result = tens + ones
    else:
        parts = _sum(value, sign, number)
        result = value + number if sign == "+" else value - number
    return " = ".join([*parts, str(result)]) + ".", result


def _sum(value: int, sign: str, number: int) -> list[str]:
    """The expressions of a sum, tens before ones."""
    tens, ones = number // 10 * 10, number % 10
    parts = [f"{value} {sign} {number}"]
    if tens and ones:
        parts.append(f"{value + tens if sign == '+' else value - tens} {sign} {ones}")
    return parts
