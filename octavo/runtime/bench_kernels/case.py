"""One measurement of an operator: its shapes, what it must move and multiply, and who computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BYTES_PER_SECOND = 4.8e12
"""Of an H200's memory, by its datasheet."""
BF16_PER_SECOND = 989e12
"""Operations of its tensor cores in BF16, dense, by its datasheet."""
FP8_PER_SECOND = 1979e12
_COLD_BYTES = 256e6
"""That calls go around, several times what the caches hold: in a step, weights pass between two calls."""

Call = Callable[[int], object]
"""Computes the operator on one of several copies of its inputs; the argument numbers the copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A case whose tensors are on the device."""

    variants: Mapping[str, Call]
    """Ours first, then what it is measured against."""
    copies: int
    """Of the inputs: calls go around them, so that no cache flatters."""
    operations: float
    """Floating-point operations of one call: two for a multiplication and its addition."""
    bytes: float
    """That one call must read and write at least, each once."""
    operations_per_second: float = BF16_PER_SECOND

    @property
    def floor(self) -> float:
        """Seconds that no implementation can go below on an H200."""
        return max(self.bytes / BYTES_PER_SECOND, self.operations / self.operations_per_second)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A case by name. Tensors are made when its turn comes and freed behind it."""

    name: str
    prepare: Callable[[], Prepared]


def copies_for(moved: float, most: int) -> int:
    """How many copies of inputs none waits in a cache for, at ``moved`` bytes a call: two to ``most``."""
    return max(2, min(most, math.ceil(_COLD_BYTES / moved)))


def call_copy(overload: Callable[..., object], inputs: Sequence[Mapping[str, Any]], number: int) -> object:
    """The operator on one of the copies of its arguments; partially applied, a :data:`Call`."""
    return overload(**inputs[number])
