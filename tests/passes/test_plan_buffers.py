"""The buffer plan, judged from the graph and the pieces alone."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from octavo.kernels.operator import DeadRows
from octavo.passes.base import PIECE, VALUE, Compilation, InputKind, PassContext, operator_of
from octavo.passes.plan_buffers import INPUT_PIECE
from tests.passes.compiled import fresh, run_all

CASES = [(1, True), (4, True), (4, False)]


@pytest.fixture(scope="module", params=CASES, ids=["one rank", "sharded", "replicated"])
def planned(request: pytest.FixtureRequest) -> tuple[Compilation, int]:
    ranks, sharded = request.param
    compilation = run_all(fresh(ranks), PassContext(ranks=ranks, sharded=sharded), last="plan_buffers")
    return compilation, ranks if sharded else 1


def life(node: Node, end: int) -> tuple[int, set[int]]:
    """Piece that makes a value and those that read it, from the graph."""
    return node.meta.get(PIECE, INPUT_PIECE), {user.meta.get(PIECE, end) for user in node.users}


def test_every_crossing_value_is_covered(planned: tuple[Compilation, int]) -> None:
    """A value read beyond its piece has a buffer, and nothing else has."""
    compilation, _ = planned
    end = len(compilation.pieces)
    crossing = set()
    for node in compilation.graph.nodes:
        made, readers = life(node, end)
        moving = node.op == "placeholder" and compilation.inputs[node.name].kind in (InputKind.ROWS, InputKind.WRITES)
        value = node.op == "call_function" and isinstance(node.meta[VALUE], Tensor)
        if (moving and readers) or (value and readers - {made}):
            crossing.add(node.name)
            buffer = compilation.buffers[node.name]
            assert (buffer.writer, set(buffer.readers), buffer.last) == (made, readers, max(readers)), node
    assert crossing == set(compilation.buffers)
    assert len(crossing) > 50


def test_no_tuple_crosses(planned: tuple[Compilation, int]) -> None:
    """Results are unpacked in the piece that makes them."""
    for node in planned[0].calls():
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, Node)
            assert node.meta[PIECE] == source.meta[PIECE]


def test_lives_are_disjoint_within_a_storage(planned: tuple[Compilation, int]) -> None:
    """At no piece does a storage hold two values that are needed: one is still read while another is written."""
    compilation, _ = planned
    end = len(compilation.pieces)
    nodes = {node.name: node for node in compilation.graph.nodes}
    held: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, buffer in compilation.buffers.items():
        made, readers = life(nodes[name], end)
        held[buffer.storage].append((made, max(readers), name))
    shared = 0
    for lives in held.values():
        lives.sort()
        for (_, last, first), (made, _, second) in itertools.pairwise(lives):
            assert last < made, (first, second)
            shared += 1
    assert shared > 0


def test_inputs_and_results_share_nothing_they_must_keep(planned: tuple[Compilation, int]) -> None:
    compilation, _ = planned
    users = defaultdict(list)
    for buffer in compilation.buffers.values():
        users[buffer.storage].append(buffer)
    kept = [b for b in compilation.buffers.values() if b.writer == INPUT_PIECE or b.last == len(compilation.pieces)]
    assert len(kept) > 5
    assert all(len(users[buffer.storage]) == 1 for buffer in kept)


def test_shapes(planned: tuple[Compilation, int]) -> None:
    """dtype and row shape are the value's; its rows are the bucket's, or the bucket's on all ranks together."""
    compilation, factor = planned
    factors = set()
    for node in compilation.graph.nodes:
        if node.name not in compilation.buffers:
            continue
        buffer, value = compilation.buffers[node.name], node.meta[VALUE]
        assert (buffer.dtype, buffer.row_shape) == (value.dtype, tuple(value.shape[1:]))
        rows = _row_inputs(compilation)[0].meta[VALUE].shape[0]
        assert value.shape[0] == buffer.rows_factor * rows, node
        size = torch.empty(1, *value.shape[1:], dtype=value.dtype, device="meta").nbytes
        assert buffer.row_bytes == size * buffer.rows_factor
        factors.add(buffer.rows_factor)
    assert factors == {1, factor}


def _row_inputs(compilation: Compilation) -> list[Node]:
    inputs = [n for n in compilation.graph.nodes if n.op == "placeholder"]
    return [node for node in inputs if compilation.inputs[node.name].kind is InputKind.ROWS]


def test_policies(planned: tuple[Compilation, int]) -> None:
    """Dead rows hold an input's fill, or what the contract of the writing operator says."""
    compilation, _ = planned
    found = set()
    for node in compilation.graph.nodes:
        if node.name not in compilation.buffers:
            continue
        policy = compilation.buffers[node.name].dead_rows
        source, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        assert isinstance(source, Node)
        known = operator_of(source)
        if node.op == "placeholder":
            assert policy == f"filled with {compilation.inputs[node.name].fill}"
        elif known is not None and len(known.contract.results) > 1:
            assert policy == known.contract.results[int(str(index))].dead.value
        elif known is not None:
            assert policy == known.contract.results[0].dead.value
        else:
            assert policy == DeadRows.CARRIED.value
        found.add(policy)
    fills = {compilation.inputs[node.name].fill for node in _row_inputs(compilation)}
    assert fills == {0, -1}
    assert len(found) >= 3
