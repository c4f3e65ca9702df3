"""What ranks other than 0 do in tests; a process of its own imports this."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from octavo.kernels.collectives import Communicator
from octavo.runtime.assemble import assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.ranks.agreement import agree, exchange
from octavo.runtime.ranks.communicator import GroupCommunicator
from octavo.runtime.ranks.group import all_ranks
from octavo.runtime.ranks.start import rank_runner, with_common_capacity
from octavo.runtime.runner import Chunk, Runner

STEPS = (
    [Chunk(0, 0, list(range(100, 121)))],
    [Chunk(0, 21, [5]), Chunk(1, 0, list(range(40, 63))), Chunk(2, 0, [9, 8])],
    [Chunk(0, 22, [6]), Chunk(1, 23, [7]), Chunk(2, 2, [3])],
    [Chunk(2, 3, list(range(200, 230))), Chunk(3, 0, [11])],
)
"""Chunks that end amid pairs, requests without a row on some rank, a decode step."""


def run_steps(runner: Runner) -> dict[str, object]:
    """The state after every step, and the hidden rows of all steps, as digests."""
    runner.set_pages([(slot, place, slot * 2 + place) for slot in range(4) for place in range(2)])
    states, hidden = [], hashlib.sha256()
    for chunks in STEPS:
        local = runner.run(chunks)
        rows = runner.pick(local, range(sum(len(chunk.ids) for chunk in chunks)))
        hidden.update(rows.float().numpy().tobytes())
        states.append(_digest(runner))
    return {"states": states, "hidden": hidden.hexdigest()}


def _digest(runner: Runner) -> str:
    pools = runner.pools
    tensors = [pools.history, *pools.rings, *pools.entries, *pools.keys, *pools.pending]
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def compute_and_compare(settings: EngineConfig, rank: int, control: dist.ProcessGroup) -> None:
    runner = rank_runner(with_common_capacity(assemble(settings, rank=rank), settings), settings)
    exchange(run_steps(runner), all_ranks())


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
