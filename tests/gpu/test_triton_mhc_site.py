"""The Triton backend of ``mhc_site`` on a device, against the references and against exact sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.mhc import split_mixes
from tests.gpu.test_capturable_state import waits
from tests.kernels.batches import random_batch
from tests.kernels.calls import Outcome, assert_same
from tests.kernels.cases import CASES, Arguments
from tests.kernels.draw import MINI, TRUE, WIDE, Size
from tests.kernels.tolerances import LARGEST
from tests.kernels.torch_calls import on_device

if torch.cuda.is_available():  # elsewhere these tests are skipped, and the backend is not to be registered
    from octavo.kernels import triton_backend

    assert triton_backend.__all__

CASE = next(case for case in CASES if case.operator is kernels.mhc_site)
ROWS = (1, 2, 16, 17, 64, 65, 128, 256, 257, 1025, 2049)
"""Every form of ``mhc_tuning.py``, and rows that fill no tile."""
WIDTHS = (128, 256, 40, 37, 96, 1100)
"""The mini and the nano model's, then such that are no whole steps."""
MOVED = 1e-4
"""Share of the inputs of the next sublayer that may differ from the reference by a step: those whose norm, the sum of
thousands of squares in another order, falls on the other side of a rounding boundary. 7e-6 at 8,192 rows."""
STEP = 2.0**-7
"""A step of BF16, of the value."""


@pytest.mark.parametrize("size", (MINI, WIDE, TRUE), ids=lambda size: size.name)
def test_the_cases_of_the_reference(size: Size) -> None:
    for rows in (1, 2, 17, 96):
        check(on_device(CASE.arguments(random_batch(rows, seed=rows), size, torch.bfloat16), "cuda"), f"{rows} rows")


@pytest.mark.parametrize("rows", ROWS)
def test_true_shapes(rows: int) -> None:
    for gain in (1.0, 2.0**40, 2.0**-40):
        check(inputs(rows, 5120, gain=gain), f"streams of {gain:g}")


@pytest.mark.parametrize("width", WIDTHS)
def test_other_widths(width: int) -> None:
    for rows in (1, 17, 65, 600):
        check(inputs(rows, width), f"{rows} rows")


def test_no_rows() -> None:
    expanded, x, pre, post, comb = triton(inputs(0, 5120))
    assert expanded.shape == (0, 4, 5120) and x.shape == (0, 5120)
    assert pre.shape == post.shape == (0, 4) and comb.shape == (0, 4, 4)


def test_the_mix_reads_rounded_streams() -> None:
    """New streams of 1 + 2^-9 are one: the mean of squares and the products say so."""
    given = inputs(3, 128)
    given["streams"].fill_(1.0)
    given |= {"y": torch.full_like(given["y"], 2.0**-9), "post": torch.ones_like(given["post"])}
    given |= {"comb": torch.eye(4, device="cuda").repeat(3, 1, 1), "pre": torch.full_like(given["pre"], 0.25)}
    expanded, x, *mixed = triton(given)
    assert (expanded == 1).all()
    assert_same(Outcome((x,), {}), Outcome((given["weight"].repeat(3, 1),), {}), "normed ones")
    for found, wanted in zip(mixed, exact(given, torch.ones_like(expanded)), strict=True):
        assert (found - wanted).abs().max() <= 1e-6


def test_nothing_of_a_dead_row_reaches_another() -> None:
    for rows in (5, 64, 300, 1000):
        given = inputs(rows, 5120)
        clean = triton(given)
        dead = torch.arange(rows, device="cuda") % 3 == 1
        for name in ("streams", "y", "post", "comb", "pre"):
            given[name][dead] = torch.nan
        live = Outcome(tuple(result[~dead] for result in clean), {})
        assert_same(Outcome(tuple(result[~dead] for result in triton(given)), {}), live, f"{rows} rows")


def test_memory_layout_changes_nothing() -> None:
    given = inputs(29, 128)
    moved = {name: transposed(value) for name, value in given.items() if isinstance(value, Tensor) and value.ndim > 1}
    assert_same(Outcome(triton(given | moved), {}), Outcome(triton(given), {}), "transposed")
    x = given["streams"]
    check(given | {"streams": x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)}, "offset")


def transposed(value: Tensor) -> Tensor:
    """The same numbers, the last axis first in memory."""
    return value.movedim(-1, 0).contiguous().movedim(0, -1)


