"""What all suites of generated questions share: an item, its answer sentence, and the side of the split it is on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "evaluate"]

EVALUATION_SHARE = 16
"""One content in so many belongs to evaluation."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question with the answer that is compared, and the steps that lead to it."""

    question: str
    """The user's message, with the context if there is one."""
    reasoning: str
    """Visible steps: inside the thinking where the model thinks, before the answer sentence where it does not."""
    answer: str
    """What the grader compares."""
    content: str
    """What the item asks, without wording: its hash decides the side of the split."""
    direct: bool = False
    """The reasoning is not said: without thinking the answer comes at once."""

    @property
    def final(self) -> str:
        """The sentence that the grader looks for."""
        return f"The answer is {self.answer}."

    @property
    def response(self) -> str:
        """The whole answer of a model that does not think first."""
        return f"{self.said} {self.final}" if self.said else self.final

    @property
    def said(self) -> str:
        """The steps that such a model says before the final sentence."""
        return "" if self.direct else self.reasoning


def split_of(content: str) -> Split:
    """The side of the split, by a hash of the content: no item can be on both sides."""
    digest = hashlib.blake2b(content.encode(), digest_size=2).digest()
    return "evaluate" if int.from_bytes(digest, "little") % EVALUATION_SHARE == 0 else "train"


def draw_on(side: Split, draw: Callable[[], Item]) -> Item:
    """The first item of ``draw`` that is on this side."""
    while True:
        item = draw()
        if split_of(item.content) == side:
            return item


def stream_of(family: str, seed: int, index: int) -> Random:
    """The random numbers of one item; the same on every machine and in every process."""
    return Random(f"{family}/{seed}/{index}")
