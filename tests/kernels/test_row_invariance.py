"""Design section 8: in mode ``reference`` a row's bits depend on nothing but the row.

Not on how many rows share the call, where the row stands, how rows lie in memory, or how many threads run. Operators
that see requests (ordered arguments) promise the same of requests: a request alone, among others, before or after
them. All comparisons are bitwise; a difference of one bit would make chunked, batched or sharded answers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from octavo.kernels.operator import Need
from tests.conftest import ReportCount
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, call, laid_out, same_bits, take
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, TRUE, WIDE, Size

Choice = TypeVar("Choice")
COUNTS = (1, 2, 3, 7, 16, 61, 96)
TWO_THREADS_EVERY = 5
"""One choice in so many also runs on two threads; in the long form all do. Two threads on one busy core are slow."""
SIZES = (MINI, WIDE, pytest.param(TRUE, marks=pytest.mark.soak))
_NEEDS = {case.name: set(case.operator.contract.arguments.values()) for case in CASES}
by_row = pytest.mark.parametrize(
    "case", [c for c in CASES if _NEEDS[c.name] & {Need.ROWS, Need.EVERY}], ids=lambda case: case.name
)
by_request = pytest.mark.parametrize(
    "case", [c for c in CASES if Need.ORDERED in _NEEDS[c.name]], ids=lambda case: case.name
)
pytestmark = pytest.mark.usefixtures("restore_threads")
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)


@by_row
@every_size
def test_rows_do_not_depend_on_their_company(
    case: Case, size: Size, report_count: ReportCount, long_form: bool
) -> None:
    """Fewer rows, moved rows, rows in another order, rows dealt over ranks."""
    everything = torch.arange(96)
    arguments = case.arguments(random_batch(96, seed=5), size, torch.bfloat16)
    whole = on_one_thread(case, arguments)
    choices = [everything, *windows(), *permutations(), *(everything[rank::3] for rank in range(3))]
    count = 0
    for rows in on_one_and_two_threads(choices, long_form):
        given = take(case.operator, arguments, rows, everything)
        expected = Outcome(tuple(r[rows] for r in whole.results), {})
        assert_same(call(case.operator, given), expected, f"{torch.get_num_threads()} threads, rows {rows.tolist()}")
        count += 1
    report_count("row-invariance: calls on chosen rows", count, size.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@every_size
def test_memory_layout_changes_nothing(case: Case, size: Size, report_count: ReportCount, long_form: bool) -> None:
    count = 0
    for rows in (3, 96):
        arguments = case.arguments(random_batch(rows, seed=6), size, torch.bfloat16)
        expected = on_one_thread(case, arguments)
        for layout in on_one_and_two_threads(("transposed", "padded"), long_form):
            actual = call(case.operator, laid_out(case.operator, arguments, layout))
            assert_same(actual, expected, f"{rows} rows, {torch.get_num_threads()} threads, {layout}")
            count += 1
    report_count("row-invariance: memory layouts", count, size.name)


@by_request
@every_size
def test_requests_do_not_depend_on_their_company(
    case: Case, size: Size, report_count: ReportCount, long_form: bool
) -> None:
    """Any requests in any order in one step give what each gives alone, and leave the state that they leave in turn.

    The one of varying length continues an odd position, so its window and its pair begin before the step.
    """
    orders: Sequence[tuple[int, ...]] = ((3, 1, 2, 0), (2,), (2, 0), (0, 2), (0, 1, 2, 3))
    count = 0
    for rows in COUNTS:
        others = (Request(6, 0, 5), Request(1, 63, 9)), (Request(0, 126, 1),)
        batch = Batch((*others[0], Request(3, 37, rows), *others[1]), dead=3)
        arguments = case.arguments(batch, size, torch.bfloat16)
        torch.set_num_threads(1)
        alone = {order: in_turn(case, arguments, batch, order) for order in orders}
        for order in on_one_and_two_threads(orders, long_form):
            together = call(case.operator, take(case.operator, arguments, batch.rows_of(order)))
            assert_same(together, alone[order], f"{rows} rows, {torch.get_num_threads()} threads, requests {order}")
            count += 1
    report_count("row-invariance: requests together and alone", count, size.name)


def test_the_comparison_sees_one_bit() -> None:
    zero = torch.zeros(3, 2)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.bfloat16())
    assert same_bits(zero * torch.nan, zero * torch.nan)
    with pytest.raises(AssertionError, match=r"here: result 0 differs in rows \[1\]"):
        assert_same(Outcome((torch.tensor([[1.0], [-0.0]]),), {}), Outcome((torch.tensor([[1.0], [0.0]]),), {}), "here")


def on_one_and_two_threads(choices: Sequence[Choice], long_form: bool) -> Iterator[Choice]:
    """All choices with one thread, then the first and some more (or all of them) with two."""
    torch.set_num_threads(1)
    yield from choices
    torch.set_num_threads(2)
    yield from choices[:: 1 if long_form else TWO_THREADS_EVERY]


def windows() -> Iterator[Tensor]:
    """Every count of rows at the beginning, in the middle and at the end of 96."""
    for count in COUNTS:
        yield from (torch.arange(low, low + count) for low in sorted({0, min(5, 96 - count), 96 - count}))


def permutations() -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(0)
    yield torch.arange(95, -1, -1)
    yield torch.randperm(96, generator=random)
    yield torch.randperm(96, generator=random)[:61]


def on_one_thread(case: Case, arguments: Arguments) -> Outcome:
    torch.set_num_threads(1)
    return call(case.operator, arguments)


def in_turn(case: Case, arguments: Arguments, batch: Batch, order: Sequence[int]) -> Outcome:
    """Each request in a step of its own, one after the other on the same state."""
    results: list[tuple[Tensor, ...]] = []
    state: dict[str, Tensor] = {}
    for request in order:
        outcome = call(case.operator, take(case.operator, arguments | state, batch.rows_of([request])))
        results.append(outcome.results)
        state |= outcome.state
    return Outcome(tuple(torch.cat(parts) for parts in zip(*results, strict=True)), state)
