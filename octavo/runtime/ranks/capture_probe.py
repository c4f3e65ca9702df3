"""Whether collectives over a process group can stand in captured graphs: tried on the device, by all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import OctavoError
from octavo.graphs.cuda import Recorder
from octavo.kernels.collectives import Capturable
from octavo.runtime.ranks.agreement import exchange
from octavo.runtime.ranks.communicator import GroupCommunicator

_ROWS = 64


def probe_capture(communicator: GroupCommunicator, device: torch.device, group: dist.ProcessGroup) -> Capturable:
    """Capture a gather and two sums on ``device``, replay them on other values, and compare with what is due.

    All ranks of the group call it together and get the same answer: a rank replays only if every rank has captured,
    since those that replay wait for all. Anything that goes wrong is a reason for no.
    """
    if device.type != "cuda":
        return Capturable(False, f"gloo moves rows on the host, and {device.type} has no graphs")
    mine = torch.zeros(_ROWS, 2, device=device)
    recorder, results, error = Recorder(device), list[Tensor](), ""
    try:
        with recorder.session():
            _collectives(communicator, mine)  # connections are made by the first use
            torch.cuda.synchronize(device)
            graph = recorder.record(lambda: results.extend(_collectives(communicator, mine)), "a collective")
    except (RuntimeError, OctavoError) as failed:
        error = str(failed).strip().partition("\n")[0]
    errors = [str(one["error"]) for one in exchange({"error": error}, group)]
    if any(errors):
        rank = next(rank for rank, found in enumerate(errors) if found)
        return Capturable(False, f"NCCL could not be captured at start: rank {rank}: {errors[rank]}")
    right = True
    for value in (1.0, 3.0):
        mine.fill_(value * (communicator.rank + 1))
        graph.replay()
        torch.cuda.synchronize(device)
        right &= _are_right(results, value, communicator.rank, communicator.ranks)
    if not all(one["right"] for one in exchange({"right": right}, group)):
        return Capturable(False, "NCCL gave wrong results when it was captured and replayed at start")
    return Capturable(True, "NCCL was captured and replayed at start, with right results")


def _collectives(communicator: GroupCommunicator, mine: Tensor) -> list[Tensor]:
    (gathered,) = communicator.gather([mine], False)
    return [gathered, communicator.reduce(gathered, True), communicator.reduce(mine, False)]


def _are_right(results: list[Tensor], value: float, rank: int, ranks: int) -> bool:
    """Rank r has brought ``value * (r + 1)``."""
    gathered, scattered, total = results
    whole = gathered.view(ranks, _ROWS, -1)
    everybody = value * torch.arange(1, ranks + 1, device=gathered.device)
    return bool(
        (whole == everybody[:, None, None]).all()
        and (scattered == ranks * whole[rank]).all()
        and (total == everybody.sum()).all()
    )
