"""Order, reports, names and errors of the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from octavo.passes.base import Compilation, GraphError, PassContext, PassReport
from octavo.passes.runner import all_passes, run_passes
from tests.passes.compiled import fresh, layer_nodes

ORDER = [
    *("normalise", "fuse", "choose", "verify", "place", "propagate", "breaks", "plan_buffers", "split", "lower"),
    "prove",
]


@dataclass
class Stub:
    """A pass that records that it ran."""

    name: str
    log: list[str]
    matched: int = 1
    optional: bool = False
    fails_in: str = ""
    seen: Compilation | None = field(default=None)

    def _step(self, step: str) -> None:
        self.log.append(f"{self.name}.{step}")
        if self.fails_in == step:
            raise GraphError(f"{step} failed")

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        self._step("requires")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        self._step("run")
        self.seen = compilation
        return PassReport(self.matched, added=2, removed=1, notes=("a note", "another"))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        self._step("ensures")


def test_order_and_reports() -> None:
    """All passes in the order of the design, each reported with what it judged."""
    seen = []
    results = run_passes(fresh(), PassContext(), after=lambda each, _: seen.append(each.name))
    assert [each.name for each in all_passes()] == ORDER
    assert [result.name for result in results] == ORDER == seen
    assert all(result.report.matched > 0 for result in results)
    assert all(result.seconds >= 0 for result in results)


def test_a_report_line() -> None:
    (result,) = run_passes(fresh(), PassContext(), passes=[Stub("first", [])])
    line = result.describe()
    assert line.startswith("first ")
    for part in ("ms", "1 judged", "+2 -1", "a note; another"):
        assert part in line


def test_steps_in_order() -> None:
    log: list[str] = []
    run_passes(fresh(), PassContext(), passes=[Stub("a", log), Stub("b", log)])
    assert log == [f"{name}.{step}" for name in "ab" for step in ("requires", "run", "ensures")]


def test_disabled_by_exact_name() -> None:
    log: list[str] = []
    results = run_passes(fresh(), PassContext(), passes=[Stub("a", log), Stub("ab", log)], disabled=frozenset({"a"}))
    assert [result.name for result in results] == ["ab"]
    assert all(entry.startswith("ab.") for entry in log)


@pytest.mark.parametrize("name", ["pla", "Place", "placement", ""])
def test_unknown_name(name: str) -> None:
    with pytest.raises(GraphError, match=f"no pass is called {name}.*place.*prove"):
        run_passes(fresh(), PassContext(), disabled=frozenset({name}))


def test_disabling_what_others_need() -> None:
    """The next pass says what is missing."""
    with pytest.raises(GraphError, match="pass plan_buffers: no pieces: breaks runs first"):
        run_passes(fresh(), PassContext(), disabled=frozenset({"breaks"}))
    with pytest.raises(GraphError, match="pass prove: no instructions: lower runs first"):
        run_passes(fresh(), PassContext(), disabled=frozenset({"lower"}))


def test_judging_nothing() -> None:
    """An error, unless the pass says that it is optional."""
    with pytest.raises(GraphError, match="pass idle: judged nothing"):
        run_passes(fresh(), PassContext(), passes=[Stub("idle", [], matched=0)])
    (result,) = run_passes(fresh(), PassContext(), passes=[Stub("idle", [], matched=0, optional=True)])
    assert result.report.matched == 0


@pytest.mark.parametrize("step", ["requires", "run", "ensures"])
def test_errors_name_the_pass(step: str) -> None:
    log: list[str] = []
    with pytest.raises(GraphError, match=f"pass broken: {step} failed"):
        run_passes(fresh(), PassContext(), passes=[Stub("broken", log, fails_in=step), Stub("later", log)])
    assert not [entry for entry in log if entry.startswith("later")]


def test_errors_name_node_and_layer() -> None:
    compilation = fresh()
    run_passes(compilation, PassContext(), passes=all_passes()[:3])
    node = layer_nodes(compilation, "attend", 3)[0]
    node.target = torch.ops.aten.relu.default
    with pytest.raises(GraphError, match=rf"^pass verify: {node} \(layer 3\): aten.relu.default is neither"):
        run_passes(compilation, PassContext(), passes=all_passes()[3:])


def test_every_pass_is_followed_by_verification() -> None:
    """A pass that puts a pool's reader behind its writer is named, whichever pass it is."""

    class Reorders(Stub):
        def run(self, compilation: Compilation, context: PassContext) -> PassReport:
            attend = layer_nodes(compilation, "attend", 5)[0]
            commit = layer_nodes(compilation, "commit_window", 5)[0]
            attend.prepend(commit)
            return PassReport(1)

    with pytest.raises(GraphError, match=r"pass reorders: attend\w* \(layer 5\): reads .* must stand before"):
        run_passes(fresh(), PassContext(), passes=[*all_passes()[:5], Reorders("reorders", [])])
