"""Backend ``torch`` of products, experts, stream mixing and rotation: near the reference, and free of waits.

Also what compilers and captured graphs need of every operator that keeps no state between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.kernels.operator import Backend
from octavo.kernels.quantise import dequantise_f4_rows, dequantise_tiles
from octavo.kernels.torch_backend.dequantise import bf16_rows, bf16_tiles
from tests.conftest import ReportCount
from tests.kernels.batches import random_batch
from tests.kernels.calls import bits, call, laid_out, row_arguments, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.tolerances import assert_near
from tests.kernels.torch_calls import arguments_of, call_torch
from tests.kernels.waits import NothingWaits, WaitError

_STATE = ("attend", "commit_window", "publish", "select", "select_candidates")
DENSE = [case for case in CASES if case.operator.name not in _STATE]
TORCH = [case for case in DENSE if "torch" in case.operator.backends]
BACKENDS = [(c, b) for c in DENSE for b in c.operator.backends.values() if "cpu" in b.devices]
every_torch_case = pytest.mark.parametrize("case", TORCH, ids=lambda case: case.name)
every_size = pytest.mark.parametrize("size", (MINI, WIDE), ids=lambda size: size.name)
every_capturable_backend = pytest.mark.parametrize(
    ("case", "backend"),
    [pytest.param(c, b, id=f"{c.name}-{b.name}") for c, b in BACKENDS if b.capturable],
)
every_compilable_backend = pytest.mark.parametrize(
    ("case", "backend"),
    [pytest.param(c, b, id=f"{c.name}-{b.name}") for c, b in BACKENDS if b.compilable],
)
BATCH = random_batch(29, seed=3)


class OnTheDevice(TorchDispatchMode):
    """While it is active, operations on or to tensors of the host raise :class:`WaitError`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves((args, kwargs, result))):
            raise WaitError(f"{func} on the host")
        return result


def test_who_has_the_backend() -> None:
    """Operators that multiply matrices or whose reference no compiler takes; the others compile as they are."""
    assert {case.operator.name for case in TORCH} == {
        *("linear", "linear_f8", "linear_f32", "grouped_linear", "mhc_mix", "experts", "shared_expert"),
        *("window_latent", "index_query"),
    }
    compiled = {case.operator.name: backend.name for case, backend in BACKENDS if backend.compilable}
    assert {name for name, backend in compiled.items() if backend == "reference"} == {
        *("rms_norm", "mhc_collapse", "mhc_expand", "stream_mean", "engram_gate", "combine"),
    }
    assert {case.operator.name for case in TORCH} - set(compiled) == {"experts"}


@every_torch_case
@every_size
def test_results_are_near_the_references(case: Case, size: Size, report_count: ReportCount) -> None:
    for rows in (1, 2, 17, 96):
        given = arguments_of(case, random_batch(rows, seed=rows), size)
        assert_near(case.operator.name, call_torch(case, given), call(case.operator, given), f"{rows} rows")
    report_count("torch backend: calls against the reference", 4, size.name)


@every_torch_case
def test_memory_layout_changes_no_shape_and_little_else(case: Case) -> None:
    """Results are contiguous and have the dtype that the fake implementation says."""
    for rows in (1, 29):
        given = arguments_of(case, random_batch(rows, seed=3))
        expected = call(case.operator, given)
        for layout in ("transposed", "padded"):
            other = laid_out(case.operator, given, layout)
            actual = call_torch(case, other)
            assert_near(case.operator.name, actual, expected, layout)
            with FakeTensorMode() as mode:
                other |= {name: mode.from_tensor(value) for name, value in tensors_of(other).items()}
                fake = call_torch(case, other).results
            assert [(f.shape, f.dtype, f.stride()) for f in fake] == [
                (r.shape, r.dtype, r.stride()) for r in actual.results
            ]
            assert all(r.is_contiguous() for r in actual.results)


@every_torch_case
def test_opcheck(case: Case) -> None:
    """As ``tests/kernels/test_operators.py`` does it for references."""
    given = arguments_of(case, random_batch(7, seed=1))
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in given.values()):
        checks.append("test_schema")
    done = torch.library.opcheck(case.operator.backends["torch"].overload, (), given, test_utils=checks)
    assert set(done.values()) == {"SUCCESS"}


def test_experts_sum_in_f32_and_leave_dead_rows_zero() -> None:
    """Dead rows of NaN reach nothing. Zero is zero bits: a sum over ranks must not even turn a sign."""
    case = case_named("experts_all")
    given = arguments_of(case, BATCH)
    (clean,) = call_torch(case, given).results
    assert clean.dtype == torch.float32
    dead = ~given["live"]
    given["x"][dead] = torch.nan
    (soiled,) = call_torch(case, given).results
    assert same_bits(soiled, clean)
    assert dead.any() and same_bits(clean[dead], torch.zeros_like(clean[dead]))
    assert clean[~dead].any(1).all()


