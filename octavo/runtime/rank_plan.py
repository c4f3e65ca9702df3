"""What every rank of an engine would hold, told and judged before a weight is read (design sections 5 and 6)."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from dataclasses import dataclass

import torch

from octavo.errors import OctavoError, UsageError
from octavo.graphs.tables import ranges, size, table
from octavo.kernels.paging import PAGE_TOKENS
from octavo.model.memory import available_memory
from octavo.runtime.assemble import Plan, check_planned, choose_device, plan
from octavo.runtime.config import EngineConfig
from octavo.runtime.engram_memory import EngramMemory

_SIZES = ("weights", "requests", "tokens", "state", "step (estimated)", "needed", "free")
_HEADINGS = ("ranks", "device", "experts", *_SIZES)
_WHERE: dict[EngramMemory, str] = {
    "mmap": "mapped on the host once",
    "host": "copied to the host once",
    "device": "among the weights of each rank",
}
_GIB = 2**30
_MOST_GPUS = 64
"""Of a host. PyTorch holds the index of a device in a signed byte."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: its experts, weights, pools and step are those of ``planned``."""

    rank: int
    planned: Plan
    free_bytes: int | None
    """Of the rank's GPU, or of the host, which all ranks on a CPU share; None: this machine has no such GPU."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All ranks of an engine. Every one holds as many experts as the others, so all need the same memory."""

    ranks: tuple[RankPlan, ...]

    @property
    def first(self) -> Plan:
        return self.ranks[0].planned

    @property
    def sharers(self) -> int:
        """How many ranks share a device: all of them on a CPU, and on a GPU that was named; one otherwise."""
        return sum(one.planned.device == self.first.device for one in self.ranks)

    @property
    def needed_bytes(self) -> int:
        """On a device, by all ranks that share it; tables that they share on the host are not counted."""
        return self.sharers * self.first.needed_bytes

    @property
    def free_bytes(self) -> int:
        """Of the device that has least; 0 if one is missing."""
        return min(one.free_bytes or 0 for one in self.ranks)

    @property
    def fits(self) -> bool:
        host, shared = torch.device("cpu"), self.first.shared_bytes
        if self.first.device == host:
            return self.needed_bytes + shared <= self.free_bytes
        return self.needed_bytes <= self.free_bytes and (not shared or shared <= available_memory(host))

    def lines(self) -> list[str]:
        """A table for people, consecutive equal ranks in one row, and one line of totals."""
        rows = [_row(list(group)) for _, group in itertools.groupby(self.ranks, key=_alike)]
        return [*table(_HEADINGS, rows, right="|".join(_SIZES)), self._total()]

    def _total(self) -> str:
        count, one = len(self.ranks), self.first
        text = (
            f"all ranks together: weights {size(count * one.weight_bytes)}, state {size(count * one.capacity.bytes)}, "
            f"steps {size(count * one.step_bytes)}: {size(count * one.needed_bytes)}"
        )
        if self.sharers > 1:
            text += f" on {one.device}, whose free memory they share"
        if one.table_bytes:
            text += f"; Engram tables {size(one.table_bytes)}, {_WHERE[one.engram]}"
        return text


def plan_ranks(config: EngineConfig, *, every_device: bool = False) -> EnginePlan:
    """Read configs and count bytes; no weight is read. Where the state takes a share of the free memory and not even
    one page fits, the plan has the least state that an engine can have.

    The free memory of all GPUs is what rank 0's has, unless ``every_device`` is asked: to ask a GPU, a process has to
    take some of its memory, and each rank checks its own before it loads. Raises :class:`OctavoError` as
    :func:`octavo.runtime.assemble.plan` does.
    """
    least = _with_least_state(config)
    first = plan(least)
    free = available_memory(first.device)
    own_devices = config.ranks > 1 and first.device.type == "cuda" and config.device in ("auto", "cuda")
    if own_devices and config.ranks > _MOST_GPUS:
        raise UsageError(f"--ranks {config.ranks}: at most {_MOST_GPUS} ranks have a GPU each. Use fewer.")
    if least is not config and first.needed_bytes * (1 if own_devices else config.ranks) <= free:
        first = plan(config)
    count = len(first.experts) if config.expert_placement == "sharded" else 0
    ranks = []
    for rank in range(config.ranks):
        device = torch.device("cuda", rank) if own_devices else first.device
        experts = range(first.experts.start + rank * count, first.experts.stop + rank * count)
        planned = dataclasses.replace(first, experts=experts, device=device)
        ranks.append(RankPlan(rank, planned, _free(device) if own_devices and every_device else free))
    return EnginePlan(tuple(ranks))


