"""The shared expert beside the routed ones: begun ahead of them, read behind them, and the same results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from octavo.graphs.beside import on_two_streams, runs_beside
from octavo.kernels.operator import OPERATORS
from octavo.passes.base import Compilation, operator_of
from octavo.passes.breaks import PieceKind
from tests.conftest import ReportCount
from tests.passes.compiled import RankProgram, batch, compiled, new_pools


class Late:
    """Computes what was begun only when somebody waits for it: a reader that does not sees NaN."""

    def __init__(self) -> None:
        self._begun: list[tuple[Callable[..., Tensor], tuple[Any, ...], Tensor]] = []
        self.calls = 0

    def run(self, call: Callable[..., Tensor], operands: tuple[Any, ...]) -> Tensor:
        result = torch.full_like(operands[0], torch.nan)
        self._begun.append((call, operands, result))
        return result

    def join(self) -> None:
        for call, operands, result in self._begun:
            result.copy_(call(*operands))
            self.calls += 1
        self._begun.clear()


def beside(compilation: Compilation, side: Late) -> Compilation:
    """With every segment on two lines of work."""
    changed = [
        replace(each, module=on_two_streams(each.module, side)) if each.kind is PieceKind.SEGMENT else each
        for each in compilation.instructions
    ]
    return replace(compilation, instructions=changed)


@torch.no_grad()
def test_results_are_the_same(report_count: ReportCount) -> None:
    """To the bit, in steps of several sizes, though every call runs as late as it may."""
    compilation, side = compiled(), Late()
    plain = RankProgram(new_pools())
    parted = RankProgram(new_pools(), compilation=beside(compilation, side))
    for lengths, starts in (([2, 9, 1], [0, 0, 0]), ([1, 1, 1], [2, 9, 1])):
        step = batch(lengths, starts)
        for expected, actual in zip(plain.step(step), parted.step(step), strict=True):
            assert torch.equal(expected, actual) and actual.isfinite().all()
    layers = sum(len(runs_beside(list(each.module.graph.nodes))) for each in compilation.instructions)
    assert layers == 10 and side.calls == 2 * layers
    report_count("shared experts that ran beside routed ones", side.calls)


def test_what_is_read_is_held() -> None:
    """Until the wait; that stands directly ahead of the first reader, and the call ahead of the routed experts."""
    for each in compiled().instructions:
        parted = on_two_streams(each.module, Late())
        order = list(parted.graph.nodes)
        calls = [node for node in order if node.op == "call_module"]
        for begin, wait in zip(calls[::2], calls[1::2], strict=True):
            assert (begin.target, wait.target) == ("begin_shared_expert", "wait")
            assert wait.args == (begin, *begin.all_input_nodes)
            assert order[order.index(wait) + 1] in wait.users and set(begin.users) == {wait}
            between = [operator_of(node) for node in order[order.index(begin) : order.index(wait)]]
            assert OPERATORS["experts"] in between
            behind = {known for user in wait.users if (known := operator_of(user)) is not None}
            assert behind <= {OPERATORS["combine"]}, "its kernel starts behind an event, see dependent_launch"


@pytest.mark.parametrize("text", ["s e c", "s c e", "e s c", "s e", "s c", "e c"])
def test_where_nothing_stands_between_nothing_changes(text: str) -> None:
    """s: the shared expert, e: the routed ones, c: who reads them; without c they are the module's results."""
    graph = Graph()
    made = {"x": graph.placeholder("x")}
    for name in text.split():
        if name == "c":
            given = [made[each] for each in "se" if each in made]
            made[name] = graph.call_function(operator.add, (given[0], given[-1]))
        else:
            target = OPERATORS["shared_expert" if name == "s" else "experts"].overload
            made[name] = graph.call_function(target, (made["x"],))
    graph.output(tuple(made.values()))
    module = GraphModule({}, graph)
    found = runs_beside(list(graph.nodes))
    assert [node.name for node in found] == ([made["s"].name] if text.startswith("s e") else [])
    parted = on_two_streams(module, Late())
    assert sum(node.op == "call_module" for node in parted.graph.nodes) == 2 * len(found)
