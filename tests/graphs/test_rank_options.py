"""Emulated ranks that all hold every expert, and collectives inside segments: what one rank computes, to the bit."""

from __future__ import annotations

import pytest

from octavo.graphs.carried import moves_rows
from octavo.graphs.facts import facts_of
from octavo.graphs.moves import moves_of
from octavo.graphs.pages import collectives_page
from octavo.graphs.program import Program
from octavo.graphs.program_text import program_text
from octavo.kernels.collectives import Capturable, gather_rows, reduce_rows
from octavo.kernels.experts import experts
from octavo.kernels.operator import DeadRows, Gives, Need
from octavo.passes.base import Compilation, GraphError, PassContext, operator_of
from octavo.passes.breaks import PieceKind
from tests.conftest import ReportCount
from tests.passes.compiled import (
    CPU,
    Batch,
    batch,
    body_outputs,
    collectives,
    compiled,
    config,
    differences,
    global_rows,
    new_pools,
    resident_tensors,
    run_on_ranks,
    state_digest,
)

STEPS = (batch([2, 18, 1], seed=1), batch([1, 4, 2], [2, 18, 1], seed=2))


def check(steps: tuple[Batch, ...], ranks: int, sharded: bool, *, captured: bool, replicated_experts: bool) -> int:
    expected_pools = new_pools()
    by_rank, pools = run_on_ranks(
        steps, ranks, sharded, buckets=(4, 24), captured=captured, replicated_experts=replicated_experts
    )
    compared = 0
    for place, step in enumerate(steps):
        expected = body_outputs(step, expected_pools)
        outputs = zip(*(results[place].outputs for results in by_rank), strict=True)
        actual = [global_rows(values, step.count, sharded) for values in outputs]
        assert not differences(expected, actual, expected_pools, expected_pools), place
        assert [results[place].state for results in by_rank] == [state_digest(expected_pools)] * ranks, place
        compared += len(actual)
    for rank_pools in pools:
        assert not differences([], [], expected_pools, rank_pools)
    return compared


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize(
    ("captured", "replicated_experts"),
    [(True, False), (False, True), (True, True)],
    ids=["captured", "experts", "both"],
)
def test_ranks_equal_one_rank(
    sharded: bool, captured: bool, replicated_experts: bool, report_count: ReportCount
) -> None:
    """Three ranks cannot deal eight experts, and need not."""
    ranks = 3 if replicated_experts else 2
    compared = check(STEPS, ranks, sharded, captured=captured, replicated_experts=replicated_experts)
    report_count("emulated ranks: results compared to the bit", compared)


def test_nothing_moves_for_replicated_experts() -> None:
    """What attention needs in global order is all that is gathered; decode steps have no collective."""
    layers = config().text_config.num_hidden_layers
    sharded = collectives(compiled(4, replicated_experts=True))
    assert [operator_of(node) for node in sharded] == [gather_rows] * layers
    assert all(node.args[2] for node in sharded)
    assert not collectives(compiled(4, sharded=False, replicated_experts=True))
    assert sum(operator_of(node) is reduce_rows for node in collectives(compiled(4))) == layers


def test_a_complete_contract() -> None:
    """With all weights an operator of partial sums works row by row; others stay as they are."""
    complete = experts.contract.complete()
    assert experts.contract.partial and not complete.partial
    assert {name for name, need in complete.arguments.items() if need is Need.ROWS} == {"x", "live", "image"}
    assert Need.EVERY not in complete.arguments.values()
    assert [(result.gives, result.dead) for result in complete.results] == [(Gives.ROWS, DeadRows.ZERO)]
    assert gather_rows.contract.complete() is gather_rows.contract


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_captured_collectives_cut_nothing(sharded: bool) -> None:
    """Segments end at breaks alone, and what moves and is told of it stays the same."""
    apart, within = compiled(4, sharded=sharded), compiled(4, sharded=sharded, captured=True)
    kinds = [instruction.kind for instruction in within.instructions]
    assert PieceKind.COLLECTIVE not in kinds
    assert len(kinds) < len(apart.instructions)
    segments = [each for each in within.instructions if each.kind is PieceKind.SEGMENT]
    assert any(moves_rows(each.module) for each in segments)
    contexts = [context(sharded, captured) for captured in (False, True)]
    told = [moves_of(each, of) for each, of in zip((apart, within), contexts, strict=True)]
    assert len(told[0]) == len(collectives(apart))
    plain = [
        [(m.layers, m.operation, m.values, m.readers, m.why, m.bytes_in, m.bytes_out, m.bytes_sent) for m in moves]
        for moves in told
    ]
    assert plain[0] == plain[1]
    assert {move.piece for move in told[1]} <= {each.number for each in segments}


def test_a_segment_that_moves_rows_needs_a_communicator() -> None:
    with pytest.raises(GraphError, match=r"segment.*: the program moves rows between ranks and has no communicator"):
        Program(compiled(2, captured=True), resident_tensors(0, 2, new_pools()), (4,), CPU).warm_up()


@pytest.mark.parametrize("captured", [False, True])
def test_the_dump_tells_whether_and_why(captured: bool) -> None:
    facts = facts_of(compiled(2, captured=captured), context(True, captured, ranks=2), (8,))
    told = facts["collectives_captured"]
    assert told["value"] is captured and told["reason"] == "as the test says"
    assert told["bytes_sent_per_row"] == sum(move["bytes_sent_per_row"] for move in facts["collectives"]) > 0
    page = "\n".join(collectives_page(facts))
    where = "in captured segments" if captured else "instructions of their own, between captured segments"
    assert f"They are {where}: as the test says." in page


def test_the_program_as_text_calls_the_communicator() -> None:
    """Amid a segment, which then takes it as an argument."""
    compilation: Compilation = compiled(2, captured=True)
    lines = program_text(compilation, facts_of(compilation, context(True, True, ranks=2), (8,)), "a test")
    text = "\n".join(lines)
    compile(text, "program", "exec")
    assert "communicator.gather([" in text and "communicator.reduce(" in text
    assert "octavo.gather_rows" not in text and "octavo.reduce_rows" not in text


def context(sharded: bool, captured: bool, ranks: int = 4) -> PassContext:
    return PassContext(ranks=ranks, sharded=sharded, collectives=Capturable(captured, "as the test says"))
