"""Times of one case: all variants in turn, as graphs of several calls, so that the host's launches do not count."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from octavo.runtime.bench_clock import seconds_of
from octavo.runtime.bench_kernels.case import Call, KernelCase, Prepared

_CALLS = 8
"""In one graph, at least: a graph's own launch takes microseconds."""


def measure_cases(operator: str, cases: Iterator[KernelCase], repeat: int) -> Iterator[dict[str, Any]]:
    """An entry for each case, as ``--json`` writes it. A case or variant that fails says why, and others go on."""
    for case in cases:
        entry: dict[str, Any] = {"operator": operator, "case": case.name}
        try:
            entry |= _measure(case.prepare(), repeat)
        except Exception as error:
            entry["error"] = _short(error)
        gc.collect()
        torch.cuda.empty_cache()
        yield entry


def _measure(prepared: Prepared, repeat: int) -> dict[str, Any]:
    variants: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    results: dict[str, object] = {}
    calls = -(-_CALLS // prepared.copies) * prepared.copies
    for name, call in prepared.variants.items():
        try:
            results[name] = call(0)
            runs[name], captured = _several(call, calls, prepared.copies)
            runs[name]()
            torch.cuda.synchronize()
            variants[name] = {"captured": captured, "difference": difference(results)}
        except Exception as error:
            variants[name] = {"error": _short(error)}
            runs.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            times[name].append(seconds_of(run, torch.device("cuda")) / calls)
    for name, found in times.items():
        seconds = statistics.median(found)
        variants[name] |= {
            "seconds": seconds,
            "share_of_floor": prepared.floor / seconds,
            "operations_per_second": prepared.operations / seconds,
            "bytes_per_second": prepared.bytes / seconds,
        }
    for name in runs:  # last, since a profiler may slow down what follows it
        variants[name]["kernels"] = _kernels(prepared.variants[name])
    return {"floor_seconds": prepared.floor, "copies": prepared.copies, "variants": variants}


def _several(call: Call, calls: int, copies: int) -> tuple[Callable[[], None], bool]:
    """A function that makes so many calls, going around the copies, and whether it replays a graph."""

    def eagerly() -> None:
        for number in range(calls):
            call(number % copies)

    eagerly()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            eagerly()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # it waits for the device
        torch.cuda.synchronize()
        return eagerly, False
    return graph.replay, True


def difference(results: dict[str, object]) -> float | None:
    """Relative L2 of the last result against the first, if both are tensors of one shape of floating-point numbers.

    Choices are numbers of entries: how far these lie apart says nothing.
    """
    first, last = next(iter(results.values())), results[next(reversed(results))]
    if first is last or not (isinstance(first, Tensor) and isinstance(last, Tensor) and first.shape == last.shape):
        return None
    if not (first.is_floating_point() and last.is_floating_point()):
        return None
    apart = torch.linalg.vector_norm((first - last).float())
    return float(apart / torch.linalg.vector_norm(first.float()).clamp_min(1e-30))


def _kernels(call: Call) -> list[str]:
    """Names of the kernels of one call, in the order of their launches; empty if the profiler may not see them.

    Called eagerly: a replay is one launch.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call(0)
        torch.cuda.synchronize()
    return names_on(profiler, DeviceType.CUDA)


def names_on(profiler: profile, kind: DeviceType) -> list[str]:
    """What ran on one kind of device, each name once, without copies and fills."""
    # Compared by value: every event carries an object of its own.
    names = (event.name for event in profiler.events() if event.device_type == kind)
    return list(dict.fromkeys(name for name in names if not name.startswith("Mem")))


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
