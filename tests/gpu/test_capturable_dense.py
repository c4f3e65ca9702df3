"""Operators without state on a device: no wait, replay equals eager, and the backend ``torch`` near the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.operator import Backend
from tests.kernels.batches import random_batch
from tests.kernels.calls import Outcome, assert_same, call
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.tolerances import assert_near
from tests.kernels.torch_calls import on_device

_STATE = ("attend", "commit_window", "publish", "select", "select_candidates")
DENSE = [case for case in CASES if case.operator.name not in _STATE]
every_backend = pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, id=f"{case.name}-{backend.name}")
        for case in DENSE
        for backend in case.operator.backends.values()
        if "cuda" in backend.capturable
    ],
)
every_torch_case = pytest.mark.parametrize(
    "case", [case for case in DENSE if "torch" in case.operator.backends], ids=lambda case: case.name
)
every_size = pytest.mark.parametrize("size", (MINI, WIDE), ids=lambda size: size.name)


@every_backend
def test_nothing_waits(case: Case, backend: Backend) -> None:
    for rows in (1, 29):
        given = on_device(case.arguments(random_batch(rows, seed=3), MINI, torch.bfloat16), "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.overload(**given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@every_backend
@every_size
def test_replay_on_other_inputs_equals_eager(case: Case, backend: Backend, size: Size) -> None:
    """To the bit, for steps of as many rows; in one of them no row is dead."""
    static = on_device(case.arguments(random_batch(29, seed=1), size, torch.bfloat16), "cuda")
    outcome(backend, static)  # libraries set up what they need before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcome(backend, static)
    for seed in range(4):
        given = on_device(case.arguments(random_batch(29, seed), size, torch.bfloat16, seed=seed + 10), "cuda")
        if "live" in given and seed == 3:
            given["live"].fill_(True)
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        assert_same(captured, outcome(backend, given), f"step {seed}")


@every_torch_case
@every_size
def test_the_device_is_near_the_reference_of_the_host(case: Case, size: Size) -> None:
    for rows in (1, 2, 17, 96):
        given = case.arguments(random_batch(rows, seed=rows), size, torch.bfloat16)
        actual = outcome(case.operator.backends["torch"], on_device(given, "cuda"))
        on_host = Outcome(tuple(result.cpu() for result in actual.results), {})
        assert_near(case.operator.name, on_host, call(case.operator, given), f"{rows} rows")


def outcome(backend: Backend, arguments: Arguments) -> Outcome:
    results = backend.overload(**arguments)
    return Outcome(results if isinstance(results, tuple) else (results,), {})