def test_experts_of_other_ranks_are_skipped() -> None:
    """Two halves add up to the whole, as far as F32 sums in another order do; rows without a resident are zero bits.

    Memory that grouped products leave as it was holds NaN meanwhile.
    """
    case = case_named("experts_all")
    given = arguments_of(case, BATCH, WIDE)
    (whole,) = call_torch(case, given).results
    parts: list[Tensor] = []
    torch.use_deterministic_algorithms(True)
    try:
        for low, high in ((0, 1), (1, 5), (5, 12)):
            matrices = {name: given[name][low:high] for name in ("w1", "s1", "w2", "s2", "w3", "s3")}
            parts += call_torch(case, given | matrices | {"first_expert": low}).results
    finally:
        torch.use_deterministic_algorithms(False)
    assert (sum(parts) - whole).abs().max() <= whole.abs().max() * 2.0**-20
    strangers = ~parts[0].any(1) & given["live"]
    assert strangers.any() and parts[0].any()
    assert same_bits(parts[0][strangers], torch.zeros_like(parts[0][strangers]))


def test_every_e4m3_code_is_exact_in_bf16_at_every_scale_from_three_on(report_count: ReportCount) -> None:
    """One tile for each scale byte, as full tiles and as ragged ones; NaN where the code or the scale is."""
    codes = torch.arange(1024).to(torch.uint8).view(32, 32).repeat(1, 253)
    scale = torch.arange(3, 256).to(torch.uint8).unsqueeze(0)
    weight = codes.view(torch.float8_e4m3fn)
    for given in (weight, weight[:31, :-3].contiguous()):
        assert_same_values(bf16_tiles(given, scale), dequantise_tiles(given, scale))
    report_count("weights dequantised exactly in BF16", codes.numel(), "E4M3 codes x scale bytes")


def test_every_e2m1_code_is_exact_in_bf16_at_every_scale(report_count: ReportCount) -> None:
    """Every byte of two codes; a scale serves 16 bytes."""
    packed = torch.arange(256).to(torch.uint8).repeat(256, 1)
    scale = torch.arange(256).to(torch.uint8).unsqueeze(1).repeat(1, 16)
    assert_same_values(bf16_rows(packed, scale), dequantise_f4_rows(packed, scale))
    stacked = bf16_rows(packed.view(8, 32, 256), scale.view(8, 32, 16))
    assert_same_values(stacked.flatten(0, 1), dequantise_f4_rows(packed, scale))
    report_count("weights dequantised exactly in BF16", 2 * packed.numel(), "E2M1 codes x scale bytes")


@every_capturable_backend
def test_nothing_waits_or_comes_from_the_host(case: Case, backend: Backend) -> None:
    """Constants come into being on the CPU; on the device ``meta``, which holds no data, other traffic shows."""
    stays_on_the_device(backend.function, case.arguments(BATCH, MINI, torch.bfloat16))


@every_compilable_backend
def test_compilers_see_any_number_of_rows(case: Case, backend: Backend) -> None:
    """One trace serves them all, and no argument is written."""
    assert not case.operator.mutates
    given = case.arguments(BATCH, MINI, torch.bfloat16)
    module = traced(backend.function, given, row_arguments(case.operator, given))
    for rows in (1, 2, 17, 96):
        given = case.arguments(random_batch(rows, seed=5), MINI, torch.bfloat16)
        before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
        actual = module(*tensors_of(given).values())
        expected = backend.function(**given)
        for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
            assert same_bits(a, b), f"{rows} rows"
        assert all(same_bits(value, given[name]) for name, value in before.items())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * float(x.sum()),
        lambda x: x * torch.tensor([2.0], device=x.device),
        lambda x: x + torch.arange(3.0).to(x.device),
    ],
    ids=("mask", "nonzero", "item", "constant", "copy"),
)
def test_the_checks_above_can_fail(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(WaitError):
        stays_on_the_device(function, {"x": torch.ones(3)})


@pytest.mark.parametrize(
    "function",
    [lambda x: x[x > 0], lambda x: torch.cat([x, x]) if x.shape[0] > 7 else x],
    ids=("mask", "branch"),
)
def test_traces_for_one_number_of_rows_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((DynamicOutputShapeException, GuardOnDataDependentSymNode)):
        traced(function, {"x": torch.ones(3)}, {"x"})


def stays_on_the_device(function: Callable[..., object], arguments: Arguments) -> None:
    with NothingWaits():
        function(**arguments)
    given = arguments | {name: value.to("meta") for name, value in tensors_of(arguments).items()}
    with OnTheDevice():
        function(**given)


def traced(function: Callable[..., object], arguments: Arguments, rows_first: Collection[str]) -> GraphModule:
    """The function's graph for any number of rows: the first extent of the tensors named ``rows_first``."""
    environment = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with FakeTensorMode(shape_env=environment) as mode, environment.ignore_fresh_unbacked_symbols():
        rows = environment.create_unbacked_symint()
        torch._check(rows >= 1)
        inputs = {}
        for name, value in tensors_of(arguments).items():
            fixed = mode.from_tensor(value, static_shapes=True)
            inputs[name] = fixed.new_empty(rows, *value.shape[1:]) if name in rows_first else fixed

        def call_with(*tensors: Tensor) -> object:
            return function(**arguments | dict(zip(inputs, tensors, strict=True)))

        return make_fx(call_with)(*inputs.values())


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def assert_same_values(actual: Tensor, expected: Tensor) -> None:
    """BF16 and F32 values agree to the bit, or are both NaN."""
    assert actual.dtype == torch.bfloat16 and actual.shape == expected.shape
    differ = bits(actual.float()) != bits(expected)
    assert not (differ & ~(actual.isnan() & expected.isnan())).any()
