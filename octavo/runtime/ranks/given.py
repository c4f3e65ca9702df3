"""Ranks that somebody else has started: torchrun, on one host or several.

Every process runs the same command. Rank 0 becomes the engine; the others follow it and end with it. torchrun watches
them, and ends all when one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from octavo.errors import OctavoError
from octavo.runtime.config import EngineConfig
from octavo.runtime.ranks.group import Release, is_broken, join, leave
from octavo.runtime.ranks.workers import RankFailure, Work

_REACH_SECONDS = 120.0
"""For rank 0 to be reached."""


@dataclass(frozen=True, slots=True)
class Given:
    """This process among those that torchrun has started."""

    store: Store
    rank: int
    ranks: int


def is_given() -> bool:
    """Whether torchrun has started this process, or one that it descends from."""
    return dist.is_torchelastic_launched()


def given_ranks() -> Given | None:
    """None if torchrun has not started this process. Raises :class:`OctavoError` if rank 0's host cannot be reached."""
    if not is_given():
        return None
    try:
        return Given(*next(rendezvous("env://", timeout=timedelta(seconds=_REACH_SECONDS))))
    except dist.DistError as error:
        raise OctavoError(
            f"the host of rank 0 cannot be reached: {_first_line(error)}. The address that torchrun was given "
            "(--rdzv-endpoint or --master-addr and --master-port) has to be one that every host can connect to."
        ) from error


class GivenRanks:
    """The other ranks, as far as rank 0 has to do with them."""

    def __init__(self, config: EngineConfig, work: Work, collective_seconds: float, given: Given) -> None:
        """Joins torchrun's group. On ranks other than 0 it does the work and ends the process."""
        self.failure: RankFailure | None = None
        try:
            self.control = join(given.store, given.rank, config, collective_seconds)
        except RuntimeError as error:
            if not is_broken(error):
                raise
            raise RankFailure(
                f"rank {given.rank} cannot reach the others: {_first_line(error)}. Ranks of several hosts connect to "
                "each other; their names or addresses have to be known and open to all."
            ) from error
        if given.rank:
            leave(work(config, given.rank, self.control))
            raise SystemExit(0)

    def on_failure(self, call: Callable[[RankFailure], None]) -> None:
        """torchrun ends this process too when another fails."""

    def explain(self, error: Exception) -> Exception:
        """A broken collective: what the other rank ended of stands in its own output."""
        return RankFailure(f"another rank has ended; see its output ({error})") if is_broken(error) else error

    def stopped(self) -> str:
        """Other hosts' processes are not seen from here."""
        return ""

    def stop(self, force: bool = False, release: Release | None = None) -> None:
        """The others end by themselves when they are told that all is over, or with torchrun."""
        leave(release, broken=force)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