def test_arguments_are_left_as_they_are() -> None:
    for rows in (3, 600):
        given = inputs(rows, 128)
        before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
        triton(given)
        assert all(torch.equal(given[name], value) for name, value in before.items())


def test_nothing_waits() -> None:
    for rows in (1, 300):
        given = inputs(rows, 128)
        triton(given)  # compiles
        with waits("error"):
            triton(given)


@pytest.mark.parametrize("rows", (1, 40, 257, 2048))
def test_replay_on_other_inputs_equals_eager(rows: int) -> None:
    """To the bit, and calls repeat themselves: several stand in one graph."""
    static = inputs(rows, 5120)
    triton(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [triton(static) for _ in range(3)]
    for seed in range(3):
        given = inputs(rows, 5120, seed=seed + 1)
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        graph.replay()
        eager = Outcome(triton(given), {})
        for results in captured:
            assert_same(Outcome(results, {}), eager, f"step {seed}")


@pytest.mark.parametrize("rows", (1, 700))
def test_sites_in_a_row(rows: int) -> None:
    """Each reads what the one before wrote: no kernel starts too early."""
    given = inputs(rows, 5120)
    alone, chained = dict(given), dict(given)
    for state in (alone, chained):
        for _ in range(4):
            expanded, x, pre, post, comb = triton(state)
            state |= {"streams": expanded, "y": x, "pre": pre, "post": post, "comb": comb}
            if state is alone:
                torch.cuda.synchronize()
    for name in ("streams", "y", "pre", "post", "comb"):
        assert torch.equal(alone[name], chained[name]), name


def check(given: Arguments, what: str) -> None:
    """Streams to the bit, inputs of the next sublayer nearly so, coefficients against sums in F64."""
    expanded, x, *mixed = triton(given)
    wanted = kernels.mhc_expand.reference(*(given[name] for name in ("streams", "y", "post", "comb")))
    assert_same(Outcome((expanded,), {}), Outcome((wanted,), {}), f"{what}: streams")
    wanted = kernels.mhc_collapse.reference(expanded, given["pre"], given["weight"], given["collapse_epsilon"])
    assert x.dtype == wanted.dtype and x.shape == wanted.shape
    moved = int((x != wanted).sum())
    assert moved <= 1 + MOVED * x.numel(), f"{what}: {moved} of {x.numel()} inputs moved"
    assert ((x.float() - wanted.float()).abs() <= STEP * wanted.float().abs()).all(), what
    for number, (found, right) in enumerate(zip(mixed, exact(given, expanded), strict=True)):
        length = torch.linalg.vector_norm(right.flatten(1), dim=1)
        error = torch.linalg.vector_norm((found.double() - right).flatten(1), dim=1) / length
        assert not error.isnan().any() and error.max() <= LARGEST["mhc_mix"], f"{what}: {number}: {error.max():.1e}"


def exact(given: Arguments, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of these streams in F64."""
    flat = streams.flatten(1).double()
    mixes = flat @ given["fn"].double().t()
    mixes *= torch.rsqrt(flat.square().mean(1, keepdim=True) + given["norm_epsilon"])
    scale, base = given["scale"].double(), given["base"].double()
    return split_mixes(mixes, scale, base, streams.shape[1], given["iterations"], given["epsilon"])


def triton(given: Arguments) -> tuple[Tensor, ...]:
    results = kernels.mhc_site.backends["triton"].overload(**given)
    assert isinstance(results, tuple) and len(results) == 5
    assert all(result.dtype == torch.float32 for result in results[2:])
    return results


def inputs(rows: int, width: int, gain: float = 1.0, seed: int = 0) -> Arguments:
    random = torch.Generator("cuda").manual_seed(seed)
    streams, mixes = 4, 24

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=random)

    return {
        "streams": (normal(rows, streams, width) * gain).to(torch.bfloat16),
        "y": (normal(rows, width) * gain).to(torch.bfloat16),
        "post": 2 * normal(rows, streams).sigmoid(),
        "comb": normal(rows, streams, streams).softmax(1),
        "pre": normal(rows, streams).sigmoid(),
        "weight": (normal(width) * 0.1 + 1).to(torch.bfloat16),
        "collapse_epsilon": 1e-6,
        "fn": normal(mixes, streams * width) * (streams * width) ** -0.5,
        "scale": normal(3),
        "base": normal(mixes),
        "iterations": 20,
        "epsilon": 1e-6,
        "norm_epsilon": 1e-6,
    }
