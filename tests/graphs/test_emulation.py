"""Emulated ranks compute what one rank computes, to the bit, and every rank ends with the same state."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from octavo.graphs.buckets import bucket_for, local_rows
from octavo.graphs.emulation import EmulatedCommunicator, run_ranks
from octavo.kernels.collectives import restored, shard_of
from octavo.passes.base import PassContext
from tests.conftest import ReportCount
from tests.passes.compiled import (
    Batch,
    batch,
    body_outputs,
    differences,
    export_body,
    fresh,
    global_rows,
    new_pools,
    resident_experts,
    run_all,
    run_on_ranks,
    state_digest,
)

LONG_BUCKETS = (64, 192, 352, 1024)


def check_steps(steps: Sequence[Batch], ranks: int, sharded: bool, buckets: tuple[int, ...]) -> int:
    """Run on ranks and with the module alone -> number of compared results."""
    expected_pools = new_pools()
    by_rank, pools = run_on_ranks(steps, ranks, sharded, buckets=buckets)
    compared = 0
    for place, step in enumerate(steps):
        expected = body_outputs(step, expected_pools)
        outputs = zip(*(results[place].outputs for results in by_rank), strict=True)
        actual = [global_rows(values, step.count, sharded) for values in outputs]
        assert not differences(expected, actual, expected_pools, expected_pools), place
        assert [results[place].state for results in by_rank] == [state_digest(expected_pools)] * ranks, place
        compared += len(actual)
    for rank in range(ranks):
        assert not differences([], [], expected_pools, pools[rank]), rank
    return compared


def mixed(rows: int, start: int = 0, seed: int = 0) -> Batch:
    """``rows`` rows of one request, or of three where there are enough: a short, a long and a single one."""
    if rows < 4:
        return batch([rows], [start], seed)
    return batch([2, rows - 3, 1], [start] * 3, seed)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_equal_one_rank(ranks: int, sharded: bool, long_form: bool, report_count: ReportCount) -> None:
    """1, cp - 1, cp, cp + 1 and 21 rows: new requests over old slots, then later steps of the same requests."""
    counts = sorted({1, ranks - 1, ranks, ranks + 1, 21})
    steps = [mixed(rows, seed=rows) for rows in counts]
    steps += [mixed(rows, start=21, seed=rows + 100) for rows in (counts if long_form else counts[-1:])]
    compared = check_steps(steps, ranks, sharded, (1, 2, 4, 8, 16, 24))
    report_count("emulated ranks: results compared to the bit", compared)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_long_batches(ranks: int, long_form: bool, report_count: ReportCount) -> None:
    """342 rows dealt over the ranks; in the long form 429 and 1023 too, and all of them on every rank."""
    counts, placements = ((342, 429, 1023), (True, False)) if long_form else ((342,), (True,))
    steps = [mixed(rows, seed=rows) for rows in counts]
    compared = sum(check_steps(steps, ranks, sharded, LONG_BUCKETS) for sharded in placements)
    report_count("emulated ranks: results compared to the bit", compared)


def test_requests_without_rows_on_a_rank() -> None:
    """Lengths 2, 9 and 1 over four ranks: two requests own no row of some ranks and keep their place."""
    steps = [batch([2, 9, 1], seed=3), batch([1, 1, 1], [2, 9, 1], seed=4)]
    assert check_steps(steps, 4, True, (1, 4)) > 0


def test_one_export_serves_all_ranks() -> None:
    """Ranks' own exports differ in the first expert alone, so tests may make a rank's graph from another's."""
    ranks, rank = 4, 3
    context = PassContext(ranks=ranks)
    own = run_all(export_body(resident_experts(rank, ranks)), context)
    made = run_all(fresh(ranks, rank), context)
    other = run_all(fresh(ranks, 0), context)
    assert [piece.text for piece in own.pieces] == [piece.text for piece in made.pieces]
    assert [piece.text for piece in own.pieces] != [piece.text for piece in other.pieces]
    assert own.buffers.keys() == made.buffers.keys()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_restored_shards(ranks: int) -> None:
    """Shards padded to equal length, side by side, restore to global order with the padding past the last row."""
    for rows in (1, 7, 21, 342, 429, 1023):
        values = torch.arange(1, rows + 1)
        capacity = bucket_for(local_rows(rows, ranks), (1, 2, 8, 64, 1024))
        assert capacity is not None
        shards = [shard_of(values, rank, ranks) for rank in range(ranks)]
        padded = [torch.cat([shard, shard.new_zeros(capacity - len(shard))]) for shard in shards]
        whole = restored(torch.cat(padded), ranks)
        assert torch.equal(whole[:rows], values)
        assert not whole[rows:].any()


def test_shard_lengths() -> None:
    assert [len(shard_of(torch.arange(21), rank, 4)) for rank in range(4)] == [6, 5, 5, 5]


def test_collectives() -> None:
    """Gathers in both orders, sums with and without scatter, as every rank sees them."""

    def work(communicator: EmulatedCommunicator) -> list[torch.Tensor]:
        mine = torch.tensor([communicator.rank, communicator.rank + 10])
        ordered, also = communicator.gather([mine, mine * 2], True)
        (joined,) = communicator.gather([mine], False)
        addend = torch.arange(6) * 10**communicator.rank
        return [ordered, also, joined, communicator.reduce(addend, False), communicator.reduce(addend, True)]

    results = run_ranks(3, work)
    for rank, (ordered, also, joined, total, part) in enumerate(results):
        assert ordered.tolist() == [0, 1, 2, 10, 11, 12]
        assert also.tolist() == [0, 2, 4, 20, 22, 24]
        assert joined.tolist() == [0, 10, 1, 11, 2, 12]
        assert total.tolist() == [0, 111, 222, 333, 444, 555]
        assert part.tolist() == total[2 * rank : 2 * rank + 2].tolist()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_error_on_one_rank_is_raised(bad_rank: int) -> None:
    """The others wait in a collective; they are released, and the error is the rank's own."""
    before = threading.active_count()

    def work(communicator: EmulatedCommunicator) -> None:
        communicator.gather([torch.ones(1)], True)
        if communicator.rank == bad_rank:
            raise ValueError(f"rank {bad_rank} failed")
        communicator.reduce(torch.ones(3), True)

    with pytest.raises(ValueError, match=f"rank {bad_rank} failed"):
        run_ranks(3, work)
    assert threading.active_count() == before


@pytest.mark.timeout(60)
def test_ranks_that_bring_different_counts() -> None:
    def work(communicator: EmulatedCommunicator) -> None:
        communicator.gather([torch.ones(1)] * (1 + communicator.rank), True)

    with pytest.raises(ValueError, match="argument"):
        run_ranks(2, work)
