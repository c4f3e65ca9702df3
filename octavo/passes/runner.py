"""Runs the passes in their order: each is timed, verified and reported, and may be disabled by its exact name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.passes.base import Compilation, GraphError, Pass, PassContext, PassReport
from octavo.passes.breaks import Breaks
from octavo.passes.choose import Choose
from octavo.passes.fuse import Fuse
from octavo.passes.lower import Lower
from octavo.passes.normalise import Normalise
from octavo.passes.place import Place
from octavo.passes.plan_buffers import PlanBuffers
from octavo.passes.propagate import Propagate
from octavo.passes.prove import Prove
from octavo.passes.split import Split
from octavo.passes.verify import Verify, check_pools


@dataclass(frozen=True, slots=True)
class PassResult:
    """One line of the report."""

    name: str
    seconds: float
    report: PassReport

    def describe(self) -> str:
        changes = f"+{self.report.added} -{self.report.removed}"
        notes = "; ".join(self.report.notes)
        return f"{self.name:<13}{self.seconds * 1e3:8.0f} ms  {self.report.matched:6} judged  {changes:<9} {notes}"


def all_passes() -> list[Pass]:
    """The passes in order. ``lower`` comes before ``prove``, which judges what it made."""
    return [
        Normalise(),
        Fuse(),
        Choose(),
        Verify(),
        Place(),
        Propagate(),
        Breaks(),
        PlanBuffers(),
        Split(),
        Lower(),
        Prove(),
    ]


def run_passes(
    compilation: Compilation,
    context: PassContext,
    *,
    passes: Sequence[Pass] | None = None,
    disabled: frozenset[str] = frozenset(),
    after: Callable[[Pass, Compilation], None] | None = None,
) -> list[PassResult]:
    """Run them in place. ``after`` sees the compilation behind each pass (for dumps, and for tests that break it).

    Raises :class:`GraphError` naming the pass, the node and the layer; a pass that judges nothing although it must is
    an error too, and so is a name in ``disabled`` that no pass has.
    """
    chosen = list(passes) if passes is not None else all_passes()
    unknown = disabled - {each.name for each in chosen}
    if unknown:
        raise GraphError(f"no pass is called {', '.join(sorted(unknown))}; there are {[p.name for p in chosen]}")
    results = []
    for each in chosen:
        if each.name in disabled:
            continue
        began = time.perf_counter()
        try:
            each.requires(compilation, context)
            report = each.run(compilation, context)
            if not report.matched and not each.optional:
                raise GraphError("judged nothing, and it must")
            each.ensures(compilation, context)
            compilation.graph.lint()
            check_pools(compilation)
        except GraphError as error:
            raise GraphError(f"pass {each.name}: {error}") from error
        results.append(PassResult(each.name, time.perf_counter() - began, report))
        if after is not None:
            after(each, compilation)
    return results
