"""Backend ``torch`` of ``attend``, ``publish`` and ``commit_window`` on a device: no wait, and replay equals eager.

``select`` and ``select_candidates`` stand between captured segments: they wait once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from torch import Tensor

from octavo import kernels
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, call
from tests.kernels.cases import CASES, Case
from tests.kernels.draw import WIDE
from tests.kernels.torch_calls import arguments_of, call_torch, exactly_scored, on_device

CAPTURABLE = [c for c in CASES if c.operator in (kernels.attend, kernels.publish, kernels.commit_window)]
SELECTING = [c for c in CASES if c.operator in (kernels.select, kernels.select_candidates)]
STEPS = (random_batch(29, seed=2), Batch((Request(7, 63, 29),)), Batch((), dead=29), random_batch(29, seed=5))
"""Steps of as many rows; one is a single request that is longer than a window, one has no live row."""
every_case = pytest.mark.parametrize("case", CAPTURABLE, ids=lambda case: case.name)
every_selecting_case = pytest.mark.parametrize("case", SELECTING, ids=lambda case: case.name)
every_storage = pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))


@every_case
@every_storage
def test_nothing_waits(case: Case, packed: bool) -> None:
    for rows in (1, 29):
        given = on_device(arguments_of(case, random_batch(rows, seed=3), packed=packed), "cuda")
        with waits("error"):
            case.operator.backends["torch"].overload(**given)


@pytest.mark.parametrize("case", [c for c in CAPTURABLE if c.operator is not kernels.attend], ids=lambda c: c.name)
def test_the_references_do_wait(case: Case) -> None:
    """So the test above can fail."""
    given = on_device(arguments_of(case, random_batch(29, seed=3)), "cuda")
    with waits("error"), pytest.raises(RuntimeError, match="synchronizing"):
        case.operator(**given)


@every_case
@every_storage
def test_replay_on_other_inputs_equals_eager(case: Case, packed: bool) -> None:
    """Results and state, to the bit."""
    overload = case.operator.backends["torch"].overload
    static = on_device(arguments_of(case, random_batch(29, seed=1), packed=packed), "cuda")
    call_torch(case, static)  # libraries set up what they need before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = overload(**static)
    results = () if result is None else (result,)
    for seed, batch in enumerate(STEPS):
        given = on_device(arguments_of(case, batch, packed=packed, seed=seed), "cuda")
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        expected = call_torch(case, given)
        assert_same(Outcome(results, {name: static[name] for name in expected.state}), expected, f"step {seed}")


@every_case
@every_storage
def test_the_device_agrees_with_the_reference(case: Case, packed: bool) -> None:
    """Loosely; the tight comparison is the CPU's. Sums in another order move a rounding now and then."""
    given = on_device(arguments_of(case, random_batch(96, seed=4), WIDE, packed), "cuda")
    actual, expected = call_torch(case, given), call(case.operator, given)
    for a, b in zip(actual.results, expected.results, strict=True):
        assert torch.linalg.vector_norm((a - b).double()) <= 5e-3 * torch.linalg.vector_norm(b.double())
    for name, value in expected.state.items():
        written = int((value != given[name]).sum())
        assert int((actual.state[name] != value).sum()) <= written / 100, name


@every_selecting_case
@every_storage
def test_choices_are_the_references(case: Case, packed: bool) -> None:
    """Scores that have one answer, many of them equal: as the CPU's reference, one wait a call."""
    batches = (random_batch(96, seed=4), Batch((Request(3, 37, 150),), dead=3), Batch((), dead=1))
    for batch in batches:
        given = exactly_scored(arguments_of(case, batch, WIDE, packed))
        on_cuda = on_device(given, "cuda")
        results = call_torch(case, on_cuda).results
        assert_same(Outcome(tuple(r.cpu() for r in results), {}), call(case.operator, given), f"{batch.rows} rows")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with waits("warn"):
                case.operator.backends["torch"].overload(**on_cuda)
        assert sum("called a synchronizing" in str(warning.message) for warning in caught) == 1


@contextmanager
def waits(are: Literal["warn", "error"]) -> Iterator[None]:
    """Waits for the device are reported meanwhile; what was launched before has ended."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(are)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
