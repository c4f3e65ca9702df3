"""Pass 10: a flat list of instructions, each with the provenance of everything that it reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch.fx import GraphModule

from octavo.passes.base import Compilation, GraphError, InputKind, PassContext, PassReport
from octavo.passes.breaks import PieceKind
from octavo.passes.split import SplitPiece


class Source(enum.Enum):
    """Where an operand lies when an instruction runs."""

    WEIGHT = "weight"
    CONSTANT = "constant"
    POOL = "pool"
    STATIC = "static"
    """A named static buffer."""
    LIVE = "live"
    """Shaped by this step's requests: forbidden in anything captured."""


@dataclass(frozen=True, slots=True)
class Operand:
    source: Source
    name: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """``results = module(*operands)``; results are written to the static buffers of their names."""

    number: int
    kind: PieceKind
    module: GraphModule
    operands: tuple[Operand, ...]
    results: tuple[str, ...]
    layers: tuple[int, ...]
    reasons: tuple[str, ...]
    digest: str
    """Of the canonical text: equal instructions have equal digests."""

    @property
    def title(self) -> str:
        """Number, kind and layers, for people."""
        span = "-".join(str(layer) for layer in dict.fromkeys((*self.layers[:1], *self.layers[-1:])))
        return f"{self.number} {self.kind.value}" + (f" layer {span}" if span else "")


class Lower:
    name = "lower"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        if not compilation.pieces or not all(isinstance(piece, SplitPiece) for piece in compilation.pieces):
            raise GraphError("pieces are not split yet")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        compilation.instructions = [
            Instruction(
                piece.piece.number,
                piece.piece.kind,
                piece.module,
                tuple(_operand(name, compilation) for name in piece.operands),
                tuple(piece.results),
                piece.layers,
                tuple(piece.piece.reasons),
                piece.digest,
            )
            for piece in compilation.pieces
        ]
        return PassReport(len(compilation.instructions))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        if len(compilation.instructions) != len(compilation.pieces):
            raise GraphError("a piece has no instruction")


def _operand(name: str, compilation: Compilation) -> Operand:
    if name in compilation.buffers:
        return Operand(Source.STATIC, name)
    kinds = {InputKind.WEIGHT: Source.WEIGHT, InputKind.CONSTANT: Source.CONSTANT, InputKind.POOL: Source.POOL}
    entry = compilation.inputs.get(name)
    return Operand(kinds.get(entry.kind, Source.LIVE) if entry is not None else Source.LIVE, name)
