"""All cases that were asked for, and what was measured as text: a line for each variant of each case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from octavo.errors import OctavoError, UsageError
from octavo.graphs.tables import table
from octavo.runtime.assemble import Progress
from octavo.runtime.bench_kernels import OPERATOR_CASES
from octavo.runtime.bench_kernels.measure import measure_cases

_HEADINGS = ("operator", "case", "by", "us", "floor us", "of floor", "TFLOP/s", "GB/s", "times ours", "differs")
_KERNELS_SHOWN = 6
_NAME_SHOWN = 48


def measure_kernels(operators: str | None, repeat: int, progress: Progress) -> Iterator[dict[str, Any]]:
    """An entry for each case of the operators, as it is measured.

    Raises :class:`UsageError` for an operator without cases, :class:`OctavoError` where there is no CUDA device.
    """
    names = list(OPERATOR_CASES) if operators is None else operators.split(",")
    for name in names:
        if name not in OPERATOR_CASES:
            raise UsageError(f"--operators {name}: there are cases of {', '.join(OPERATOR_CASES)}. Name some of these.")
    if not torch.cuda.is_available():
        raise OctavoError("bench kernels measures a GPU: this machine has no CUDA device. See octavo doctor.")
    for done, name in enumerate(names):
        progress(name, done, len(names))
        yield from measure_cases(name, OPERATOR_CASES[name](), repeat)


def report_lines(entries: list[dict[str, Any]]) -> list[str]:
    """A table of times, then the kernels that ran, then what failed."""
    rows: list[tuple[str, ...]] = []
    kernels: dict[str, str] = {}
    failed: list[str] = []
    for entry in entries:
        what = f"{entry['operator']}, {entry['case']}"
        if "error" in entry:
            failed.append(f"failed: {what}: {entry['error']}")
            continue
        ours = next(iter(entry["variants"].values())).get("seconds")
        for name, found in entry["variants"].items():
            if "error" in found:
                failed.append(f"failed: {what}, {name}: {found['error']}")
                continue
            rows.append(_row(entry, name, found, ours))
            kernels.setdefault(_names(found["kernels"]), f"{what}, {name}")
    lines = table(_HEADINGS, rows, right="|".join(_HEADINGS[3:])) if rows else []
    lines += [f"kernels of {first}: {names}" for names, first in kernels.items()]
    return lines + failed


def _row(entry: dict[str, Any], name: str, found: dict[str, Any], ours: float | None) -> tuple[str, ...]:
    difference = found["difference"]
    return (
        entry["operator"],
        entry["case"],
        name if found["captured"] else f"{name} (not captured)",
        f"{found['seconds'] * 1e6:,.1f}",
        f"{entry['floor_seconds'] * 1e6:,.1f}",
        f"{found['share_of_floor']:.0%}",
        f"{found['operations_per_second'] / 1e12:,.0f}",
        f"{found['bytes_per_second'] / 1e9:,.0f}",
        "-" if ours is None else f"{found['seconds'] / ours:.2f}",
        "-" if difference is None else f"{difference:.1e}",
    )


def _names(kernels: list[str]) -> str:
    shown = [name if len(name) <= _NAME_SHOWN else f"{name[:_NAME_SHOWN]}..." for name in kernels[:_KERNELS_SHOWN]]
    more = len(kernels) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if kernels else "not seen by the profiler"
