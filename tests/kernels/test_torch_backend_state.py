"""Backend ``torch`` of ``attend``, ``publish`` and ``commit_window``: the reference's numbers, without a wait.

These three may stand in a captured graph, so they run on static shapes whatever lives in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import kernels
from octavo.kernels.operator import Operator
from octavo.kernels.storage import (
    load_entries,
    load_keys,
    packed_entry_bytes,
    packed_key_bytes,
    store_entries,
    store_keys,
)
from octavo.kernels.torch_backend import storage
from tests.conftest import ReportCount
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, call, laid_out, mutated, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.torch_calls import arguments_of, call_torch, poisoned
from tests.kernels.waits import NothingWaits, WaitError

OPERATORS = (kernels.attend, kernels.publish, kernels.commit_window)
BF16 = torch.bfloat16
ATTENTION_TOLERANCE = 5e-3
"""Relative L2 of a row. Both round probabilities to 8 bits, against different maxima, and results to 8 bits: four
errors of at most 2^-9, evenly spread, are 2.3e-3 together. One key of a hundred left out would be 0.1."""


def cases(*operators: Operator[..., object]) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if case.operator in operators]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


every_case = cases(*OPERATORS)
every_size = pytest.mark.parametrize("size", (MINI, WIDE), ids=lambda size: size.name)
every_storage = pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))


@every_case
def test_what_is_registered(case: Case) -> None:
    backend = case.operator.backends["torch"]
    assert backend.capturable == backend.devices == {"cpu", "cuda"}
    assert not backend.compilable
    done = torch.library.opcheck(backend.overload, (), arguments_of(case, random_batch(7, seed=1)))
    assert set(done.values()) == {"SUCCESS"}


@cases(kernels.commit_window)
@every_size
def test_windows_are_the_references(case: Case, size: Size, report_count: ReportCount) -> None:
    """To the bit: rows are only copied. Requests of more rows than a window, and of several windows, included."""
    batches = [random_batch(rows, seed) for rows in (1, 2, 7, 29, 96, 240) for seed in range(4)]
    batches.append(Batch((Request(3, 5, 2 * size.window + 3), Request(1, 0, size.window), Request(6, 7, 1)), dead=50))
    for batch in batches:
        given = arguments_of(case, batch, size)
        assert_same(call_torch(case, given), call(case.operator, given), f"{batch.rows} rows")
    report_count("torch backend: windows against the reference", len(batches), case.name)


@cases(kernels.publish)
@every_size
@every_storage
def test_pools_are_the_references(case: Case, size: Size, packed: bool, report_count: ReportCount) -> None:
    """Entries and waiting halves to the bit: the same operations row by row.

    The product with ``wk`` sums in F32, not F64: it can round to the neighbouring BF16, and then a code of the key
    differs, rarely. Allowed is one written number in a thousand.
    """
    written = differing = 0
    for rows in (1, 7, 61, 240):
        given = arguments_of(case, random_batch(rows, seed=rows), size, packed)
        actual, expected = call_torch(case, given).state, call(case.operator, given).state
        for name in expected.keys() - {"keys"}:
            assert same_bits(actual[name], expected[name]), (rows, name)
        written += int((expected["keys"] != given["keys"]).sum())
        differing += int((actual["keys"] != expected["keys"]).sum())
    assert differing <= written / 1000
    report_count("torch backend: numbers of keys against the reference", written, case.name)


@cases(kernels.attend)
@every_size
@every_storage
def test_attention_is_the_references(case: Case, size: Size, packed: bool) -> None:
    for rows in (1, 7, 61):
        given = arguments_of(case, random_batch(rows, seed=rows), size, packed)
        live = given["positions"] >= 0
        given["query"] = 4 * given["query"]  # scores of several units: peaks, not only means
        given["sink"][0] = -torch.inf
        (actual,), (expected,) = call_torch(case, given).results, call(case.operator, given).results
        assert float(relative(actual, expected)[live].max()) <= ATTENTION_TOLERANCE, rows
        assert same_bits(actual[~live], torch.zeros_like(actual[~live]))


@cases(kernels.attend)
def test_attention_of_more_rows_than_a_chunk(case: Case) -> None:
    """Seven requests of 160 rows: the second chunk of 1024 begins within one."""
    batch = Batch(tuple(Request(slot, 20 + slot, 160) for slot in range(7)), dead=9)
    given = arguments_of(case, batch)
    (actual,), (expected,) = call_torch(case, given).results, call(case.operator, given).results
    assert float(relative(actual, expected)[batch.live].max()) <= ATTENTION_TOLERANCE


@every_case
def test_memory_layout_changes_nothing(case: Case) -> None:
    for rows in (1, 29):
        given = arguments_of(case, random_batch(rows, seed=3))
        for layout in ("transposed", "padded"):
            actual = call_torch(case, laid_out(case.operator, given, layout))
            assert_same(actual, call_torch(case, given), f"{rows} rows, {layout}")
            assert all(result.is_contiguous() for result in actual.results)


@every_case
@every_storage
@pytest.mark.parametrize("slot", (-99, 0))
def test_a_step_without_live_rows_writes_nothing(case: Case, packed: bool, slot: int) -> None:
    """NaN in dead rows, in pools and as what waits; no rows at all too."""
    for rows in (0, 1, 5, 70):
        batch = Batch((), dead=rows)
        given = with_nan_in_state(case, poisoned(case, arguments_of(case, batch, MINI, packed), slot))
        outcome = call_torch(case, given)
        for name, value in outcome.state.items():
            assert same_bits(value, given[name]), (rows, name)
        for result in outcome.results:
            assert same_bits(result, torch.zeros_like(result))


@every_case
@every_storage
@pytest.mark.parametrize("slot", (-99, 0))
def test_dead_rows_reach_nothing(case: Case, packed: bool, slot: int) -> None:
    """Live rows and state keep their bits whatever dead rows hold, be it the slot of the last request.

    That request leaves a first half waiting, and the dead rows go on for longer than a window.
    """
    batch = Batch((Request(2, 36, 5), Request(5, 0, 3), Request(0, 8, 1)), dead=20)
    given = arguments_of(case, batch, MINI, packed)
    clean, soiled = call_torch(case, given), call_torch(case, poisoned(case, given, slot))
    assert_same(Outcome((), soiled.state), Outcome((), clean.state), "state")
    for name, value in call(case.operator, given).state.items():
        assert name == "keys" or same_bits(clean.state[name], value), name
    for a, b in zip(soiled.results, clean.results, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("start", (4, 5))
def test_publish_reads_only_the_half_that_waits(start: int) -> None:
    """Pools and every waiting half full of NaN, but for the slot that continues an odd position."""
    case = case_of("publish_pairs")
    given = arguments_of(case, Batch((Request(3, start, 6), Request(6, 0, 1)), dead=1))
    soiled = with_nan_in_state(case, given)
    soiled["pending"][3] = given["pending"][3] if start % 2 else torch.nan
    clean, actual = call_torch(case, given), call_torch(case, soiled)
    for name in ("entries", "keys"):
        changed = clean.state[name] != given[name]
        assert changed.any() and same_bits(actual.state[name][changed], clean.state[name][changed])
        assert actual.state[name][~changed.any(-1)].isnan().all()
    assert same_bits(actual.state["pending"][6], clean.state["pending"][6])


@cases(kernels.attend)
@pytest.mark.parametrize("missing", (torch.nan, torch.inf))
def test_places_that_hold_no_key_may_hold_anything(case: Case, missing: float) -> None:
    """Of the ring, what is not in reach; of the entries, what is not selected."""
    batch = Batch((Request(2, 36, 5), Request(5, 0, 3), Request(1, 9, 1)), dead=2)
    given = arguments_of(case, batch)
    ring = torch.full_like(given["ring"], missing)
    for request in batch.requests:
        for position in range(max(0, request.start - MINI.window + 1), request.start):
            place = request.slot, position % MINI.window
            ring[place] = given["ring"][place]
    soiled = given | {"ring": ring}
    if given["entries"] is not None:
        soiled["entries"] = torch.full_like(given["entries"], missing)
        for slot, chosen in zip(given["slots"].tolist(), given["selected"].tolist(), strict=True):
            for entry in (entry for entry in chosen if entry >= 0):
                page, place = divmod(entry, given["entries"].shape[1])
                address = given["page_table"][slot, page].long(), place
                soiled["entries"][address] = given["entries"][address]
    assert_same(call_torch(case, soiled), call_torch(case, given), case.name)


@cases(kernels.publish, kernels.commit_window)
@every_storage
def test_rows_with_one_address_write_one_value(case: Case, packed: bool) -> None:
    """A device writes the rows of a call in any order."""
    for batch in (
        random_batch(96, seed=2),
        Batch((Request(3, 5, 3 * MINI.window), Request(1, 0, 1)), dead=9),
        Batch((), dead=9),
    ):
        given = arguments_of(case, batch, MINI, packed)
        with EqualWrites() as writes:
            case.operator.backends["torch"].function(**given)
        assert writes.count == len(mutated(case.operator)) - (case.name == "publish_tokens")
        assert writes.repeated


@every_case
@every_storage
def test_nothing_waits(case: Case, packed: bool) -> None:
    """On data that does not exist: no shape, branch or constant can come from it."""
    for batch in (random_batch(29, seed=3), random_batch(1, seed=3)):
        given = arguments_of(case, batch, MINI, packed)
        with FakeTensorMode() as mode:
            fake = {name: mode.from_tensor(a) if isinstance(a, Tensor) else a for name, a in given.items()}
            with NothingWaits():
                case.operator.backends["torch"].function(**fake)


@cases(kernels.publish, kernels.commit_window)
def test_the_references_do_wait(case: Case) -> None:
    """So the test above can fail."""
    given = arguments_of(case, random_batch(29, seed=3))
    with NothingWaits(), pytest.raises(WaitError, match="nonzero"):
        case.operator.reference(**given)


@every_case
@every_storage
def test_one_trace_serves_every_step_of_its_size(case: Case, packed: bool) -> None:
    """As a captured graph would: traced for one step, run on others of as many rows, one without any live."""
    function = case.operator.backends["torch"].function
    first = arguments_of(case, random_batch(29, seed=1), MINI, packed)
    names = [name for name, value in first.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in first.items() if name not in names}

    def on_tensors(*tensors: Tensor) -> object:
        return function(**dict(zip(names, tensors, strict=True)), **rest)

    trace = make_fx(on_tensors, tracing_mode="fake")(*(first[name] for name in names))
    batches = (random_batch(29, seed=2), Batch((Request(7, 63, 29),)), Batch((), dead=29))
    for seed, batch in enumerate(batches):
        given = {name: a.clone() for name, a in arguments_of(case, batch, MINI, packed, seed).items() if name in names}
        expected = call_torch(case, {**given, **rest})
        result = trace(*(given[name] for name in names))
        state = {name: given[name] for name in expected.state}
        results = (result,) if isinstance(result, Tensor) else ()
        assert_same(Outcome(results, state), expected, f"batch {seed}")


@pytest.mark.parametrize("kind", ("entries", "keys"))
def test_stored_numbers_are_the_references(kind: str) -> None:
    """Every code, scales from the least to beyond what E4M3 holds; packed and not, to the bit."""
    store, stored, load, load_here, packed_bytes = {
        "entries": (store_entries, storage.stored_entries, load_entries, storage.load_entries, packed_entry_bytes),
        "keys": (store_keys, storage.stored_keys, load_keys, storage.load_keys, packed_key_bytes),
    }[kind]
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    values = (values * 10.0 ** torch.linspace(-38, 37, 64).unsqueeze(1)).to(BF16)
    values[0] = 0.0
    page, place = torch.arange(64) // 8, torch.arange(64) % 8
    for pool in (torch.zeros(8, 8, packed_bytes(128), dtype=torch.uint8), torch.zeros(8, 8, 128, dtype=BF16)):
        store(pool, page, place, values)
        assert same_bits(stored(pool, values), pool[page, place])
        assert same_bits(load_here(pool, page, place, 128), load(pool, page, place, 128, BF16))


class EqualWrites(TorchDispatchMode):
    """While it is active, a write of two values to one address fails."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        """Indexed writes so far."""
        self.repeated = False
        """An address was written twice."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if func is torch.ops.aten.index_put_.default:
            _, indices, values = args
            addresses = torch.stack(torch.broadcast_tensors(*indices), dim=1)
            distinct, number = addresses.unique(dim=0, return_inverse=True)
            last = torch.zeros(distinct.shape[0], dtype=torch.int64).index_put_((number,), torch.arange(len(number)))
            assert same_bits(values, values[last[number]])
            self.count += 1
            self.repeated |= len(distinct) < len(number)
        return func(*args, **(kwargs or {}))


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def with_nan_in_state(case: Case, arguments: Arguments) -> Arguments:
    """What outlives the step is NaN; bytes and classes stay."""
    names = [n for n in ("ring", "entries", "keys", "pending") if arguments.get(n) is not None]
    soiled = {n: torch.full_like(arguments[n], torch.nan) for n in names if arguments[n].is_floating_point()}
    return arguments | soiled


def relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative L2 distance of every row."""
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    error: Tensor = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    return error
