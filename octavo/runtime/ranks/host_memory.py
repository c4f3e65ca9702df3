"""Memory that the ranks of a host share: one of them fills it, the others see it, read-only unless a GPU reads it.

It has no name in any file system: every rank maps it through the file descriptor of one of them. So it is freed with
the last process that maps it, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import OctavoError
from octavo.runtime.ranks.agreement import exchange


def shared_memory(size: int, ranks: int, writable: bool = False) -> tuple[Tensor, bool]:
    """[size] uint8 that all ranks of this host see, and whether this rank fills it.

    To the others it is read-only, unless it is to be ``writable``, as what is locked for a GPU here has to be. All
    ranks call it together, once they have a process group. What is filled in is there for all after the next
    collective. Raises :class:`OctavoError` if this rank cannot map what another has made.
    """
    descriptor = os.memfd_create("octavo", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        if ranks == 1:
            return _mapped(descriptor, size, writable=True), True
        group = dist.group.WORLD
        assert group is not None, "no process group"
        everybody = exchange({"host": _host(), "process": os.getpid(), "descriptor": descriptor}, group)
        maker = next(rank for rank, one in enumerate(everybody) if one["host"] == _host())
        mine = maker == dist.get_rank()
        found = _mapped(descriptor, size, writable=True) if mine else _others(everybody[maker], maker, size, writable)
        exchange({}, group)  # all have mapped it: nobody needs the descriptors any more
        return found, mine
    finally:
        os.close(descriptor)


def _host() -> str:
    """The same for processes that can see each other: of one running kernel, and of one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _others(one: dict[str, object], maker: int, size: int, writable: bool) -> Tensor:
    path = f"/proc/{one['process']}/fd/{one['descriptor']}"
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise OctavoError(
            f"{path}: memory that rank {maker} of this host shares cannot be opened ({error.strerror}). Ranks of a "
            "host have to be processes of one user."
        ) from error
    try:
        return _mapped(descriptor, size, writable)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int, writable: bool) -> Tensor:
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    with warnings.catch_warnings():
        # PyTorch has no read-only tensors, and warns.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)
