"""From a config to a rank that is ready: the same on every rank, and what must be equal is compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import octavo
from octavo.kernels.collectives import Capturable
from octavo.runtime.assemble import Assembly, assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.engram_memory import choose_engram_memory
from octavo.runtime.model_source import checkpoint_path
from octavo.runtime.ranks.agreement import agree, exchange
from octavo.runtime.ranks.capture_probe import probe_capture
from octavo.runtime.ranks.communicator import GroupCommunicator
from octavo.runtime.ranks.group import Release, all_ranks
from octavo.runtime.ranks.messages import Pick, StepPlan, receive
from octavo.runtime.ranks.traffic import CountedCommunicator, Traffic
from octavo.runtime.rehearsal import with_measured_capacity
from octavo.runtime.runner import Runner
from octavo.runtime.step_program import ladders


def with_common_capacity(assembly: Assembly, config: EngineConfig) -> Assembly:
    """Compare what ranks were given, and keep as many pages as every one of them has room for.

    Raises :class:`OctavoError` naming the rank that differs.
    """
    group = all_ranks()
    path = checkpoint_path(config)
    agree(
        {
            "octavo": octavo.__version__,
            "torch": torch.__version__,
            "checkpoint": _manifest(path) if path is not None else f"random, seed {config.weights_seed}",
            "numerics": assembly.numerics,
            "backends": assembly.backends,
            "compile": assembly.inductor,
            "graphs": config.graphs,
            "collectives": config.collectives,
            "layers and experts": [config.layers, config.experts, config.expert_placement],
            "Engram tables": choose_engram_memory(config, assembly.device),
        },
        group,
    )
    everybody = exchange({"pages": assembly.capacity.sizes.pages, "longest": assembly.capacity.max_model_len}, group)
    pages = min(int(str(one["pages"])) for one in everybody)
    longest = min(int(str(one["longest"])) for one in everybody)
    sizes = dataclasses.replace(assembly.capacity.sizes, pages=pages)
    return dataclasses.replace(
        assembly, capacity=dataclasses.replace(assembly.capacity, sizes=sizes, max_model_len=longest)
    )


def rank_runner(
    assembly: Assembly,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    traffic: Traffic | None = None,
) -> Runner:
    """This rank's runner, whose programs are the same as all others'; what it sends is added to ``traffic``.

    Raises :class:`OctavoError` if the programs of ranks differ.
    """
    communicator = GroupCommunicator()
    if config.collectives == "captured":
        communicator.capturable = probe_capture(communicator, assembly.device, all_ranks())
    else:
        communicator.capturable = Capturable(False, "--collectives between")
    runner = Runner(
        assembly,
        ladders(config.buckets, config.chunk, config.max_requests, config.ranks),
        config.graphs,
        config.dump_dir if communicator.rank == 0 else None,
        progress,
        CountedCommunicator(communicator, traffic or Traffic()),
    )
    agree({"programs": runner.programs.plan_hash}, all_ranks())
    return runner


def follow(config: EngineConfig, rank: int, control: dist.ProcessGroup) -> Release:
    """The life of a rank other than 0: load, get ready, and do what rank 0 says until it says that all is over.

    Returns what gives its graphs up.
    """
    assembly = with_measured_capacity(assemble(config, rank=rank), config)
    runner = rank_runner(with_common_capacity(assembly, config), config)
    hidden = torch.empty(0)
    while (message := receive(control)) is not None:
        if isinstance(message, StepPlan):
            runner.set_pages(message.pages)
            hidden = runner.run(message.chunks)
        else:
            assert isinstance(message, Pick)
            runner.pick(hidden, message.rows)
    return runner.programs.close


def _manifest(path: Path) -> str:
    """Names and sizes of a checkpoint's files, as a short digest."""
    files = sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