def check_ranks(config: EngineConfig) -> None:
    """Raise :class:`OctavoError` with the numbers and the smallest number of ranks that fits if this one does not, or
    if a rank has no device."""
    if config.ranks > 1 and config.device.startswith("cuda:"):
        raise UsageError(f"--device {config.device} with --ranks {config.ranks}: each rank needs its own; use cuda")
    if config.ranks > 1:
        for rank in range(config.ranks):
            choose_device(config.device, rank)
    planned = plan_ranks(config)
    one = planned.first
    try:
        check_planned(planned.needed_bytes, one)
    except OctavoError as error:
        each = (
            f"The weights of a rank take {one.weight_bytes / _GIB:.2f} GiB, its state {one.capacity.bytes / _GIB:.2f} "
            f"GiB, a step {one.step_bytes / _GIB:.2f} GiB (estimated)."
        )
        sharing = f"{planned.sharers} ranks share {one.device}. " if planned.sharers > 1 else ""
        raise OctavoError(f"{error} {sharing}{each} {fitting_ranks(config)}") from error


def fitting_ranks(config: EngineConfig) -> str:
    """A sentence: the smallest number of ranks that fits on devices like rank 0's, or that there is none."""
    config = dataclasses.replace(config, device=config.device.partition(":")[0])  # each rank has a GPU of its own
    planned = plan_ranks(config)
    if config.expert_placement == "sharded":
        experts = len(planned.first.experts) * config.ranks
        counts = [count for count in range(1, min(experts, _MOST_GPUS) + 1) if experts % count == 0]
        dealt = f" over which {experts} experts can be dealt"
    else:
        counts, dealt = list(range(1, _MOST_GPUS + 1)), ", with all experts on each,"
    sharing = planned.sharers > 1 or planned.first.device.type == "cpu"
    if sharing:  # the more ranks there are, the more they need together
        counts = [1]
    # Ranks on devices of their own need the less each.
    place = bisect.bisect_left(counts, True, key=lambda count: _fits(config, count))
    if place == len(counts):
        return f"No number of ranks{dealt} fits here."
    found = counts[place]
    text = f"The smallest number of ranks that fits is {found} (--ranks {found})"
    if not sharing and found > torch.cuda.device_count():
        text += f", on as many GPUs like this one; this machine has {torch.cuda.device_count()}"
    return f"{text}."


def describe_plan(config: EngineConfig) -> list[str]:
    """What commands print before they start an engine of several ranks; nothing for one, which describes itself."""
    return plan_ranks(config).lines() if config.ranks > 1 else []


def _with_least_state(config: EngineConfig) -> EngineConfig:
    """The same engine with the smallest state, if its state would take what is free."""
    device = choose_device(config.device, 0 if config.ranks > 1 else None)
    if config.kv_tokens is not None or (config.memory_fraction is None and device.type == "cpu"):
        return config
    return dataclasses.replace(config, kv_tokens=config.max_model_len or PAGE_TOKENS, memory_fraction=None)


def _fits(config: EngineConfig, ranks: int) -> bool:
    try:
        return plan_ranks(dataclasses.replace(config, ranks=ranks)).fits
    except OctavoError:  # less than a page fits in the share of the memory that the state may take
        return False


def _free(device: torch.device) -> int | None:
    return available_memory(device) if device.index < torch.cuda.device_count() else None


def _alike(one: RankPlan) -> object:
    return one.planned.device.type, one.free_bytes


def _row(group: list[RankPlan]) -> tuple[str, ...]:
    """One row of the table for ranks that differ only in which experts and which of several like devices are theirs."""
    first, last = group[0], group[-1]
    one = first.planned
    devices = dict.fromkeys(str(each.planned.device) for each in (first, last))
    experts = [ranges(each.planned.experts) for each in (first, last)]
    if first is last:
        held = experts[0]
    elif experts[0] == experts[1]:
        held = f"{experts[0]} on each"
    else:
        held = f"{' to '.join(experts)}, {len(one.experts)} each"
    return (
        ranges([each.rank for each in group]),
        " to ".join(devices),
        held,
        size(one.weight_bytes),
        str(one.capacity.sizes.slots),
        f"{one.capacity.tokens:,}",
        size(one.capacity.bytes),
        size(one.step_bytes),
        size(one.needed_bytes),
        "no such device" if first.free_bytes is None else size(first.free_bytes),
    )
