"""Collectives of programs over a process group: gloo between CPUs, NCCL between GPUs.

Everything travels as bytes, since not every backend knows every dtype. Sums are made by each receiver in the order of
the ranks, so that they are the same whatever carries them, and equal on all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.collectives import Capturable, restored, shard_of

_AT_ONCE = 1 << 17
"""Bytes of a sum up to which every rank sends all it has to all: one message instead of two, but more bytes."""


class GroupCommunicator:
    """This process's end of the default process group, as :class:`octavo.kernels.collectives.Communicator`."""

    def __init__(self) -> None:
        """The group has been initialised."""
        group = dist.group.WORLD
        assert group is not None, "no process group"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.capturable = Capturable(False, "nobody has tried")
        self._name = group.group_name

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        return [shard_of(value, self.rank, self.ranks) for value in values]

    def gather(self, values: list[Tensor], ordered: bool) -> list[Tensor]:
        packed = [_bytes(value) for value in values]
        everybody = self._all_gather(torch.cat(packed)).split([part.numel() for part in packed], dim=1)
        joined = [
            part.contiguous().view(value.dtype).view(self.ranks * value.shape[0], *value.shape[1:])
            for value, part in zip(values, everybody, strict=True)
        ]
        return [restored(value, self.ranks) for value in joined] if ordered else joined

    def reduce(self, value: Tensor, scatter: bool) -> Tensor:
        if scatter:
            return self._own_part(value).view(value.shape[0] // self.ranks, *value.shape[1:])
        if value.nbytes <= _AT_ONCE:
            return _sum(self._all_gather(_bytes(value)).view(value.dtype).view(self.ranks, *value.shape))
        flat = F.pad(value.flatten(), (0, -value.numel() % self.ranks))
        parts = self._all_gather(_bytes(self._own_part(flat))).view(value.dtype)
        return parts.flatten()[: value.numel()].view(value.shape)

    def _own_part(self, value: Tensor) -> Tensor:
        """Sum over the ranks of this rank's part of a value that is cut into as many, flat."""
        sizes = [value.nbytes // self.ranks] * self.ranks
        sent = torch.ops._c10d_functional.all_to_all_single(_bytes(value), sizes, sizes, self._name)
        return _sum(torch.ops._c10d_functional.wait_tensor(sent).view(value.dtype).view(self.ranks, -1))

    def _all_gather(self, mine: Tensor) -> Tensor:
        """[n] uint8 of every rank -> [ranks, n]."""
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(mine, self.ranks, self._name)
        whole: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
        return whole.view(self.ranks, -1)


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _sum(addends: Tensor) -> Tensor:
    """[ranks, ...] -> their sum, rank after rank."""
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total
