"""Pass 4, and after every pass: known operators, honest shapes, reads and writes of pools in the order they need."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from octavo.passes.base import (
    VALUE,
    Compilation,
    GraphError,
    InputKind,
    PassContext,
    PassReport,
    operator_of,
    tensor_arguments,
    values_of,
)

RESHAPES_AND_POINTWISE = frozenset(
    {
        operator.getitem,
        torch.ops.aten.unflatten.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.repeat.default,
        torch.ops.aten.mul.Tensor,
    }
)
"""Everything a body may contain beside operators: each keeps rows in dimension 0 and reads no size."""


class Verify:
    name = "verify"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        pass

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        compilation.graph.lint()
        calls = list(compilation.calls())
        for node in calls:
            _check_known(node)
            _check_schema(node)
            _check_results(node)
        return PassReport(len(calls) + check_pools(compilation))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        pass


def _check_known(node: Node) -> None:
    if operator_of(node) is None and node.target not in RESHAPES_AND_POINTWISE:
        raise GraphError(
            f"{node.target} is neither an operator nor a known reshape. A number of rows read from a shape, or a "
            "rounding outside an operator, would show here: write it as an operator, or with -1 and unflatten.",
            node,
        )


def _check_schema(node: Node) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    names = {argument.name for argument in node.target._schema.arguments}
    count = len(node.args) + len(node.kwargs)
    if count > len(names) or not set(node.kwargs) <= names:
        raise GraphError(f"arguments do not fit {node.target._schema}", node)


def _check_results(node: Node) -> None:
    """Rows stay in dimension 0: a reshape's result has as many as its first tensor."""
    known = operator_of(node)
    if known is not None:
        expected = len(known.contract.results)
        value = node.meta[VALUE]
        lists = any("[]" in str(r.type) for r in known.overload._schema.returns)
        if not lists and len(values_of(node)) != expected:
            raise GraphError(f"{expected} results by contract, {value} as value", node)
        return
    if node.target is operator.getitem:
        return
    rows = [v.meta[VALUE].shape[0] for v in node.all_input_nodes if isinstance(v.meta[VALUE], torch.Tensor)]
    if rows and not any(str(row) == str(node.meta[VALUE].shape[0]) for row in rows):
        raise GraphError(f"rows do not stay in dimension 0: {rows} -> {node.meta[VALUE].shape}", node)


def check_pools(compilation: Compilation) -> int:
    """A pool that one node writes and others read: every reader stands on the side that its contract names.

    Returns the number of uses judged; raises :class:`GraphError` naming a reader on the wrong side.
    """
    judged = 0
    order = {node: place for place, node in enumerate(compilation.graph.nodes)}
    for node in compilation.graph.nodes:
        if node.op != "placeholder" or compilation.inputs[node.name].kind is not InputKind.POOL:
            continue
        writers: list[Node] = []
        readers: list[tuple[Node, bool]] = []
        for user in node.users:
            known = operator_of(user)
            if known is None:
                continue
            judged += 1
            for name, argument in tensor_arguments(user):
                if argument is node and name in known.mutates:
                    writers.append(user)
                elif argument is node:
                    readers.append((user, known.reads_before_write(name)))
        for reader, before in readers:
            for writer in writers:
                if (order[reader] < order[writer]) is not before:
                    side = "before" if before else "after"
                    raise GraphError(f"reads {node} and must stand {side} {writer}, which writes it", reader)
    return judged
