"""The memory of a step, known before it runs: static buffers, and the peak of an eager run.

In an eager run every value is a tensor of its own. Values live from the node that makes them to the last that reads
them, or to the end of the last piece that reads them if that is another than their own: a piece holds what it was
given. Reshapes are views, which keep what they view alive. What an operator needs inside is its own affair and not
counted.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from octavo.passes.base import PIECE, Compilation, InputKind, values_of

_VIEWS = frozenset({torch.ops.aten.unflatten.int, torch.ops.aten.unsqueeze.default})
_PROBE = 16
"""Row count at which shapes are evaluated; all of them are proportional to it."""


def peak_bytes(compilation: Compilation, rows: int) -> int:
    """Most bytes that the values of a step of ``rows`` local rows take together, inputs included, weights not.

    The compilation has been cut into pieces.
    """
    order = {node: place for place, node in enumerate(compilation.graph.nodes)}
    ends = {node.meta[PIECE]: order[node] for node in compilation.calls()}
    last: dict[Node, int] = {}
    for node in reversed(compilation.graph.nodes):
        own = node.meta.get(PIECE)
        uses = [
            ends.get(user.meta.get(PIECE), order[user]) if user.meta.get(PIECE) != own else order[user]
            for user in node.users
        ]
        uses += [last[user] for user in node.users if user.target in _VIEWS]
        last[node] = max(uses, default=order[node])
    changes: dict[int, int] = {}
    for node, place in order.items():
        size = _bytes(node, compilation)
        changes[place] = changes.get(place, 0) + size
        changes[last[node] + 1] = changes.get(last[node] + 1, 0) - size
    alive = peak = 0
    for place in sorted(changes):
        alive += changes[place]
        peak = max(peak, alive)
    return -(-peak * rows // _PROBE)


def buffer_bytes(compilation: Compilation, rows: int) -> int:
    """Bytes of all static buffers at ``rows`` local rows; those of one storage count once."""
    sizes: dict[int, int] = {}
    for buffer in compilation.buffers.values():
        sizes[buffer.storage] = max(sizes.get(buffer.storage, 0), buffer.row_bytes)
    return rows * sum(sizes.values())


def _bytes(node: Node, compilation: Compilation) -> int:
    """Bytes that a node adds, at the probe's row count. Of several results each counts where it is unpacked."""
    if node.op == "placeholder":
        counted = compilation.inputs[node.name].kind in (InputKind.ROWS, InputKind.WRITES)
    else:
        unpacked = any(user.target is operator.getitem for user in node.users)
        counted = node.op == "call_function" and node.target not in _VIEWS and not unpacked
    return sum(_at_probe(value) for value in values_of(node)) if counted else 0


def _at_probe(value: torch.Tensor) -> int:
    count = value.dtype.itemsize
    for extent in value.shape:
        count *= _extent(extent)
    return count


def _extent(extent: int | torch.SymInt) -> int:
    if isinstance(extent, int):
        return extent
    expression = extent.node.expr
    (symbol,) = expression.free_symbols
    return int(expression.subs(symbol, _PROBE))
