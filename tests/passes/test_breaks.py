"""Segments end where an operator cannot be captured or rows move, and nowhere else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.kernels import OPERATORS
from octavo.passes.base import PIECE, Compilation, PassContext, operator_of
from octavo.passes.breaks import PieceKind
from tests.passes.compiled import collectives, compiled, export_body, fresh, run_all

ALL = frozenset(OPERATORS)


def pieces(ranks: int, sharded: bool = True, capturable: frozenset[str] | None = None) -> Compilation:
    return run_all(fresh(ranks), PassContext(ranks=ranks, sharded=sharded, capturable=capturable), last="breaks")


def kinds(compilation: Compilation) -> list[PieceKind]:
    return [piece.kind for piece in compilation.pieces]


def test_everything_capturable_is_one_segment() -> None:
    """Capability alone removes the breaks; the graph is the same."""
    with_breaks, without = pieces(1), pieces(1, capturable=ALL)
    assert kinds(without) == [PieceKind.SEGMENT]
    assert PieceKind.BREAK in kinds(with_breaks)
    assert str(without.graph) == str(with_breaks.graph)
    assert not without.pieces[0].reasons


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_only_collectives_cut(ranks: int, sharded: bool) -> None:
    """Where everything is capturable, segments are the groups of collectives and one more."""
    compilation = pieces(ranks, sharded, ALL)
    found = kinds(compilation)
    groups = sum(kind is PieceKind.COLLECTIVE for kind, _ in itertools.groupby(found))
    assert found.count(PieceKind.COLLECTIVE) == len(collectives(compilation))
    assert found.count(PieceKind.SEGMENT) == groups + 1
    assert found.count(PieceKind.BREAK) == 0


@pytest.mark.parametrize("name", ["attend", "select", "publish", "experts"])
def test_one_uncapturable_operator(name: str) -> None:
    """Its calls alone are the breaks, each with the reason."""
    compilation = pieces(1, capturable=ALL - {name})
    found = [piece for piece in compilation.pieces if piece.kind is PieceKind.BREAK]
    assert found
    for piece in found:
        assert {known.name for node in piece.nodes if (known := operator_of(node)) is not None} == {name}
        assert piece.reasons == [f"{name}: declared uncapturable"]


def test_backends_decide() -> None:
    """Breaks are the operators whose chosen backend is not capturable on this device."""
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            exported = export_body(range(8), torch.device(device))
        compilation = run_all(exported, PassContext(device=device), last="breaks")
        for piece in compilation.pieces:
            for node in piece.nodes:
                known = operator_of(node)
                if known is None:
                    continue
                breaks = device not in known.backends["reference"].capturable
                assert (piece.kind is PieceKind.BREAK) is breaks, node
                reason = f"{known.name}: backend reference is not capturable on {device}"
                assert (reason in piece.reasons) is breaks, node


@pytest.mark.parametrize("capturable", [None, ALL, frozenset()], ids=["backends", "all", "none"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_order_and_neighbours(ranks: int, capturable: frozenset[str] | None) -> None:
    """Every node is in one piece, in the order of the graph; neighbours that can merge have merged."""
    compilation = pieces(ranks, capturable=capturable)
    assert sorted(n.name for p in compilation.pieces for n in p.nodes) == sorted(n.name for n in compilation.calls())
    assert [piece.number for piece in compilation.pieces] == list(range(len(compilation.pieces)))
    order = {node: place for place, node in enumerate(compilation.graph.nodes)}
    for piece in compilation.pieces:
        places = [order[node] for node in piece.nodes]
        assert places == sorted(places)
        assert {node.meta[PIECE] for node in piece.nodes} == {piece.number}
        for node in piece.nodes:
            assert all(source.meta.get(PIECE, -1) <= piece.number for source in node.all_input_nodes)
    for kind, group in itertools.groupby(kinds(compilation)):
        assert kind is PieceKind.COLLECTIVE or len(list(group)) == 1


def test_reasons_reach_the_program() -> None:
    for instruction in compiled(2).instructions:
        assert bool(instruction.reasons) is (instruction.kind is not PieceKind.SEGMENT)
