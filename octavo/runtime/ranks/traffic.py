"""How much a communicator carries: counted on its way."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.collectives import Communicator


@dataclass(slots=True)
class Traffic:
    """What one rank has sent so far, in programs and beside them. Collectives in captured graphs are not seen."""

    collectives: int = 0
    bytes_sent: float = 0.0
    """By the ring algorithm, as in a dump."""
    seconds: float = 0.0
    """Of the host, in collectives: on CPUs carrying and waiting for other ranks, with NCCL only starting them."""


class CountedCommunicator:
    """Another communicator, whose collectives are added to a :class:`Traffic`. Shards send nothing and do not count."""

    def __init__(self, carrier: Communicator, traffic: Traffic) -> None:
        self.rank, self.ranks, self.capturable = carrier.rank, carrier.ranks, carrier.capturable
        self._carrier = carrier
        self._traffic = traffic

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        return self._carrier.shard(values)

    def gather(self, values: list[Tensor], ordered: bool) -> list[Tensor]:
        began = time.perf_counter()
        gathered = self._carrier.gather(values, ordered)
        self._add(began, sum(value.nbytes for value in values) * (self.ranks - 1))
        return gathered

    def reduce(self, value: Tensor, scatter: bool) -> Tensor:
        began = time.perf_counter()
        reduced = self._carrier.reduce(value, scatter)
        self._add(began, (1 if scatter else 2) * value.nbytes * (self.ranks - 1) / self.ranks)
        return reduced

    def _add(self, began: float, sent: float) -> None:
        self._traffic.collectives += 1
        self._traffic.bytes_sent += sent
        self._traffic.seconds += time.perf_counter() - began
