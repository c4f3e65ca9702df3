"""How much memory a device has left, and refusing to start what cannot fit."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo.errors import OctavoError, UsageError

_GIB = 1 << 30


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on ``device`` now.

    CPU: what Linux calls available, or what the control groups of this process leave, whichever is less. CUDA: free
    memory of the device. Raises :class:`UsageError` for other devices.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type == "cpu":
        return host_memory(Path("/proc"), Path("/sys/fs/cgroup"))
    raise UsageError(f"device {device}: expected cpu or cuda")


def check_memory(needed_bytes: int, device: torch.device) -> None:
    """Raise :class:`OctavoError` with the numbers and the remedies if ``device`` cannot take ``needed_bytes``."""
    available = available_memory(device)
    if needed_bytes > available:
        raise OctavoError(
            f"{device}: {needed_bytes / _GIB:.2f} GiB are needed, {available / _GIB:.2f} GiB are available. Load fewer "
            "layers or experts (--layers, --experts), keep less state (--kv-tokens, --max-requests), compute fewer "
            "rows at once (--chunk), or choose another device (--device)."
        )


def host_memory(proc: Path, cgroups: Path) -> int:
    """Available bytes from a ``/proc`` and a ``/sys/fs/cgroup``.

    Reads ``MemAvailable`` and the limits of control groups, version 2 and 1, from the process's own group up to the
    root. File pages that a group holds but could drop count as available, as they do in ``MemAvailable``.
    """
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = root / group.lstrip("/")
        # In a container the path may be that of the host: then only the root of the mount exists.
        for directory in (own, *own.parents):
            if not directory.is_relative_to(root):
                break
            available = min(available, _group_memory(directory, limit, usage, available))
    return max(available, 0)


def _group_memory(directory: Path, limit: str, usage: str, otherwise: int) -> int:
    """What the limit of one control group leaves; ``otherwise`` if it has none."""
    files = directory / limit, directory / usage, directory / "memory.stat"
    if not all(file.is_file() for file in files):
        return otherwise
    maximum, used, statistics = (file.read_text() for file in files)
    if maximum.strip() == "max":
        return otherwise
    reclaimable = dict(line.split() for line in statistics.splitlines()).get("inactive_file", "0")
    return int(maximum) - int(used) + int(reclaimable)
