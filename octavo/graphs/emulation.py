"""Several ranks in one process: each runs its program in a thread of its own, in step, and collectives are sums and
concatenations of what the ranks bring. For proofs and for ``explain``; real ranks talk through a process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from octavo.kernels.collectives import Capturable, restored, shard_of

Result = TypeVar("Result")


class _Meeting:
    """Where the ranks exchange what they bring, one collective after another."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._brought: list[list[Tensor]] = [[] for _ in range(ranks)]

    def exchange(self, rank: int, values: list[Tensor]) -> list[list[Tensor]]:
        """Bring this rank's values -> everybody's, by rank."""
        self._brought[rank] = values
        self._barrier.wait()
        everybody = [[value.clone() for value in brought] for brought in self._brought]
        self._barrier.wait()
        return everybody

    def abort(self) -> None:
        self._barrier.abort()


class EmulatedCommunicator:
    """One emulated rank's end."""

    def __init__(self, rank: int, ranks: int, meeting: _Meeting) -> None:
        self.rank, self.ranks = rank, ranks
        self.capturable = Capturable(False, "emulated ranks meet on the host")
        self._meeting = meeting

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        return [shard_of(value, self.rank, self.ranks) for value in values]

    def gather(self, values: list[Tensor], ordered: bool) -> list[Tensor]:
        everybody = self._meeting.exchange(self.rank, values)
        joined = [torch.cat(parts) for parts in zip(*everybody, strict=True)]
        return [restored(value, self.ranks) for value in joined] if ordered else joined

    def reduce(self, value: Tensor, scatter: bool) -> Tensor:
        everybody = self._meeting.exchange(self.rank, [value])
        total = everybody[0][0]
        for (part,) in everybody[1:]:
            total = total + part
        return torch.unflatten(total, 0, (self.ranks, -1))[self.rank] if scatter else total


def run_ranks(ranks: int, work: Callable[[EmulatedCommunicator], Result]) -> list[Result]:
    """Run ``work`` once for every rank, in step -> the results by rank. The first error of a rank is raised."""
    meeting = _Meeting(ranks)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(EmulatedCommunicator(rank, ranks, meeting))
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]
