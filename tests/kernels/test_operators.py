"""Every operator is what its schema, its fake implementation and its contract say."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from octavo.kernels import OPERATORS
from octavo.kernels.operator import DeadRows
from tests.conftest import ReportCount
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import assert_same, call, laid_out, mutated, row_arguments, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI

BATCH = random_batch(29, seed=3)
MODES = (torch.bfloat16, torch.float32)
FILL = {DeadRows.ZERO: 0, DeadRows.MINUS_ONE: -1}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_mode = pytest.mark.parametrize("dtype", MODES, ids=("reference", "plain"))


def test_every_operator_has_a_case(report_count: ReportCount) -> None:
    computing = {name for name, operator in OPERATORS.items() if not operator.contract.collective}
    assert {case.operator.name for case in CASES} == computing
    assert len({case.name for case in CASES}) == len(CASES)
    report_count("operators", len(OPERATORS))
    report_count("cases of operators", len(CASES))


def test_the_batch_has_what_the_tests_below_vary() -> None:
    """Otherwise they would pass without a dead row, a second request or an image row."""
    assert (~BATCH.live).sum() >= 3
    assert len(BATCH.requests) >= 4
    assert 0 < BATCH.image.sum() < BATCH.live.sum()
    assert {request.start % 2 for request in BATCH.requests} == {0, 1}


@pytest.mark.parametrize("name", [name for name, each in OPERATORS.items() if not each.contract.collective])
def test_contract_is_complete(name: str) -> None:
    operator = OPERATORS[name]
    schema = operator.overload._schema
    assert operator.name == name == schema.name.removeprefix("octavo::")
    assert {a.name for a in schema.arguments if "Tensor" in str(a.type)} == set(operator.contract.arguments)
    assert len(operator.contract.results) == len(schema.returns)
    assert re.fullmatch(r"spec/model\.md 3\.\d+(, 3\.\d+)*", operator.contract.source)
    assert operator.__doc__
    assert next(iter(operator.backends)) == "reference"
    assert all(name == backend.name for name, backend in operator.backends.items())


@every_case
def test_opcheck(case: Case) -> None:
    """torch's own check of the schema, the fake implementation and tracing.

    Its schema part compares arguments by arithmetic that F8 tensors lack; those operators are left to
    ``test_only_declared_arguments_change``.
    """
    arguments = case.arguments(random_batch(7, seed=1), MINI, torch.bfloat16)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments.values()):
        checks.append("test_schema")
    done = torch.library.opcheck(case.operator.overload, (), arguments, test_utils=checks)
    assert set(done.values()) == {"SUCCESS"}


@every_mode
@every_case
def test_only_declared_arguments_change(case: Case, dtype: torch.dtype) -> None:
    """And no result shares memory with an argument."""
    arguments = case.arguments(BATCH, MINI, dtype)
    before = {name: a.clone() for name, a in arguments.items() if isinstance(a, Tensor)}
    given = case.operator(**arguments)
    changed = {name for name, a in before.items() if not same_bits(a, arguments[name])}
    assert changed == {name for name in mutated(case.operator) if name in before}
    results = given if isinstance(given, tuple) else () if given is None else (given,)
    memory = {arguments[name].untyped_storage().data_ptr() for name in before}
    assert memory.isdisjoint(r.untyped_storage().data_ptr() for r in results)


@every_mode
@every_case
def test_fake_results_are_the_real_ones_without_data(case: Case, dtype: torch.dtype) -> None:
    """Shape, dtype and strides, for any number of rows; contiguous whatever the memory layout of the arguments."""
    for batch in (Batch(()), random_batch(1, seed=3), BATCH):
        arguments = case.arguments(batch, MINI, dtype)
        for layout in ("contiguous", "transposed", "padded"):
            given = laid_out(case.operator, arguments, layout)
            real = call(case.operator, given).results
            with FakeTensorMode() as mode:
                fake = call(case.operator, faked(given, mode)).results
            assert [shape_of(r) for r in fake] == [shape_of(r) for r in real], (batch.rows, layout)
            assert all(r.shape[0] == batch.rows and r.is_contiguous() for r in real), (batch.rows, layout)


@every_case
def test_capturable_is_what_the_reference_can_do(case: Case) -> None:
    """Static shapes and no wait for the device: exactly then the reference itself runs without data."""
    capturable = case.operator.backends["reference"].capturable
    arguments = case.arguments(BATCH, MINI, torch.bfloat16)
    with FakeTensorMode() as mode:
        arguments = faked(arguments, mode)
        try:
            case.operator.reference(**arguments)
        except (DataDependentOutputException, DynamicOutputShapeException):
            assert capturable == set()
        else:
            assert capturable == {"cpu", "cuda"}


@every_mode
@every_case
def test_dead_rows_never_reach_a_live_row_or_the_state(case: Case, dtype: torch.dtype) -> None:
    """Dead rows full of NaN change no bit of a live row and nothing that outlives the step, even in a live slot."""
    arguments = case.arguments(BATCH, MINI, dtype)
    clean = call(case.operator, arguments)
    for slot in (-7, BATCH.requests[-1].slot):
        soiled = call(case.operator, poisoned(case, arguments, ~BATCH.live, slot))
        for number, (a, b) in enumerate(zip(soiled.results, clean.results, strict=True)):
            assert same_bits(a[BATCH.live], b[BATCH.live]), f"result {number}"
        for name, value in clean.state.items():
            assert same_bits(soiled.state[name], value), name


@every_mode
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.operator.contract.results[:1] and c.operator.contract.results[0].dead in FILL],
    ids=lambda case: case.name,
)
def test_dead_rows_hold_what_the_contract_says(case: Case, dtype: torch.dtype) -> None:
    """Zero is zero bits: a sum over ranks must not even turn a sign."""
    arguments = case.arguments(BATCH, MINI, dtype)
    for given in (arguments, poisoned(case, arguments, ~BATCH.live)):
        for result, returns in zip(call(case.operator, given).results, case.operator.contract.results, strict=True):
            dead = result[~BATCH.live]
            assert same_bits(dead, torch.full_like(dead, FILL[returns.dead]))


@every_case
def test_a_step_without_live_rows_runs_and_writes_nothing(case: Case) -> None:
    batch = Batch((), dead=5)
    arguments = case.arguments(batch, MINI, torch.bfloat16)
    arguments = poisoned(case, arguments, ~batch.live)
    outcome = call(case.operator, arguments)
    for name, value in outcome.state.items():
        assert same_bits(value, arguments[name]), name
    assert all(r.shape[0] == 5 for r in outcome.results)


@pytest.mark.parametrize("case", [c for c in CASES if mutated(c.operator)], ids=lambda case: case.name)
def test_mutating_operators_write_to_the_requests_of_the_step_alone(case: Case) -> None:
    """Slots without rows and pages of other requests keep their bits."""
    batch = Batch((Request(5, 37, 4), Request(2, 0, 3)), dead=2)
    arguments = case.arguments(batch, MINI, torch.bfloat16)
    outcome = call(case.operator, arguments)
    for name, value in outcome.state.items():
        pages = arguments.get("page_table")
        own = pages[[5, 2]].flatten().long() if pages is not None and name != "pending" else torch.tensor([5, 2])
        others = torch.ones(value.shape[0], dtype=torch.bool).index_fill(0, own, False)
        assert others.any()
        assert same_bits(value[others], arguments[name][others]), name
        assert not same_bits(value[own], arguments[name][own]), name


def test_operators_carry_no_state_between_calls() -> None:
    """Two calls with the same arguments give the same bits."""
    for case in CASES:
        arguments = case.arguments(BATCH, MINI, torch.bfloat16)
        assert_same(call(case.operator, arguments), call(case.operator, arguments), case.name)


def poisoned(case: Case, arguments: Arguments, dead: Tensor, slot: int = -7) -> Arguments:
    """Dead rows hold NaN, the given slot and other valid numbers; what says that they are dead stays."""
    changed = dict(arguments)
    for name in row_arguments(case.operator, arguments):
        value = arguments[name].clone()
        if name in ("ids", "positions", "write_positions", "live"):
            continue
        if value.is_floating_point():
            value[dead] = torch.nan
        elif value.dtype == torch.bool:
            value[dead] = ~value[dead]
        else:
            value[dead] = slot if name in ("slots", "write_slots", "write_starts") else 0
        changed[name] = value
    return changed


def faked(arguments: Arguments, mode: FakeTensorMode) -> Arguments:
    return {name: mode.from_tensor(a) if isinstance(a, Tensor) else a for name, a in arguments.items()}


def shape_of(result: Tensor) -> tuple[object, ...]:
    return tuple(result.shape), result.dtype, result.stride()
