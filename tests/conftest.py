"""Shared by all tests: which ones run here, how many threads they use, and what the end of a run says.

Nothing is deselected in silence: a test that cannot run here is skipped with a reason, and the run ends with the
skips counted by reason and with the number of cases behind each exhaustive proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import hypothesis
import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"
PROOF_COUNT = "proof count"


class ReportCount(Protocol):
    """Type of the fixture ``report_count``."""

    def __call__(self, name: str, count: int, note: str = "") -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the long form of every proof (make soak)")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many threads torch has, and how long hypothesis searches.

    One thread: the models are so small that threads of several processes would mostly wait for each other.
    """
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("short", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True)
    hypothesis.settings.load_profile("soak" if config.getoption("--soak") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything below ``tests/gpu`` is a GPU test. What cannot run here is skipped with its reason."""
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    skip_soak = pytest.mark.skip(reason="long form: make soak")
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if item.get_closest_marker("soak") and not config.getoption("--soak"):
            item.add_marker(skip_soak)


@pytest.fixture
def report_count(request: pytest.FixtureRequest) -> ReportCount:
    """Call with (name, count, note): how many cases a test went through. Printed, summed by name, if it passes."""

    def report(name: str, count: int, note: str = "") -> None:
        assert count > 0, f"{name}: a proof over no cases proves nothing"
        request.node.user_properties.append((PROOF_COUNT, (name, count, note)))

    return report


@pytest.fixture(scope="session")
def long_form(pytestconfig: pytest.Config) -> bool:
    """True in ``make soak``: for tests that have one body and two sizes."""
    return bool(pytestconfig.getoption("--soak"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skips = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("skipped, by reason")
    for reason, count in skips.most_common():
        terminalreporter.line(f"{count:>12,}  {reason}")
    if not skips:
        terminalreporter.line("nothing")

    counts = _proof_counts(terminalreporter.stats.get("passed", []))
    if counts:
        terminalreporter.section("proof counts")
        for (name, note), count in sorted(counts.items()):
            terminalreporter.line(f"{count:>12,}  {name}" + (f" ({note})" if note else ""))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """A skip's ``longrepr`` is (file, line, "Skipped: reason")."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _proof_counts(passed: Iterable[pytest.TestReport]) -> Counter[tuple[str, str]]:
    """Reports travel from the workers with their properties, so this holds under xdist too."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in passed:
        for key, value in report.user_properties:
            if key == PROOF_COUNT:
                assert isinstance(value, tuple)
                name, count, note = value
                counts[name, note] += count
    return counts
