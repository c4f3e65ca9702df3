"""Slots and pages are handed out once, come back once, and a mistake is found at once."""

from __future__ import annotations

import random

import pytest

from octavo.runtime.allocator import Allocator
from tests.conftest import ReportCount


def test_every_number_goes_out_once() -> None:
    allocator = Allocator("pages", 5)
    taken = allocator.allocate(2) + allocator.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert allocator.free == 0
    allocator.check()


def test_low_numbers_first_and_lately_returned_ones_before_others() -> None:
    """So that a lightly loaded engine touches few pages."""
    allocator = Allocator("pages", 4)
    assert allocator.allocate(3) == [0, 1, 2]
    allocator.release([1])
    assert allocator.allocate(2) == [1, 3]


def test_nothing_is_allocated_in_part() -> None:
    allocator = Allocator("pages", 3)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="pages: 3 asked for, 2 free"):
        allocator.allocate(3)
    assert allocator.free == 2
    allocator.check()


def test_none_of_none() -> None:
    allocator = Allocator("pages", 0)
    assert allocator.allocate(0) == []
    allocator.release([])
    allocator.check()


@pytest.mark.parametrize("numbers", [[1], [0, 0], [2]])
def test_what_is_not_held_cannot_come_back(numbers: list[int]) -> None:
    allocator = Allocator("slots", 3)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="is released but not held"):
        allocator.release(numbers)


def test_random_use(report_count: ReportCount) -> None:
    """Against a set of what is held."""
    draw = random.Random(0)
    allocator, held = Allocator("pages", 20), list[int]()
    for _ in range(3000):
        if draw.random() < 0.5:
            taken = allocator.allocate(draw.randint(0, allocator.free))
            assert not set(taken) & set(held)
            held += taken
        else:
            draw.shuffle(held)
            back = [held.pop() for _ in range(draw.randint(0, len(held)))]
            allocator.release(back)
        assert len(set(held)) == len(held) == 20 - allocator.free
        allocator.check()
    report_count("allocations and releases", 3000)
