"""Pieces are modules of their own, and equal pieces are one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from octavo.graphs.regions import find_regions
from octavo.kernels import OPERATORS
from octavo.kernels.choice import choose_backends
from octavo.passes.base import PassContext
from octavo.passes.breaks import PieceKind
from octavo.passes.runner import run_passes
from octavo.passes.split import SplitPiece
from tests.passes.compiled import compiled, fresh


def by_text(ranks: int) -> dict[str, list[SplitPiece]]:
    found = defaultdict(list)
    for piece in compiled(ranks).pieces:
        found[piece.text].append(piece)
    return found


def test_equal_pieces_share_a_module() -> None:
    """One module a text and one text a module, for one rank and for several."""
    for ranks in (1, 4):
        kinds = by_text(ranks)
        assert len(kinds) < len(compiled(ranks).pieces)
        modules = {id(same[0].module) for same in kinds.values()}
        assert len(modules) == len(kinds)
        for same in kinds.values():
            assert len({id(piece.module) for piece in same}) == 1
            assert len({piece.digest for piece in same}) == 1
        assert len({same[0].digest for same in kinds.values()}) == len(kinds)


def test_equal_layers_are_equal_pieces() -> None:
    """Layers with equal duties share their segments and breaks, wherever they stand."""
    shared = [piece for same in by_text(1).values() if len(same) > 1 for piece in same]
    assert len({layer for piece in shared for layer in piece.layers}) >= 4
    assert {piece.piece.kind for piece in shared} == {PieceKind.SEGMENT, PieceKind.BREAK}


def test_text_knows_no_position() -> None:
    """Neither layers, nor names of values, nor torch's symbols are in it; the dynamic extent is called r."""
    for piece in compiled(4).pieces:
        names = (set(piece.operands) | set(piece.results)) - set(OPERATORS) - {"getitem", "repeat", "unflatten"}
        words = set(re.findall(r"[A-Za-z_]\w*", piece.text))
        assert names
        assert not names & words
        assert not [word for word in words if re.fullmatch(r"s\d+|u\d+|layers?_?\d*", word)]
        assert "r" in words


def test_modules_compute_what_the_text_says() -> None:
    """A module has its piece's operators in order, its operands as inputs and its results as outputs."""
    for piece in compiled(1).pieces:
        graph = piece.module.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        targets = [node.target for node in graph.nodes if node.op == "call_function"]
        assert len(inputs) == len(piece.operands)
        assert targets == [node.target for node in piece.piece.nodes]
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, tuple)
        assert len(outputs) == len(piece.results)
        assert not [node for node in graph.nodes if node.op == "get_attr"]


def test_regions_are_what_a_compiler_would_be_given() -> None:
    """By the backends of numerics ``fast``: the same calls, of the same kinds, as are found when they are compiled."""
    compilation = fresh()
    (report,) = (
        result.report
        for result in run_passes(compilation, PassContext(backends=choose_backends("fast", "cpu")))
        if result.name == "split"
    )
    texts = Counter(text for piece in compilation.pieces for text in piece.regions.values())
    found = find_regions(compilation.instructions)
    assert texts == {region.text: len(region.nodes) for region in found}
    assert 10 < len(texts) < texts.total()
    assert f"{texts.total()} regions of {len(texts)} kinds" in report.notes
    names = [name for piece in compilation.pieces for name in piece.regions]
    assert len(names) == len(set(names)) == texts.total(), "each is a node of its own"
    assert any(piece.piece.kind is PieceKind.BREAK for piece in compilation.pieces)
    assert all(not piece.regions for piece in compilation.pieces if piece.piece.kind is not PieceKind.SEGMENT)


def test_reference_backends_are_given_to_no_compiler() -> None:
    assert find_regions(compiled(1).instructions), "some of them could be"
    assert not [piece for piece in compiled(1).pieces if piece.regions]
