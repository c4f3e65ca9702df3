"""Calls that run beside others: the shared expert on a second stream, while the routed ones run on the first.

With few rows neither fills a GPU; with many, one fills what the other leaves at its ends. In a captured segment the two
become branches of the CUDA graph. The model begins the shared expert ahead of the routed ones and reads it behind them,
so nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from octavo.passes.base import calls_operator, operator_of

_BESIDE = {"shared_expert": "experts"}
"""Operators that are worth a second stream, and what stands between their call and its first reader then."""


class Side(Protocol):
    """A second line of work on the device."""

    def run(self, call: Callable[..., Tensor], operands: tuple[Any, ...]) -> Tensor:
        """Begin a call when all that was begun so far has ended."""
        ...

    def join(self) -> None:
        """What is begun from now on waits for the calls that were begun here."""
        ...


class SideStream:
    """A second stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._first = torch.zeros(1, device=device)

    def run(self, call: Callable[..., Tensor], operands: tuple[Any, ...]) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            # An ordinary kernel: none that starts before the one ahead has ended may stand behind another stream's.
            self._first.zero_()
            return call(*operands)

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def runs_beside(nodes: Sequence[Node]) -> dict[Node, Node | None]:
    """Of a segment's nodes the calls that run beside others, each with its first reader among them, if there is one."""
    order = {node: place for place, node in enumerate(nodes)}
    found: dict[Node, Node | None] = {}
    for place, node in enumerate(nodes):
        known = operator_of(node)
        if known is not None and known.name in _BESIDE:
            end = min((order[reader] for reader in node.users if reader in order), default=len(nodes))
            if any(calls_operator(between, _BESIDE[known.name]) for between in nodes[place + 1 : end]):
                found[node] = nodes[end] if end < len(nodes) else None
    return found


def on_two_streams(module: GraphModule, side: Side) -> GraphModule:
    """A copy of the module in which calls that run beside others do so.

    What such a call reads is held until the first stream has waited for it: memory that is given back belongs to the
    stream that it was taken on, and would be written again there.
    """
    beside = runs_beside(list(module.graph.nodes))
    awaited = {reader: node for node, reader in beside.items()}
    assert len(awaited) == len(beside), "two calls that run beside others have one first reader"
    root = nn.Module()
    for name, child in module.named_children():
        root.add_module(name, child)
    root.add_module("wait", _Wait(side))
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in awaited:
            call = awaited[node]
            held = [copies[operand] for operand in call.all_input_nodes]
            copies[call] = graph.call_module("wait", (copies[call], *held))
        if node in beside:
            known = operator_of(node)
            assert known is not None and not node.kwargs, "an operator's call has its arguments by place"
            name = f"begin_{known.name}"
            root.add_module(name, _Begin(side, node.target))
            copies[node] = graph.call_module(name, map_arg(node.args, copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(root, graph)


class _Begin(nn.Module):
    def __init__(self, side: Side, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self._side, self._call = side, call

    def forward(self, *operands: Any) -> Tensor:
        return self._side.run(self._call, operands)


class _Wait(nn.Module):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self._side = side

    def forward(self, result: Tensor, *held: Tensor) -> Tensor:
        self._side.join()
        return result
