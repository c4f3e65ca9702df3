"""Pass 6: fake values again, after placement has changed how many rows a value has on a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

from octavo.passes.base import (
    VALUE,
    Compilation,
    GraphError,
    InputKind,
    PassContext,
    PassReport,
    Placement,
    values_of,
)
from octavo.passes.place import local_rows


class Propagate:
    name = "propagate"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        pass

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        """Only what moved has other shapes: with one rank nothing has, and nothing is computed again."""
        if context.ranks == 1:
            return PassReport(1, notes=("one rank: shapes are as exported",))
        mode = fake_mode_of(compilation)
        matched = 0
        with mode, torch.no_grad():
            for node in compilation.graph.nodes:
                if node.op == "placeholder" and compilation.inputs[node.name].kind is InputKind.WRITES:
                    value = node.meta[VALUE]
                    factor = context.ranks if local_rows(context) is Placement.SHARDED else 1
                    node.meta[VALUE] = value.new_empty(value.shape[0] * factor, *value.shape[1:])
                elif node.op == "call_function":
                    node.meta[VALUE] = computed(node)
                    matched += 1
        return PassReport(matched)

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.calls():
            for value in values_of(node):
                if not isinstance(value, Tensor):
                    raise GraphError("no fake value", node)


def fake_mode_of(compilation: Compilation) -> FakeTensorMode:
    """The one mode that the graph was captured under."""
    for node in compilation.graph.nodes:
        for value in values_of(node):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    raise GraphError("no fake value in the graph")


def computed(node: Node) -> Any:
    """The fake value of a node from those of its arguments. Call it under the mode of :func:`fake_mode_of`."""
    args = map_arg(node.args, lambda argument: argument.meta[VALUE])
    kwargs = map_arg(node.kwargs, lambda argument: argument.meta[VALUE])
    assert callable(node.target)
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        raise GraphError(f"shapes do not fit: {error}", node) from error
