"""Pieces are modules of their own, and equal pieces are one."""

from __future__ import annotations

import re
from collections import defaultdict

import torch

from octavo.kernels import OPERATORS
from octavo.passes.breaks import PieceKind
from octavo.passes.split import SplitPiece
from tests.passes.compiled import compiled


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


def test_regions_are_cut_at_operators() -> None:
    """What lies between operators is reshapes and pointwise nodes, of a few kinds."""
    regions = [text for piece in compiled(1).pieces for text in piece.regions]
    assert regions
    assert not [text for text in regions if "octavo" in text]
    assert len(set(regions)) < len(regions)
    assert all(not piece.regions for piece in compiled(1).pieces if piece.piece.kind is not PieceKind.SEGMENT)
    assert str(torch.ops.aten.unflatten.int) in "\n".join(regions)
