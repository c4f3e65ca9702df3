"""Row counts that programs are prepared for, and the one that a step takes (design section 5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from octavo.errors import UsageError


def ladder(top: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of max(8, largest power of two <= size / 8) up to ``top``, which is always a bucket.

    From 64 rows up padding is at most 12.5 %.
    """
    sizes = [size for size in (1, 2, 4, 8) if size <= top]
    while sizes and sizes[-1] < top:
        step = max(8, 1 << max((sizes[-1] // 8).bit_length() - 1, 0))
        sizes.append(min(sizes[-1] + step, top))
    return tuple(sizes)


def thinned(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """At most ``count`` of the sizes, the first and the last among them, with padding spread as evenly as can be.

    Neighbours differ by at most some factor, or are neighbours in the ladder; the smallest such factor is taken.
    """
    factor, kept = 1.0, tuple(sizes)
    while len(kept) > count:
        factor *= 1.02
        chosen = [sizes[0]]
        while chosen[-1] != sizes[-1]:
            larger = [size for size in sizes if size > chosen[-1]]
            within = [size for size in larger if size <= chosen[-1] * factor]
            chosen.append(within[-1] if within else larger[0])
        kept = tuple(chosen)
    return kept


def worst_padding(sizes: Sequence[int]) -> float:
    """Largest share of a bucket that can be padding: a step of one row more than the bucket below."""
    return max((1 - (low + 1) / high for low, high in itertools.pairwise((0, *sizes))), default=0.0)


def check_buckets(sizes: Sequence[int], chunk: int) -> tuple[int, ...]:
    """The sizes as they are, if they can be used. Raises :class:`UsageError` naming what is wrong."""
    rule = f"buckets are row counts from 1 to the chunk of {chunk} rows, ascending, each once"
    if not sizes:
        raise UsageError(f"no buckets: {rule}")
    for size in sizes:
        if not 1 <= size <= chunk:
            raise UsageError(f"bucket {size}: {rule}")
    if list(sizes) != sorted(set(sizes)):
        raise UsageError(f"buckets {list(sizes)}: {rule}")
    return tuple(sizes)


def local_rows(rows: int, ranks: int, align: int = 1) -> int:
    """Rows that every rank needs for ``rows`` rows dealt in turn."""
    per_rank = math.ceil(rows / ranks)
    return math.ceil(per_rank / align) * align


def bucket_for(needed: int, sizes: Sequence[int]) -> int | None:
    """The smallest bucket of at least ``needed`` local rows; None beyond the largest."""
    return next((size for size in sizes if size >= needed), None)
