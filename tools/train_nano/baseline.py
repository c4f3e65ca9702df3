"""How far memory alone gets: each evaluation item is answered with the answer of the most similar training item.

``python -m tools.train_nano.baseline`` prints the share that this answers correctly, for each suite. Similar means a
large share of common words and word pairs (Jaccard), of the whole prompt or of its end, whichever answers better.
"""

from __future__ import annotations

import argparse
import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.runtime.suites.base import Item
from octavo.runtime.suites.registry import SUITES

BUCKETS = 4096
"""Columns that words and word pairs are hashed to."""
END = 16
"""Words at the end of a prompt that hold the question alone."""
_WORDS = re.compile(r"[A-Za-z]+|[0-9]+")


def nearest_accuracy(suite: str, items: int, training: int, seed: int = 0) -> float:
    """Share of ``items`` evaluation items that the nearest of ``training`` training items answers."""
    draw = SUITES[suite]
    wanted = [draw(seed, index, "evaluate") for index in range(items)]
    known = [draw(seed, index, "train") for index in range(training)]
    return max(nearest_share(wanted, known, END), nearest_share(wanted, known, None))


def nearest_share(wanted: Sequence[Item], known: Sequence[Item], end: int | None) -> float:
    """Share of ``wanted`` that the nearest of ``known`` answers, by the last ``end`` words of a question or by all."""
    first, second = _features(wanted, end), _features(known, end)
    common = first @ second.T
    union = first.sum(1)[:, None] + second.sum(1)[None, :] - common
    nearest = (common / union).argmax(1)
    return float(np.mean([item.answer == known[at].answer for item, at in zip(wanted, nearest, strict=True)]))


def _features(items: Sequence[Item], end: int | None) -> npt.NDArray[np.float32]:
    """Which words and word pairs an item has, float32 ``[items, BUCKETS]`` of 0 and 1."""
    table = np.zeros((len(items), BUCKETS), dtype=np.float32)
    for row, item in enumerate(items):
        words = _WORDS.findall(item.question)
        words = words[-end:] if end is not None else words
        pairs = [f"{one} {other}" for one, other in itertools.pairwise(words)]
        table[row, [zlib.crc32(text.encode()) % BUCKETS for text in {*words, *pairs}]] = 1
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--training", type=int, default=20_000)
    arguments = parser.parse_args()
    for suite in SUITES:
        share = nearest_accuracy(suite, arguments.items, arguments.training)
        print(f"{suite:<10}  {share:.1%}  nearest of {arguments.training:,} training items, {arguments.items} items")


if __name__ == "__main__":
    main()
