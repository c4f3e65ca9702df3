"""Collectives in a module, carried out by a communicator: alone, or amid a segment whose capture takes them along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from octavo.kernels.collectives import Communicator, gather_rows, reduce_rows, shard_rows
from octavo.passes.base import operator_of


def moves_rows(module: GraphModule) -> bool:
    """Whether there is a collective in it."""
    return any(_is_collective(node) for node in module.graph.nodes)


def carried_out(module: GraphModule, communicator: Communicator) -> GraphModule:
    """A copy of the module in which collectives are calls of the communicator."""

    def shard(values: list[Tensor], ranks: int) -> list[Tensor]:
        return communicator.shard(values)

    def gather(values: list[Tensor], ranks: int, ordered: bool) -> list[Tensor]:
        return communicator.gather(values, ordered)

    def reduce(value: Tensor, ranks: int, scatter: bool) -> Tensor:
        return communicator.reduce(value, scatter)

    calls: dict[object, Callable[..., Any]] = {shard_rows: shard, gather_rows: gather, reduce_rows: reduce}
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if _is_collective(node):
            copies[node] = graph.call_function(calls[operator_of(node)], map_arg(node.args, copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(module, graph)


def _is_collective(node: Node) -> bool:
    known = operator_of(node)
    return known is not None and known.contract.collective
