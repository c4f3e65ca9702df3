"""Numbers handed out and taken back: slots and pages. It checks itself, so that a leak or a double free is found."""

from __future__ import annotations

from collections.abc import Iterable


class Allocator:
    """Hands out the numbers 0 .. count - 1, each to one holder at a time; lately returned numbers go out first."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._held = bytearray(count)

    @property
    def free(self) -> int:
        """How many can be had."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` numbers; the caller has made sure with :attr:`free` that there are so many."""
        assert 0 <= count <= len(self._free), f"{self.name}: {count} asked for, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._held[number] = 1
        return taken

    def release(self, numbers: Iterable[int]) -> None:
        """Take numbers back. One that is not held is a bug in the caller and stops the engine."""
        for number in numbers:
            assert self._held[number], f"{self.name}: {number} is released but not held"
            self._held[number] = 0
            self._free.append(number)

    def check(self) -> None:
        """Every number is either free, once, or held."""
        free = set(self._free)
        assert len(free) == len(self._free), f"{self.name}: a number is free twice"
        assert all(not self._held[number] for number in free), f"{self.name}: a number is free and held"
        assert len(free) + sum(self._held) == self.count, f"{self.name}: a number is lost"
