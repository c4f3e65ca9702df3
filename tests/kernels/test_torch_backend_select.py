"""Backend ``torch`` of ``select`` and ``select_candidates``: the reference's choices, in whatever pieces it scores."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.kernels.torch_backend import index_scores
from tests.conftest import ReportCount
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, call, laid_out, same_bits, take
from tests.kernels.cases import CASES, Case
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.torch_calls import arguments_of, call_torch, exactly_scored, poisoned

OPERATORS = (kernels.select, kernels.select_candidates)
BATCHES = {
    "mixed": random_batch(96, seed=4),
    "one prompt": Batch((Request(3, 37, 150),), dead=3),
    "one row each": Batch(tuple(Request(slot, 25 * slot + 3, 1) for slot in (4, 0, 6, 1, 7, 3, 2, 5)), dead=3),
    "prompts beside single rows": Batch(
        (Request(4, 190, 1), Request(1, 0, 40), Request(0, 60, 2), Request(7, 100, 20), Request(2, 0, 1)), dead=5
    ),
    "one row": Batch((Request(5, 70, 1),)),
    "first row": Batch((Request(5, 0, 1),)),
    "one dead row": Batch((), dead=1),
    "no row": Batch(()),
}
every_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.operator in OPERATORS], ids=lambda case: case.name
)
every_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
every_storage = pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))


@every_case
def test_what_is_registered(case: Case) -> None:
    backend = case.operator.backends["torch"]
    assert backend.devices == {"cpu", "cuda"}
    assert not backend.capturable and not backend.compilable
    done = torch.library.opcheck(backend.overload, (), arguments_of(case, random_batch(7, seed=1)))
    assert set(done.values()) == {"SUCCESS"}


@every_case
@every_batch
@every_storage
@pytest.mark.parametrize("size", (MINI, WIDE), ids=lambda size: size.name)
def test_exact_scores_choose_the_same(case: Case, batch: Batch, packed: bool, size: Size) -> None:
    """Equal scores included: the lower entry."""
    given = exactly_scored(arguments_of(case, batch, size, packed))
    assert_same(call_torch(case, given), call(case.operator, given), case.name)


@every_case
def test_other_scores_choose_nearly_the_same(case: Case, report_count: ReportCount) -> None:
    """Products summed in F32 instead of F64 can round to the neighbouring BF16, which moves a score that was close to
    another. That is rare: at most one choice in a hundred."""
    same = count = 0
    for seed in range(5):
        given = arguments_of(case, random_batch(96, seed), WIDE, seed=seed)
        for actual, expected in zip(call_torch(case, given).results, call(case.operator, given).results, strict=True):
            kept = (actual.unsqueeze(2) == expected.unsqueeze(1)) & (expected >= 0).unsqueeze(1)
            same, count = same + int(kept.sum()), count + int((expected >= 0).sum())
            assert ((actual >= 0).sum(1) == (expected >= 0).sum(1)).all()
    assert same >= 0.99 * count
    report_count("torch backend: choices against the reference", count, case.name)


@every_case
@every_batch
@pytest.mark.parametrize("shared_from", (1, 16, 1000))
@pytest.mark.parametrize("piece", (1, 30_000))
def test_pieces_change_nothing(
    case: Case, batch: Batch, shared_from: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row or a few at a time; keys gathered for a request or for each row."""
    given = exactly_scored(arguments_of(case, batch))
    whole = call_torch(case, given)
    monkeypatch.setattr(index_scores, "PIECE", piece)
    monkeypatch.setattr(index_scores, "SHARED_FROM", shared_from)
    assert_same(call_torch(case, given), whole, case.name)


@pytest.mark.parametrize("most", (0, 4, 10, 24, 1000))
def test_pieces_hold_no_more_than_they_may(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and keys of a piece of single rows; a row that is too large on its own is a piece of its own."""
    case = next(case for case in CASES if case.name == "select_pairs")
    given = arguments_of(case, BATCHES["one row each"])
    per_entry = MINI.index_heads + MINI.index_dim
    monkeypatch.setattr(index_scores, "PIECE", most * per_entry)
    names = ("query", "weights", "keys", "page_table", "slots", "positions")
    pieces = [scores.shape for _, scores in index_scores.scored_rows(*(given[name] for name in names))]
    assert sum(rows for rows, _ in pieces) == 8
    assert all(rows == 1 or rows * entries <= most for rows, entries in pieces)
    assert (len(pieces) == 1) == (most == 1000)


@every_case
def test_rows_may_come_in_any_order(case: Case) -> None:
    """As they do when rows are dealt over ranks."""
    given = exactly_scored(arguments_of(case, BATCHES["prompts beside single rows"]))
    whole = call_torch(case, given)
    rows = torch.randperm(69, generator=torch.Generator().manual_seed(0))
    for chosen in (rows, rows[:30], torch.arange(0, 69, 3)):
        expected = Outcome(tuple(result[chosen] for result in whole.results), {})
        assert_same(call_torch(case, take(case.operator, given, chosen)), expected, case.name)


@every_case
def test_memory_layout_changes_nothing(case: Case) -> None:
    given = exactly_scored(arguments_of(case, BATCHES["mixed"]))
    for layout in ("transposed", "padded"):
        actual = call_torch(case, laid_out(case.operator, given, layout))
        assert_same(actual, call_torch(case, given), layout)
        assert all(result.is_contiguous() for result in actual.results)


@every_case
@pytest.mark.parametrize("slot", (-99, 2))
def test_dead_rows_choose_nothing_and_reach_nothing(case: Case, slot: int) -> None:
    for name, batch in BATCHES.items():
        given = arguments_of(case, batch)
        soiled = call_torch(case, poisoned(case, given, slot))
        assert_same(soiled, call_torch(case, given), name)
        for result in soiled.results:
            dead = result[~batch.live]
            assert same_bits(dead, torch.full_like(dead, -1))


@every_case
def test_keys_that_no_row_may_see_can_hold_anything(case: Case) -> None:
    """Pages of others and entries past every visible one are full of NaN."""
    batch = BATCHES["prompts beside single rows"]
    given = arguments_of(case, batch)
    keys, table = given["keys"], given["page_table"]
    soiled = torch.full_like(keys, torch.nan)
    for request in batch.requests:
        for entry in range((request.start + request.count) * keys.shape[1] // 64):
            address = table[request.slot, entry // keys.shape[1]].long(), entry % keys.shape[1]
            soiled[address] = keys[address]
    assert_same(call_torch(case, given | {"keys": soiled}), call_torch(case, given), case.name)


def test_ties_go_to_the_lower_entry_and_the_newest_block_counts() -> None:
    """A zero query scores every entry alike, and so do its blocks."""
    case = next(case for case in CASES if case.name == "select_candidates")
    given = arguments_of(case, Batch((Request(1, 90, 1), Request(2, 20, 20))))
    given["query"] = torch.zeros_like(given["query"])
    selected, candidates = call_torch(case, given).results
    assert selected.tolist() == [list(range(8))] * 21
    newest = [90 // 4, *(position // 4 for position in range(20, 40))]
    assert candidates.tolist() == [[0, 1, block] for block in newest]
