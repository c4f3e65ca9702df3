"""The Triton backend of ``mhc_mix`` on a device, against the reference and against exact sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.mhc import split_mixes
from tests.gpu.test_capturable_state import waits
from tests.kernels.batches import random_batch
from tests.kernels.calls import Outcome, assert_same, call
from tests.kernels.cases import CASES, Arguments
from tests.kernels.draw import MINI, TRUE, WIDE, Size
from tests.kernels.tolerances import LARGEST, assert_near
from tests.kernels.torch_calls import on_device

if torch.cuda.is_available():  # elsewhere these tests are skipped, and the backend is not to be registered
    from octavo.kernels import triton_backend

    assert triton_backend.__all__

CASE = next(case for case in CASES if case.operator is kernels.mhc_mix)
ROWS = (1, 2, 15, 16, 17, 64, 65, 513, 4096)
OTHER_SHAPES = ((4, 128), (4, 256), (2, 40), (3, 37), (1, 96), (8, 64), (5, 4096))
"""Streams and their width: the mini and the nano model's, then such that are no powers of two or no whole steps. Of
the last, a row has as many parts as four warps would add of four streams."""


@pytest.mark.parametrize("size", (MINI, WIDE, TRUE), ids=lambda size: size.name)
def test_the_device_is_near_the_reference_of_the_host(size: Size) -> None:
    for rows in (1, 2, 17, 96):
        given = CASE.arguments(random_batch(rows, seed=rows), size, torch.bfloat16)
        actual = Outcome(tuple(result.cpu() for result in triton(on_device(given, "cuda"))), {})
        assert_near("mhc_mix", actual, call(CASE.operator, given), f"{rows} rows")


@pytest.mark.parametrize("rows", ROWS)
def test_true_shapes_are_near_exact_sums(rows: int) -> None:
    for gain in (1.0, 2.0**40, 2.0**-40):
        check(inputs(rows, 4, 5120, gain=gain), f"streams of {gain:g}")


@pytest.mark.parametrize(("streams", "width"), OTHER_SHAPES)
def test_other_shapes_are_near_exact_sums(streams: int, width: int) -> None:
    for rows in (1, 17, 65, 600):
        check(inputs(rows, streams, width), f"{rows} rows")


def test_no_rows() -> None:
    pre, post, comb = triton(inputs(0, 4, 5120))
    assert pre.shape == post.shape == (0, 4) and comb.shape == (0, 4, 4)


def test_every_bit_of_the_matrix_counts() -> None:
    """One channel at a time: the product is the F32 value, which three BF16 numbers hold. Results that differ in the
    last bit of a weight differ."""
    given = inputs(4, 4, 5120)
    given["streams"].zero_()
    for row, channel in enumerate((0, 63, 10239, 20479)):
        given["streams"].view(4, -1)[row, channel] = 1.0
    given |= {"scale": torch.ones_like(given["scale"]), "base": torch.zeros_like(given["base"]), "norm_epsilon": 1.0}
    given["fn"] *= 40.0
    coarse = triton(given | {"fn": given["fn"].bfloat16().float()})
    cut = given["fn"].view(torch.int32).bitwise_and(-256).view(torch.float32)
    fine = triton(given | {"fn": cut})
    for wanted, without, found in zip(exact(given), coarse, triton(given), strict=True):
        error = (found - wanted).abs().max()
        assert error <= 2.0**-20, "two roundings of a sigmoid or 20 rounds of Sinkhorn"
        assert (without - wanted).abs().max() > 100 * error
    assert any(not torch.equal(a, b) for a, b in zip(fine, triton(given), strict=True))


def test_nothing_of_a_dead_row_reaches_another() -> None:
    for rows in (5, 64, 300, 1000):
        given = inputs(rows, 4, 5120)
        clean = triton(given)
        dead = torch.arange(rows, device="cuda") % 3 == 1
        given["streams"][dead] = torch.nan
        soiled = triton(given)
        live = Outcome(tuple(result[~dead] for result in clean), {})
        assert_same(Outcome(tuple(result[~dead] for result in soiled), {}), live, f"{rows} rows")


def test_memory_layout_changes_nothing() -> None:
    """Not a bit where rows are copied. What starts between two words is loaded in other pieces, so that squares are
    added in another order."""
    given = inputs(29, 4, 128)
    x = given["streams"]
    transposed = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert_same(Outcome(triton(given | {"streams": transposed}), {}), Outcome(triton(given), {}), "transposed")
    check(given | {"streams": x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)}, "offset")


def test_nothing_waits() -> None:
    for rows in (1, 300):
        given = inputs(rows, 4, 128)
        triton(given)  # compiles
        with waits("error"):
            triton(given)


@pytest.mark.parametrize("rows", (1, 40, 257, 2048))
def test_replay_on_other_inputs_equals_eager(rows: int) -> None:
    """To the bit, and calls repeat themselves: several stand in one graph."""
    static = inputs(rows, 4, 5120)
    triton(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [triton(static) for _ in range(3)]
    for seed in range(3):
        given = inputs(rows, 4, 5120, seed=seed + 1)
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        graph.replay()
        eager = Outcome(triton(given), {})
        for results in captured:
            assert_same(Outcome(results, {}), eager, f"step {seed}")


def check(given: Arguments, what: str) -> None:
    """Every row of every result against sums in F64, within what ``tests/kernels/tolerances.py`` allows F32 sums."""
    for number, (found, wanted) in enumerate(zip(triton(given), exact(given), strict=True)):
        size = torch.linalg.vector_norm(wanted.flatten(1), dim=1)
        error = torch.linalg.vector_norm((found.double() - wanted).flatten(1), dim=1) / size
        assert not error.isnan().any() and error.max() <= LARGEST["mhc_mix"], f"{what}: {number}: {error.max():.1e}"


def exact(given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients in F64."""
    flat = given["streams"].flatten(1).double()
    mixes = flat @ given["fn"].double().t()
    mixes *= torch.rsqrt(flat.square().mean(1, keepdim=True) + given["norm_epsilon"])
    scale, base = given["scale"].double(), given["base"].double()
    return split_mixes(mixes, scale, base, given["streams"].shape[1], given["iterations"], given["epsilon"])


def triton(given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = kernels.mhc_mix.backends["triton"].overload(**given)
    assert all(isinstance(result, Tensor) and result.dtype == torch.float32 for result in (pre, post, comb))
    return pre, post, comb


def inputs(rows: int, streams: int, width: int, gain: float = 1.0, seed: int = 0) -> Arguments:
    random = torch.Generator("cuda").manual_seed(seed)
    mixes = (2 + streams) * streams

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=random)

    return {
        "streams": (normal(rows, streams, width) * gain).to(torch.bfloat16),
        "fn": normal(mixes, streams * width) * (streams * width) ** -0.5,
        "scale": normal(3),
        "base": normal(mixes),
        "iterations": 20,
        "epsilon": 1e-6,
        "norm_epsilon": 1e-6,
    }
