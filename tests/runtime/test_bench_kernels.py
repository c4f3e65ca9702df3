"""``octavo bench kernels`` where there is no GPU: floors, failures that stop nothing, and the report."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from octavo.errors import OctavoError, UsageError
from octavo.runtime.bench_kernels import OPERATOR_CASES
from octavo.runtime.bench_kernels.case import KernelCase, Prepared, copies_for
from octavo.runtime.bench_kernels.measure import difference, measure_cases, names_on
from octavo.runtime.bench_kernels.report import measure_kernels, report_lines


def prepared(operations: float, moved: float) -> Prepared:
    return Prepared(variants={}, copies=2, operations=operations, bytes=moved)


def test_the_floor_is_what_takes_longer() -> None:
    assert prepared(0.0, 4.8e9).floor == pytest.approx(1e-3)
    assert prepared(989e9, 1.0).floor == pytest.approx(1e-3)


@pytest.mark.parametrize("operator", list(OPERATOR_CASES))
def test_every_case_has_a_name_of_its_own(operator: str) -> None:
    names = [case.name for case in OPERATOR_CASES[operator]()]
    assert names and len(set(names)) == len(names)


def test_a_case_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = importlib.import_module("octavo.runtime.bench_kernels.measure")
    monkeypatch.setattr(measure, "_measure", lambda case, repeat: {"variants": {}, "floor_seconds": case.floor})

    def broken() -> Prepared:
        raise ValueError("no such shape\nand more")

    def cases() -> Iterator[KernelCase]:
        yield KernelCase("first", broken)
        yield KernelCase("second", lambda: prepared(989e9, 1.0))

    first, second = measure_cases("attend", cases(), repeat=1)
    assert first["error"] == "ValueError: no such shape"
    assert second["floor_seconds"] == pytest.approx(1e-3)


def test_copies_are_several_times_what_caches_hold() -> None:
    assert [copies_for(moved, 32) for moved in (1e9, 256e6, 64e6, 1.0)] == [2, 2, 4, 32]


def test_results_are_compared_where_their_distance_means_something() -> None:
    first = torch.tensor([3.0, 4.0])
    assert difference({"triton": first, "torch": torch.tensor([3.0, 4.5])}) == pytest.approx(0.1)
    assert difference({"triton": first}) is None
    assert difference({"triton": first, "torch": first[:1]}) is None
    assert difference({"triton": first.int(), "torch": first.int() + 1}) is None


def test_the_profiler_gives_the_names_of_what_ran() -> None:
    """On the CPU, which has the same kind of events."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add_(1).add_(2)
    names = names_on(profiler, DeviceType.CPU)
    assert names.count("aten::add_") == 1
    assert names_on(profiler, DeviceType.CUDA) == []


@pytest.mark.parametrize(
    ("error", "captured"), ((torch.OutOfMemoryError("none left"), None), (RuntimeError("it waits"), False))
)
def test_too_little_memory_is_not_taken_for_a_wait(
    monkeypatch: pytest.MonkeyPatch, error: Exception, captured: bool | None
) -> None:
    """The error comes in the capture, the second time around both copies."""
    calls = []

    def call(number: int) -> None:
        calls.append(number)
        if len(calls) > 2:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    measure = importlib.import_module("octavo.runtime.bench_kernels.measure")
    if captured is None:
        with pytest.raises(torch.OutOfMemoryError):
            measure._several(call, 2, 2)
    else:
        assert measure._several(call, 2, 2)[1] is captured
    assert calls == [0, 1, 0]


def test_the_report_names_times_kernels_and_failures() -> None:
    ours = {
        "captured": True,
        "difference": None,
        "seconds": 2e-5,
        "share_of_floor": 0.5,
        "operations_per_second": 4e14,
        "bytes_per_second": 2.4e12,
        "kernels": ["place_keys", "attend_part"],
    }
    theirs = ours | {
        "captured": False,
        "difference": 1e-3,
        "seconds": 6e-5,
        "kernels": [f"k{n}" * 40 for n in range(9)],
    }
    entries: list[dict[str, Any]] = [
        {
            "operator": "attend",
            "case": "decode",
            "floor_seconds": 1e-5,
            "variants": {"triton": ours, "torch": theirs, "library": {"error": "ImportError: none"}},
        },
        {"operator": "attend", "case": "prefill", "error": "RuntimeError: out of memory"},
    ]
    text = "\n".join(report_lines(entries))
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    assert cells[2] == ["attend", "decode", "triton", "20.0", "10.0", "50%", "400", "2,400", "1.00", "-"]
    assert cells[3][2:4] == ["torch (not captured)", "60.0"] and cells[3][-2:] == ["3.00", "1.0e-03"]
    assert "kernels of attend, decode, triton: place_keys, attend_part\n" in text
    assert "and 3 more" in text and "k0" * 40 not in text
    assert "failed: attend, decode, library: ImportError: none" in text
    assert text.endswith("failed: attend, prefill: RuntimeError: out of memory")


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="--operators sort: there are cases of attend"):
        list(measure_kernels("sort", 1, lambda phase, done, total: None))


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(OctavoError, match="no CUDA device"):
        list(measure_kernels("attend", 1, lambda phase, done, total: None))
