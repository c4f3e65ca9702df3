"""Questions for two facts of a fixed invented world.

A fact is named by the last four tokens before its value (``bird of Velmor is``), so an n-gram memory can hold it.
All facts are trained; an item is an ordered pair of them, and the pairs are split.
"""

from __future__ import annotations

from random import Random

from octavo.runtime.suites.base import Item, Split, draw_on, stream_of
from octavo.runtime.suites.words import BIRDS, COLOURS, CRAFTS, FIRST_NAMES, PLACES, STONES, TREES

RELATIONS = {
    "flag": COLOURS,
    "founder": FIRST_NAMES,
    "bird": BIRDS,
    "tree": TREES,
    "stone": STONES,
    "craft": CRAFTS,
}
"""What is known of each town, and the values that it may have."""
_QUESTIONS = ("Name the {} and the {}.", "What are the {} and the {}?", "Tell me the {} and the {}.")
_SINGLE = ("Name the {}.", "What is the {}?", "Tell me the {}.")


def _world() -> dict[str, str]:
    rng = Random("the world of octavo-nano")
    return {f"{relation} of {place}": rng.choice(values) for place in PLACES for relation, values in RELATIONS.items()}


WORLD = _world()
"""Every fact: ``bird of Velmor`` to ``heron``."""
SUBJECTS = tuple(WORLD)


def item(seed: int, index: int, side: Split = "evaluate") -> Item:
    """Item ``index`` of the stream ``seed``."""
    rng = stream_of("facts", seed, index)
    return draw_on(side, lambda: draw(rng))


def draw(rng: Random) -> Item:
    """An item of either side."""
    first, second = rng.choice(SUBJECTS), rng.choice(SUBJECTS)
    while second == first:
        second = rng.choice(SUBJECTS)
    return Item(
        question=rng.choice(_QUESTIONS).format(first, second),
        reasoning=f"The {first} is {WORLD[first]}. The {second} is {WORLD[second]}.",
        answer=f"{WORLD[first]} and {WORLD[second]}",
        content=f"{first}, {second}",
    )


def single(rng: Random) -> Item:
    """One fact alone, for training: no evaluation item is of this form."""
    subject = rng.choice(SUBJECTS)
    return Item(rng.choice(_SINGLE).format(subject), f"The {subject} is {WORLD[subject]}.", WORLD[subject], subject)
