"""What moves rows between ranks. The compiler inserts these operators; an injected communicator carries them out.

Rows are dealt in turn: global row g lives on rank g % ranks at local row g // ranks. So the ranks' shards side by side
(*rank-major*) become global order by one transpose, and padding ends up past the last live row by construction
(design section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.operator import DeadRows, Gives, Need, Returns, operator


@dataclass(frozen=True, slots=True)
class Capturable:
    """Whether a communicator's collectives may stand inside a captured graph, and why."""

    value: bool
    reason: str


class Communicator(Protocol):
    """One rank's end of a group of ranks."""

    rank: int
    ranks: int
    capturable: Capturable
    """The same on all ranks."""

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        """Each [ranks * r, ...] in global order, the same on all ranks -> this rank's [r, ...]; nothing is sent."""
        ...

    def gather(self, values: list[Tensor], ordered: bool) -> list[Tensor]:
        """Each [r, ...] of this rank -> [ranks * r, ...] of all, in global order or rank-major."""
        ...

    def reduce(self, value: Tensor, scatter: bool) -> Tensor:
        """Sum [n, ...] over the ranks; with ``scatter`` this rank's n / ranks rows of the rank-major sum."""
        ...


def shard_of(rows: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's rows [r, ...] of rows [ranks * r, ...] in global order."""
    return rows[rank::ranks]


def restored(rank_major: Tensor, ranks: int) -> Tensor:
    """Rank-major rows [ranks * r, ...] -> global order, same shape."""
    return torch.unflatten(rank_major, 0, (ranks, -1)).transpose(0, 1).flatten(0, 1)


_EVERY = Returns(Gives.EVERY, DeadRows.CARRIED)


@operator(
    arguments={"values": Need.ORDERED},
    results=(Returns(Gives.ROWS, DeadRows.CARRIED),),
    source="design 6",
    collective=True,
)
def shard_rows(values: list[Tensor], ranks: int) -> list[Tensor]:
    """This rank's rows of values that every rank has whole: each [ranks * r, ...] -> [r, ...]. Nothing is sent."""
    raise AssertionError("shard_rows is carried out by a communicator, as an instruction of a program")


@shard_rows.fake
def _shard_rows(values: list[Tensor], ranks: int) -> list[Tensor]:
    return [value.new_empty(value.shape[0] // ranks, *value.shape[1:]) for value in values]


@operator(arguments={"values": Need.ROWS}, results=(_EVERY,), source="design 6", collective=True)
def gather_rows(values: list[Tensor], ranks: int, ordered: bool) -> list[Tensor]:
    """All ranks' rows of several values in one collective: each [r, ...] -> [ranks * r, ...]."""
    raise AssertionError("gather_rows is carried out by a communicator, as an instruction of a program")


@gather_rows.fake
def _gather_rows(values: list[Tensor], ranks: int, ordered: bool) -> list[Tensor]:
    return [value.new_empty(value.shape[0] * ranks, *value.shape[1:]) for value in values]


@operator(
    arguments={"value": Need.EVERY},
    results=(Returns(Gives.ROWS, DeadRows.CARRIED),),
    source="design 6",
    collective=True,
)
def reduce_rows(value: Tensor, ranks: int, scatter: bool) -> Tensor:
    """Sum over the ranks: [n, ...] -> this rank's [n / ranks, ...] with ``scatter``, else all [n, ...]."""
    raise AssertionError("reduce_rows is carried out by a communicator, as an instruction of a program")


@reduce_rows.fake
def _reduce_rows(value: Tensor, ranks: int, scatter: bool) -> Tensor:
    return value.new_empty(value.shape[0] // ranks if scatter else value.shape[0], *value.shape[1:])
