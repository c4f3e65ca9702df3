"""The process group of this process: rows travel over NCCL between GPUs, all else over gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from octavo.runtime.assemble import choose_device
from octavo.runtime.config import EngineConfig


def join(store: Store, rank: int, config: EngineConfig, collective_seconds: float) -> None:
    """Make the group and choose this rank's GPU; waits for all others."""
    device = choose_device(config.device, dist.get_node_local_rank(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=collective_seconds),
    )


def control_group() -> dist.ProcessGroup:
    """The group for what ranks tell each other beside the programs' collectives."""
    group = dist.group.WORLD
    assert group is not None, "no process group"
    return group
