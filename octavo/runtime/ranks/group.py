"""The process group of this process: rows travel over NCCL between GPUs, all else over gloo."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from octavo.runtime.assemble import choose_device, local_rank
from octavo.runtime.config import EngineConfig

_FOREVER = timedelta(days=365)
_ABORT_SECONDS = 10.0
_LOG = logging.getLogger("octavo.ranks")
Release = Callable[[], None]
"""Gives up the graphs of this process."""


def join(store: Store, rank: int, config: EngineConfig, collective_seconds: float) -> dist.ProcessGroup:
    """Make the group and choose this rank's GPU; waits for all others.

    Returns the group over which rank 0 tells the others what to do: an engine without requests is silent for as long as
    it likes, so nothing there times out. A rank that dies breaks it all the same.
    """
    device = choose_device(config.device, local_rank(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=collective_seconds),
    )
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_FOREVER)
    return control


def all_ranks() -> dist.ProcessGroup:
    """The group of the programs' collectives, and of what is compared at start: each wait in it has a bound."""
    group = dist.group.WORLD
    assert group is not None, "no process group"
    return group


def leave(release: Release | None = None, broken: bool = False) -> None:
    """End this process's groups. ``release`` gives up the graphs, which may hold collectives.

    ``broken``: a rank is gone or hangs, and a GPU may wait for it inside a collective. NCCL calls that off in a thread
    of its own: it goes on until no graph holds a collective, and a graph ends when its collective has been called off.
    Groups that do not end within seconds are left as they are.
    """
    aborting = None
    if broken and dist.is_initialized():
        aborting = threading.Thread(target=all_ranks().abort, name="octavo-abort", daemon=True)
        aborting.start()
    if release is not None:
        release()
    if aborting is not None:
        aborting.join(_ABORT_SECONDS)
        if aborting.is_alive():
            _LOG.warning("the process group did not end within %g s: this process cannot have another", _ABORT_SECONDS)
            return
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken(error: BaseException) -> bool:
    """Whether an error tells of another rank: a connection that is gone, or a wait in vain."""
    told = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in told for word in ("connection", "timed out", "timeout", "nccl"))
    )
