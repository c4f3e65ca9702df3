"""What ranks other than 0 do in tests; a process of its own imports this."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist

from octavo.kernels.collectives import Communicator
from octavo.runtime.assemble import assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.engram_memory import EngramMemory
from octavo.runtime.ranks.agreement import agree, exchange
from octavo.runtime.ranks.communicator import GroupCommunicator
from octavo.runtime.ranks.group import all_ranks
from octavo.runtime.ranks.start import follow, rank_runner, with_common_capacity
from octavo.runtime.runner import Chunk, Runner

Steps = Sequence[Sequence[Chunk]]
STEPS: Steps = (
    [Chunk(0, 0, list(range(100, 121)))],
    [Chunk(0, 21, [5]), Chunk(1, 0, list(range(40, 63))), Chunk(2, 0, [9, 8])],
    [Chunk(0, 22, [6]), Chunk(1, 23, [7]), Chunk(2, 2, [3])],
    [Chunk(2, 3, list(range(200, 230))), Chunk(3, 0, [11])],
)
"""Chunks that end amid pairs, requests without a row on some rank, a decode step."""
PLACES = 16
"""Pages of a slot."""


def long_steps(rows: int) -> Steps:
    """A long prompt between two short ones, then a step of each that is mixed, and one that only decodes."""
    long = [3 + 7 * place % 480 for place in range(rows - 3)]
    return (
        [Chunk(0, 0, [9, 8]), Chunk(1, 0, long), Chunk(2, 0, [7])],
        [Chunk(0, 2, [4]), Chunk(1, len(long), [5]), Chunk(2, 1, [6, 3, 2])],
        [Chunk(0, 3, [4]), Chunk(1, len(long) + 1, [5])],
    )


def run_steps(runner: Runner, steps: Steps = STEPS) -> dict[str, object]:
    """The state after every step, and the hidden rows of all steps, as digests. There are 4 x :data:`PLACES` pages."""
    runner.set_pages([(slot, place, slot * PLACES + place) for slot in range(4) for place in range(PLACES)])
    states, hidden = [], hashlib.sha256()
    for chunks in steps:
        local = runner.run(chunks)
        rows = runner.pick(local, range(sum(len(chunk.ids) for chunk in chunks)))
        hidden.update(rows.float().numpy().tobytes())
        states.append(_digest(runner))
    return {"states": states, "hidden": hidden.hexdigest()}


def _digest(runner: Runner) -> str:
    pools = runner.pools
    tensors = [pools.history, *pools.rings, *pools.entries, *pools.keys, *pools.pending]
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def compute_and_compare(steps: Steps, settings: EngineConfig, rank: int, control: dist.ProcessGroup) -> None:
    runner = rank_runner(with_common_capacity(assemble(settings, rank=rank), settings), settings)
    exchange(run_steps(runner, steps), all_ranks())


def raises_while_loading(settings: EngineConfig, rank: int, control: dist.ProcessGroup) -> None:
    raise ValueError(f"no weights for rank {rank}")


def differs(settings: EngineConfig, rank: int, control: dist.ProcessGroup) -> None:
    agree({"torch": "another", "octavo": "same"}, all_ranks())


def addend(rank: int, *shape: int) -> torch.Tensor:
    """What a rank brings: other numbers on every rank, whose sums depend on their order."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator)


SHAPES = ((2, 3), (4, 5000), (6, 7, 1001))
"""Of sums; the last is larger than what is sent at once. Their first extent can be cut into two parts."""


def collect(communicator: Communicator) -> list[torch.Tensor]:
    """Gathers of several dtypes in both orders, and sums with and without scatter."""
    rank = communicator.rank
    values = [
        addend(rank, 3, 2).to(torch.bfloat16),
        addend(rank, 3) > 0,
        torch.arange(3) + 10 * rank,
        addend(rank, 3, 4).to(torch.float8_e4m3fn),
    ]
    found = [value.float() for ordered in (True, False) for value in communicator.gather(values, ordered)]
    for shape in SHAPES:
        found += [communicator.reduce(addend(rank, *shape), scatter) for scatter in (False, True)]
    return found


def collect_and_compare(settings: EngineConfig, rank: int, control: dist.ProcessGroup) -> None:
    exchange({"digest": digest_of(collect(GroupCommunicator()))}, all_ranks())


def digest_of(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def steps_by_memory(settings: EngineConfig, memories: tuple[EngramMemory, ...], rank: int) -> dict[str, object]:
    """Digests of some steps by where the Engram tables lie."""
    found: dict[str, object] = {}
    for engram in memories:
        config = dataclasses.replace(settings, engram=engram)
        assembly = assemble(config, rank=rank)
        several = config.ranks > 1
        runner = rank_runner(with_common_capacity(assembly, config), config) if several else Runner(assembly)
        found[engram] = json.dumps(run_steps(runner))
    return found


def share_engram_tables(
    memories: tuple[EngramMemory, ...], settings: EngineConfig, rank: int, control: dist.ProcessGroup
) -> None:
    exchange(steps_by_memory(settings, memories, rank), all_ranks())
    table = assemble(dataclasses.replace(settings, engram="host"), rank=rank).prelude.tables[0].scale
    exchange({}, all_ranks())
    exchange({}, all_ranks())
    exchange({"scale": int(table[0, 0])}, all_ranks())


Phase = Literal["load", "start", "prefill", "decode"]
"""Reading weights, making programs, a step of a prompt, a step of an answer."""
How = Literal["kill", "stop", "throw"]


def fails(phase: Phase, how: How, settings: EngineConfig, rank: int, control: dist.ProcessGroup) -> None:
    """Do what rank 0 says until the phase begins, and end there."""

    def fail(*_: object, **__: object) -> None:
        if how == "throw":
            raise ValueError(f"no luck in {phase}")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    original = Runner.run

    def run(self: Runner, chunks: Sequence[Chunk]) -> torch.Tensor:
        if any(len(chunk.ids) > 1 for chunk in chunks) is (phase == "prefill"):
            fail()
        return original(self, chunks)

    at_start = {"load": "octavo.runtime.ranks.start.assemble", "start": "octavo.runtime.programs.start_programs"}
    with mock.patch(at_start[phase], fail) if phase in at_start else mock.patch.object(Runner, "run", run):
        follow(settings, rank, control)
