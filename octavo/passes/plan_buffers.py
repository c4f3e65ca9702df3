"""Pass 8: a named static buffer for every value that crosses a boundary between pieces.

A buffer has one writer, its readers, a life from the one to the last of the others, a policy for dead rows, and a place
in storage that it shares with buffers of disjoint lives. It is allocated once at the largest bucket and sliced.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from octavo.kernels.operator import DeadRows
from octavo.passes.base import (
    PIECE,
    PLACEMENT,
    VALUE,
    Compilation,
    GraphError,
    InputKind,
    PassContext,
    PassReport,
    Placement,
    operator_of,
)
from octavo.passes.place import local_rows

INPUT_PIECE = -1
"""Writer of the buffers that hold a step's inputs."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One static buffer: rows of ``row_shape``, ``rows_factor`` times the bucket many."""

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    rows_factor: int
    """1 for this rank's rows, the number of ranks for all rows."""
    writer: int
    """Piece that writes it, or :data:`INPUT_PIECE`."""
    readers: tuple[int, ...]
    last: int
    """Last piece of its life; one past the last piece for results."""
    dead_rows: str
    """What dead rows hold."""
    storage: int
    """Buffers of one storage have disjoint lives."""

    @property
    def row_bytes(self) -> int:
        count = self.rows_factor * self.dtype.itemsize
        for extent in self.row_shape:
            count *= extent
        return count


class PlanBuffers:
    name = "plan_buffers"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        if not compilation.pieces:
            raise GraphError("no pieces: breaks runs first")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        end = len(compilation.pieces)
        free: list[tuple[int, int, int]] = []
        """(last piece, bytes a row, storage) of storages whose buffer is dead by then."""
        storages = 0
        buffers: dict[str, Buffer] = {}
        for node in compilation.graph.nodes:
            if not _crosses(node, compilation):
                continue
            writer = node.meta.get(PIECE, INPUT_PIECE)
            readers = tuple(sorted({user.meta.get(PIECE, end) for user in node.users}))
            value = node.meta[VALUE]
            factor = _rows_factor(node, context)
            row_shape = tuple(int(extent) for extent in value.shape[1:])
            last = max(readers)
            draft = Buffer(
                node.name, value.dtype, row_shape, factor, writer, readers, last, _policy(node, compilation), -1
            )
            # Inputs are written before the first piece and keep their place until the next step.
            shared = (
                next((f for f in free if f[0] < writer and f[1] == draft.row_bytes), None)
                if writer != INPUT_PIECE and last < end
                else None
            )
            if shared is not None:
                free.remove(shared)
                storage = shared[2]
            else:
                storage, storages = storages, storages + 1
            buffers[node.name] = Buffer(
                node.name, value.dtype, row_shape, factor, writer, readers, last, draft.dead_rows, storage
            )
            if writer != INPUT_PIECE and last < end:
                free.append((last, draft.row_bytes, storage))
        compilation.buffers = buffers
        total = sum({b.storage: b.row_bytes for b in buffers.values()}.values())
        unshared = sum(b.row_bytes for b in buffers.values())
        note = f"{len(buffers)} buffers in {storages} storages, {total:,} bytes a row instead of {unshared:,}"
        return PassReport(len(buffers), notes=(note,))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.graph.nodes:
            if _crosses(node, compilation) and node.name not in compilation.buffers:
                raise GraphError("crosses a boundary and has no buffer", node)


def row_bytes(node: Node, context: PassContext) -> int:
    """Bytes of a tensor of rows for each row of the bucket, on a rank, whether it has a buffer or not."""
    value = node.meta[VALUE]
    count = _rows_factor(node, context) * value.dtype.itemsize
    for extent in value.shape[1:]:
        count *= int(extent)
    return int(count)


def _crosses(node: Node, compilation: Compilation) -> bool:
    """Whether a value is needed beyond the piece that makes it."""
    if node.op == "placeholder":
        return compilation.inputs[node.name].kind in (InputKind.ROWS, InputKind.WRITES) and bool(node.users)
    if node.op != "call_function" or not isinstance(node.meta[VALUE], Tensor):
        return False
    return any(user.meta.get(PIECE) != node.meta[PIECE] for user in node.users)


def _rows_factor(node: Node, context: PassContext) -> int:
    """All rows are as many on every rank as the ranks' own together; replicated steps have one set of rows."""
    every = node.meta[PLACEMENT] in (Placement.REPLICATED, Placement.RANK_MAJOR, Placement.PARTIAL_RANK_MAJOR)
    return context.ranks if every and local_rows(context) is Placement.SHARDED else 1


def _policy(node: Node, compilation: Compilation) -> str:
    """What dead rows hold: an input's fill, or what the contract of the writing operator says."""
    if node.op == "placeholder":
        return f"filled with {compilation.inputs[node.name].fill}"
    source, index = node, 0
    if node.target is operator.getitem:
        origin, place = node.args
        assert isinstance(origin, Node) and isinstance(place, int)
        source, index = origin, place
    known = operator_of(source)
    if known is None:
        return DeadRows.CARRIED.value
    results = known.contract.results
    return results[index if len(results) > 1 else 0].dead.value
