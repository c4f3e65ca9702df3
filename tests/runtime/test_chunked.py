"""Chunked prefill equals whole prefill, bitwise, in reference numerics: hidden rows, features, and every pool."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from octavo.runtime.assemble import Assembly
from tests.conftest import ReportCount
from tests.model.mini_run import MiniRun, mini_assembly

CHUNKS = (1, 2, 3, 7, 16, 61)
"""They cross the window of 16, pairs of 2, pages of 64 and n-grams of 4 in every phase."""


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    return mini_assembly("reference")


def prompt(length: int, seed: int) -> list[int]:
    """Random ids with repeats, so that n-grams recur."""
    draw = random.Random(seed)
    ids = [0]
    while len(ids) < length:
        ids += [draw.randrange(3, 490)] if draw.random() < 0.7 or len(ids) < 5 else ids[-4:]
    return ids[:length]


def outcome(assembly: Assembly, ids: list[int], sizes: list[int]) -> list[Tensor]:
    """All that a prefill leaves, computed in chunks of the given sizes."""
    run, hidden, features = MiniRun(assembly), [], []
    start = 0
    for size in sizes:
        record = run.step(ids[start : start + size])
        hidden.append(record.hidden)
        features.append(torch.cat(record.features, 1))
        start += size
    assert start == len(ids)
    pools = run.runner.pools
    waiting = pools.pending if len(ids) % 2 else []
    return [torch.cat(hidden), torch.cat(features), *pools.rings, *pools.entries, *pools.keys, *waiting, pools.history]


def chunks_of(length: int, size: int) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


def assert_equal(assembly: Assembly, ids: list[int], whole: list[Tensor], sizes: list[int]) -> None:
    for place, (ours, theirs) in enumerate(zip(outcome(assembly, ids, sizes), whole, strict=True)):
        assert torch.equal(ours, theirs), (len(ids), sizes, place)


def test_chunk_sizes(assembly: Assembly, report_count: ReportCount, long_form: bool) -> None:
    """Over one border of pages in the smallest chunks, over two in the others, and in the long form in all."""
    for length, sizes in ((67, () if long_form else CHUNKS[:3]), (131, CHUNKS if long_form else CHUNKS[3:])):
        ids = prompt(length, seed=1)
        whole = outcome(assembly, ids, [length])
        for size in sizes:
            assert_equal(assembly, ids, whole, chunks_of(length, size))
    report_count("prefills in chunks equal to whole ones", len(CHUNKS))


def test_random_chunks(assembly: Assembly, report_count: ReportCount, long_form: bool) -> None:
    """Random lengths cut at random places."""
    draw = random.Random(7)
    cases = 300 if long_form else 8
    for case in range(cases):
        ids = prompt(draw.randint(2, 140), seed=case)
        cuts = sorted(draw.sample(range(1, len(ids)), draw.randint(1, min(6, len(ids) - 1))))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert_equal(assembly, ids, outcome(assembly, ids, [len(ids)]), sizes)
    report_count("prefills in chunks equal to whole ones", cases)


def test_the_comparison_can_fail(assembly: Assembly) -> None:
    """Another token in the middle is seen by hidden rows and by the state."""
    ids = prompt(40, seed=3)
    other = [*ids[:20], ids[20] ^ 1, *ids[21:]]
    pairs = list(zip(outcome(assembly, ids, [40]), outcome(assembly, other, [40]), strict=True))
    assert sum(not torch.equal(a, b) for a, b in pairs) > len(pairs) // 2
