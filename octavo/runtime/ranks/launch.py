"""The other ranks of an engine: given by torchrun, or started here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.rank_plan import check_ranks
from octavo.runtime.ranks.given import GivenRanks, given_ranks
from octavo.runtime.ranks.group import Release
from octavo.runtime.ranks.workers import RankFailure, Work, Workers


class Others(Protocol):
    """What rank 0 knows of the other ranks."""

    control: dist.ProcessGroup
    """Over which rank 0 tells them what to do."""
    failure: RankFailure | None
    """Set when one of them has ended before its time."""

    def on_failure(self, call: Callable[[RankFailure], None]) -> None:
        """Call it, in another thread, if a rank ends that should not; at once if one has."""
        ...

    def explain(self, error: Exception) -> Exception:
        """The failure behind a broken collective, or the error itself if it is no other rank's."""
        ...

    def stopped(self) -> str:
        """A sentence that names ranks which are stopped, as by SIGSTOP; empty if none is seen to be."""
        ...

    def stop(self, force: bool = False, release: Release | None = None) -> None:
        """End them, with ``force`` at once, and this process's group, whose graphs ``release`` gives up."""
        ...


def start_others(config: EngineConfig, work: Work) -> Others | None:
    """The other ranks of a configuration; None if it has one rank. Under torchrun only rank 0 comes back from here.

    Raises :class:`UsageError` or :class:`OctavoError`, before anything is started, for what does not fit; what ranks
    that torchrun gives hold is checked by each as it loads.
    """
    given = given_ranks()
    if given is not None and given.ranks != config.ranks:
        raise UsageError(f"--ranks {config.ranks}: torchrun has started {given.ranks}; give --ranks {given.ranks}")
    if given is None:
        check_ranks(config)
    if config.ranks == 1:
        return None
    if given is not None:
        return GivenRanks(config, work, config.step_deadline, given)
    return Workers(config, work, config.step_deadline)
