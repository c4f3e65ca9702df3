"""What a GPU does while some calls run, as the profiler sees it: launches, and when something ran.

To tell the calls apart, each stands between two copies on the device whose sizes number them; nothing else copies an
odd number of bytes of that order.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Key = TypeVar("Key", bound=Hashable)
Event = dict[str, Any]
"""As in a Chrome trace: category, start and duration in microseconds, arguments."""

_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_FIRST_MARK = 1_000_001
_PADDING = 256
"""Copies before the first call: the first events of a session may come with a wrong time, the more, the more sessions
there were."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call."""

    launches: int
    """Kernels, copies and fills that the host launched; a graph, whatever is in it, is one launch."""
    work: tuple[tuple[float, float], ...]
    """(start, end) of every kernel, copy and fill, those in graphs too, in seconds from the first start; by start."""


def record(calls: Mapping[Key, Callable[[], object]], device: torch.device) -> dict[Key, Recorded]:
    """Run the calls in order -> what was recorded of each.

    Calls are missing whose events the profiler lost, as when its buffers are full (at some 600,000 events), or which it
    has no right to see.
    """
    room = torch.zeros(2, 2 * _FIRST_MARK, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PADDING):
            _copy(room, 2)
        for number, call in enumerate(calls.values()):
            before, after = mark_bytes(number)
            _copy(room, before)
            call()
            _copy(room, after)
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    found = read_trace(trace["traceEvents"])
    return {key: found[number] for number, key in enumerate(calls) if number in found}


def mark_bytes(number: int) -> tuple[int, int]:
    """Sizes of the copies before and after a call."""
    return _FIRST_MARK + 4 * number, _FIRST_MARK + 4 * number + 2


def read_trace(events: Iterable[Event]) -> dict[int, Recorded]:
    """What stands between its two marks, by number of the call; calls that lack one of them are missing.

    What one call of the host launched has one correlation.
    """
    work = sorted((event for event in events if event.get("cat") in _WORK), key=lambda event: float(event["ts"]))
    found: dict[int, Recorded] = {}
    current: int | None = None
    gathered: list[Event] = []
    for event in work:
        mark = _mark_of(event)
        if mark is None:
            gathered.append(event)
            continue
        number, after = divmod(mark, 2)
        if after and number == current:
            found[number] = _recorded(gathered)
        current, gathered = None if after else number, []
    return found


def idle_share(pieces: Sequence[Recorded]) -> float | None:
    """Share of the pieces' own spans, each from its first start to its last end, in which nothing ran.

    None if no piece did anything.
    """
    spans = [_busy_and_whole(piece.work) for piece in pieces if piece.work]
    whole = sum(span for _, span in spans)
    return 1 - sum(busy for busy, _ in spans) / whole if whole > 0 else None


def _recorded(work: Sequence[Event]) -> Recorded:
    first = work[0]["ts"] if work else 0.0
    starts = [(event["ts"] - first) * 1e-6 for event in work]
    spans = tuple((start, start + event["dur"] * 1e-6) for start, event in zip(starts, work, strict=True))
    return Recorded(len({event["args"]["correlation"] for event in work}), spans)


def _busy_and_whole(work: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds in which something ran, and from the first start to the last end."""
    first = reached = work[0][0]
    busy = 0.0
    for start, end in work:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return busy, reached - first


def _copy(room: Tensor, size: int) -> None:
    room[0, :size].copy_(room[1, :size])


def _mark_of(event: Event) -> int | None:
    """Twice the call's number, plus one behind it; None for other work."""
    if event["cat"] != "gpu_memcpy":
        return None
    mark, other = divmod(int(event["args"].get("bytes", 0)) - _FIRST_MARK, 2)
    return mark if mark >= 0 and not other else None
