"""How long a call takes, on a GPU by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """From the first launch on an idle device to the end of its work.

    Of several ``calls`` on a GPU the mean, one behind another: the host prepares the next while the device is at the
    last, as an engine does that overlaps its steps. One more goes before them, so that the first was prepared too.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    if calls > 1:
        call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
