"""Pass 2: operators that stand together become one, where a backend has a kernel for it.

A fusion says which: ``fuse_sites`` what stands between two sublayers, ``fuse_pairs`` two products of the same rows. The
reference of a fused operator is what it replaces; where that would compute it, the graph stays as it is.

It runs before ``choose``, since it replaces operators and not backends; so ``verify`` and ``place`` judge the fused
call by its contract like any other. Nothing has moved yet: what is fused reads and gives rows of the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.fx import Graph, Node

from octavo.passes.base import Compilation, GraphError, PassContext, PassReport, operator_of
from octavo.passes.fuse_pairs import Pairs
from octavo.passes.fuse_sites import Sites


class Match(Protocol):
    """Operators of a graph that can become one."""

    @property
    def first(self) -> Node: ...
    @property
    def missed(self) -> str:
        """What is wrong where they were not fused, said of the first."""
        ...

    def replace(self, graph: Graph) -> tuple[int, int]:
        """Put the fused call and its results in their place -> nodes added, nodes removed."""
        ...


class Fusion(Protocol):
    """One kind of operators that become one."""

    operator: str
    """That they become."""
    things: str
    """What its matches are called."""

    def judged(self, graph: Graph) -> int:
        """How many there are that could match."""
        ...

    def matches(self, graph: Graph) -> Sequence[Match]: ...


FUSIONS: tuple[Fusion, ...] = (Sites(), Pairs())


class Fuse:
    name = "fuse"
    optional = True

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.calls():
            known = operator_of(node)
            if known is not None and node.target is not known.overload:
                raise GraphError(f"is directed to {node.target} already: fuse runs before choose", node)

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        report, notes = PassReport(0), []
        for fusion in FUSIONS:
            judged = fusion.judged(compilation.graph)
            report.matched += judged
            if not _worthwhile(fusion, context):
                notes.append(f"no backend of {fusion.operator} beside the reference")
                continue
            matches = fusion.matches(compilation.graph)
            for match in matches:
                added, removed = match.replace(compilation.graph)
                report.added += added
                report.removed += removed
            notes.append(f"{len(matches)} of {judged} {fusion.things} fused")
        compilation.module.recompile()
        report.notes = tuple(notes)
        return report

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for fusion in FUSIONS:
            if _worthwhile(fusion, context):
                for match in fusion.matches(compilation.graph):
                    raise GraphError(match.missed, match.first)


def _worthwhile(fusion: Fusion, context: PassContext) -> bool:
    return context.backends.get(fusion.operator, "reference") != "reference"
