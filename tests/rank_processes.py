"""Engines of several ranks on the mini model, and the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octavo import EngineConfig
from tests.model.mini_run import MINI

RANKS = 2


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"model": MINI, "device": "cpu", "chunk": 48, "kv_tokens": 2048, "max_requests": 8}
    return EngineConfig(**(fields | {"ranks": RANKS, "step_deadline": 60.0} | changes))


def members(group: int) -> list[str]:
    """Processes of a process group that are no zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(folder.name)
    return found


def children() -> list[int]:
    """Ranks that this process has started and not buried."""
    own = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and "spawn_main" in command:
            own.append(int(folder.name))
    return own
