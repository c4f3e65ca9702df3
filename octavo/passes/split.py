"""Pass 9: each piece becomes a graph of its own, with weights, pools and static buffers as inputs.

Pieces of equal text are one module, so forty equal layers cost one. Within a segment, the calls of compilable backends
are *regions*: what a compiler would be given, counted by text. Reference backends are defined to the bit, which no
compiler keeps: where nothing else was chosen, there are none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from octavo.passes.base import (
    LAYER,
    Compilation,
    GraphError,
    PassContext,
    PassReport,
    backend_of,
    operator_of,
    values_of,
)
from octavo.passes.breaks import Piece, PieceKind


@dataclass(slots=True)
class SplitPiece:
    """A piece as a module: ``module(*operands) -> results``, in the order of the two lists of names."""

    piece: Piece
    module: GraphModule
    operands: list[str]
    results: list[str]
    layers: tuple[int, ...]
    text: str
    """Canonical text, equal for pieces that do the same."""
    regions: dict[str, str] = field(default_factory=dict)
    """Canonical text of every region, by the name of its node."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


class Split:
    name = "split"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        if not compilation.buffers:
            raise GraphError("no buffers: plan_buffers runs first")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        by_text: dict[str, GraphModule] = {}
        compiles = any(backend != "reference" for backend in context.backends.values())
        split: list[SplitPiece] = []
        for piece in compilation.pieces:
            operands, results = _operands(piece, compilation), _results(piece, compilation)
            text = canonical_text(piece.nodes, operands, results)
            module = by_text.get(text)
            if module is None:
                module = by_text[text] = _module(piece, operands, results)
            layers = {node.meta[LAYER] for node in piece.nodes if node.meta[LAYER] is not None}
            split.append(
                SplitPiece(
                    piece,
                    module,
                    [node.name for node in operands],
                    [node.name for node in results],
                    tuple(sorted(layers)),
                    text,
                    _regions(piece) if compiles else {},
                )
            )
        compilation.pieces = split
        regions = [text for piece in split for text in piece.regions.values()]
        counted = (
            f"{len(regions)} regions of {len(set(regions))} kinds" if compiles else "no regions: reference backends"
        )
        return PassReport(len(split), notes=(f"{len(split)} pieces of {len(by_text)} kinds", counted))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for piece in compilation.pieces:
            piece.module.graph.lint()


def canonical_text(nodes: list[Node], operands: list[Node], results: list[Node]) -> str:
    """The nodes with their own numbering: same text, same computation, wherever in the model and on any torch."""
    names: dict[Node, str] = {}
    lines = []
    for node in operands:
        names[node] = f"in{len(names)}"
        lines.append(f"{names[node]}: {_shapes(node)}")
    for node in nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda other: _Name(names[other]))
        names[node] = f"v{len(names)}"
        lines.append(f"{names[node]} = {node.target}{arguments}: {_shapes(node)}")
    lines.append(f"return {', '.join(names[node] for node in results)}")
    return "\n".join(lines)


class _Name(str):
    """Printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _shapes(node: Node) -> str:
    """Dtypes and shapes; the one dynamic extent is called r."""
    shapes = []
    for value in values_of(node):
        extents = [str(extent) for extent in value.shape]
        symbols = sorted({e.split("*")[-1] for e in extents if not e.isdigit()})
        for symbol in symbols:
            extents = [extent.replace(symbol, "r") for extent in extents]
        shapes.append(f"{str(value.dtype).removeprefix('torch.')}[{', '.join(extents)}]")
    return " ".join(shapes) or "none"


def _operands(piece: Piece, compilation: Compilation) -> list[Node]:
    """Values that the piece reads and does not make, in order of first use."""
    own = set(piece.nodes)
    return list(dict.fromkeys(arg for node in piece.nodes for arg in node.all_input_nodes if arg not in own))


def _results(piece: Piece, compilation: Compilation) -> list[Node]:
    return [node for node in piece.nodes if node.name in compilation.buffers]


def _module(piece: Piece, operands: list[Node], results: list[Node]) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for place, node in enumerate(operands):
        copies[node] = graph.placeholder(f"in{place}")
        copies[node].meta = dict(node.meta)
    for node in piece.nodes:
        copies[node] = graph.node_copy(node, lambda other: copies[other])
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(torch.nn.Module(), graph)


def _regions(piece: Piece) -> dict[str, str]:
    """Whatever surrounds it, a call is compiled alone: its text has its own operands and results."""
    if piece.kind is not PieceKind.SEGMENT:
        return {}
    return {
        node.name: canonical_text([node], node.all_input_nodes, [node])
        for node in piece.nodes
        if operator_of(node) is not None and backend_of(node).compilable
    }
