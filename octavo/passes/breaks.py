"""Pass 7: where a captured segment has to end, and why.

Every operator whose chosen backend cannot be captured on this device is a *break*, collectives that cannot are
instructions of their own, everything else belongs to *segments*. Neighbours of one kind merge; the order of nodes never
changes.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field

from torch.fx import Node

from octavo.passes.base import (
    PIECE,
    Compilation,
    GraphError,
    PassContext,
    PassReport,
    backend_of,
    operator_of,
    tensor_arguments,
    values_of,
)


class PieceKind(enum.Enum):
    SEGMENT = "segment"
    BREAK = "break"
    COLLECTIVE = "collective"


@dataclass(slots=True)
class Piece:
    """A run of nodes that becomes one instruction."""

    number: int
    kind: PieceKind
    nodes: list[Node] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why a break is one: operator and rule, once each."""


class Breaks:
    name = "breaks"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        pass

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        pieces: list[Piece] = []
        judged = 0
        for node in compilation.calls():
            judged += 1
            if node.target is operator.getitem:
                source = node.args[0]
                assert isinstance(source, Node)
                node.meta[PIECE] = source.meta[PIECE]
                pieces[source.meta[PIECE]].nodes.append(node)
                continue
            kind, reason = _judge(node, context)
            if not pieces or pieces[-1].kind is not kind or kind is PieceKind.COLLECTIVE:
                pieces.append(Piece(len(pieces), kind))
            piece = pieces[-1]
            piece.nodes.append(node)
            if reason and reason not in piece.reasons:
                piece.reasons.append(reason)
            node.meta[PIECE] = piece.number
        compilation.pieces = pieces
        counts = {kind: sum(piece.kind is kind for piece in pieces) for kind in PieceKind}
        return PassReport(judged, notes=tuple(f"{count} {kind.value}s" for kind, count in counts.items()))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        numbers = [node.meta[PIECE] for node in compilation.calls() if node.target is not operator.getitem]
        if numbers != sorted(numbers):
            raise GraphError("pieces are not in the order of the graph")


def _judge(node: Node, context: PassContext) -> tuple[PieceKind, str]:
    known = operator_of(node)
    if known is None:
        return PieceKind.SEGMENT, ""
    if known.contract.collective:
        if context.collectives.value:
            return PieceKind.SEGMENT, ""
        return PieceKind.COLLECTIVE, f"{known.name}: rows move between ranks"
    elsewhere = [name for name, value in tensor_arguments(node) if _device(value) != context.device]
    if elsewhere:
        return PieceKind.BREAK, f"{known.name}: {', '.join(elsewhere)} not in the memory of {context.device}"
    if context.capturable is not None:
        declared = known.name in context.capturable
        return (PieceKind.SEGMENT, "") if declared else (PieceKind.BREAK, f"{known.name}: declared uncapturable")
    backend = backend_of(node)
    if context.device in backend.capturable:
        return PieceKind.SEGMENT, ""
    return PieceKind.BREAK, f"{known.name}: backend {backend.name} is not capturable on {context.device}"


def _device(node: Node) -> str:
    return values_of(node)[0].device.type
