"""``octavo bench kernels``: each operator's time on its own, against its floor and other implementations.

``case.py`` says what a case is, ``measure.py`` times it, ``report.py`` writes it down. Every other file holds the cases
of one operator, as a function that yields them, and is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.runtime.bench_kernels.attend import attend_cases
from octavo.runtime.bench_kernels.case import KernelCase
from octavo.runtime.bench_kernels.experts import experts_cases
from octavo.runtime.bench_kernels.publish import publish_cases
from octavo.runtime.bench_kernels.select import select_cases

OPERATOR_CASES: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "attend": attend_cases,
    "experts": experts_cases,
    "select": select_cases,
    "publish": publish_cases,
}
"""Cases by operator, in the order of the report."""
