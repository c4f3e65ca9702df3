"""Bucket ladders, their checks, and the rows that a rank needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import UsageError
from octavo.graphs.buckets import bucket_for, check_buckets, ladder, local_rows

WORST_PADDING = 0.125
"""Of a bucket, from 64 rows up (design section 5)."""


def test_ladder() -> None:
    assert ladder(8192)[:13] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80)
    assert ladder(8192)[-3:] == (7168, 7680, 8192) or ladder(8192)[-1] == 8192


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (5, 8), (9, 16), (193, 208), (342, 352), (8192, 8192)])
def test_bucket_of_a_row_count(rows: int, bucket: int) -> None:
    assert bucket_for(rows, ladder(8192)) == bucket


def test_beyond_the_largest() -> None:
    assert bucket_for(65, ladder(64)) is None


@given(top=st.integers(1, 20_000), rows=st.integers(1, 20_000))
def test_padding(top: int, rows: int) -> None:
    """Every row count up to the top has a bucket; padding is bounded and the ladder ascends to the top."""
    sizes = ladder(top)
    assert sizes[-1] == top
    assert list(sizes) == sorted(set(sizes))
    bucket = bucket_for(rows, sizes)
    if rows > top:
        assert bucket is None
        return
    assert bucket is not None
    assert rows <= bucket <= top
    if rows >= 64:
        assert bucket - rows <= WORST_PADDING * bucket
    else:
        assert bucket - rows < 8
    assert check_buckets(sizes, top) == sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "no buckets"),
        ([0, 4], "bucket 0"),
        ([-8], "bucket -8"),
        ([4, 129], "bucket 129"),
        ([8, 4], r"\[8, 4\]"),
        ([4, 4], r"\[4, 4\]"),
    ],
)
def test_unusable_buckets(sizes: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=rf"{message}.*1 to the chunk of 128 rows"):
        check_buckets(sizes, 128)


def test_usable_buckets() -> None:
    assert check_buckets([1, 8, 128], 128) == (1, 8, 128)


@pytest.mark.parametrize(
    ("rows", "ranks", "align", "needed"),
    [(21, 4, 1, 6), (21, 4, 8, 8), (21, 1, 1, 21), (1, 8, 1, 1), (8, 8, 1, 1), (9, 8, 1, 2), (342, 2, 16, 176)],
)
def test_local_rows(rows: int, ranks: int, align: int, needed: int) -> None:
    assert local_rows(rows, ranks, align) == needed


@given(rows=st.integers(1, 20_000), ranks=st.integers(1, 16), align=st.sampled_from([1, 2, 8, 16]))
def test_local_rows_hold_every_shard(rows: int, ranks: int, align: int) -> None:
    """Enough for the fullest rank, aligned, and no larger than that asks for."""
    needed = local_rows(rows, ranks, align)
    fullest = len(range(0, rows, ranks))
    assert needed % align == 0
    assert fullest <= needed < fullest + align
