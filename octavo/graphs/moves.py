"""The collectives of a program: what moves, for whom, and how many bytes that is on each rank."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from octavo.graphs.describe import value_names
from octavo.graphs.tables import layer_span
from octavo.kernels.collectives import gather_rows, reduce_rows, shard_rows
from octavo.kernels.operator import Need
from octavo.passes.base import LAYER, Compilation, PassContext, operator_of, tensor_arguments
from octavo.passes.plan_buffers import row_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """One collective. Bytes are for each row of the bucket, on each rank."""

    piece: int
    layers: tuple[int, ...]
    operation: str
    """shard, gather in global order, gather rank by rank, reduce-scatter or all-reduce."""
    values: tuple[str, ...]
    readers: tuple[str, ...]
    """Operators and their arguments that ask for it."""
    why: str
    bytes_in: int
    """That this rank brings."""
    bytes_out: int
    """That this rank has afterwards."""
    bytes_sent: float
    """That this rank sends by the ring algorithm, which is optimal in bytes."""


def moves_of(compilation: Compilation, context: PassContext) -> list[Move]:
    """All collectives in order, instructions of their own or in segments. The compilation has been split."""
    names = value_names(compilation)
    return [
        _move(node, piece.piece.number, context, names)
        for piece in compilation.pieces
        for node in piece.piece.nodes
        if (known := operator_of(node)) is not None and known.contract.collective
    ]


def _move(call: Node, piece: int, context: PassContext, names: dict[str, str]) -> Move:
    values = [value for _, value in tensor_arguments(call)]
    results = [user for user in call.users if user.target is operator.getitem] or [call]
    bytes_in = sum(row_bytes(value, context) for value in values)
    bytes_out = sum(row_bytes(value, context) for value in results)
    layers = () if call.meta[LAYER] is None else (call.meta[LAYER],)
    readers = _readers(results, layers)
    sent: float
    if operator_of(call) is shard_rows:
        operation, sent = "shard", 0.0
        why = "this rank's rows suffice from here on"
    elif operator_of(call) is gather_rows:
        ordered = bool(call.args[2])
        operation = "gather in global order" if ordered else "gather rank by rank"
        why = f"{' and '.join(readers)} need all rows{', in global order' if ordered else ''}"
        sent = bytes_in * (context.ranks - 1)
    else:
        assert operator_of(call) is reduce_rows, f"{call} is no collective"
        scatter = bool(call.args[2])
        operation = "reduce-scatter" if scatter else "all-reduce"
        why = f"{', '.join(names[value.name] for value in values)} is one addend of a sum over ranks"
        sent = (1 if scatter else 2) * bytes_in * (context.ranks - 1) / context.ranks
    given = tuple(names[value.name] for value in values)
    return Move(piece, layers, operation, given, readers, why, bytes_in, bytes_out, sent)


def _readers(values: list[Node], layers: tuple[int, ...]) -> tuple[str, ...]:
    """``attend(latents)`` for every argument that needs more than this rank's rows; with layers if not the same."""
    arguments: dict[str, dict[str, None]] = {}
    where: dict[str, set[int]] = {}
    for value in values:
        for user in value.users:
            known = operator_of(user)
            if known is None:
                continue
            for argument, given in tensor_arguments(user):
                if given is value and known.contract.arguments[argument] in (Need.EVERY, Need.ORDERED):
                    arguments.setdefault(known.name, {})[argument] = None
                    if user.meta[LAYER] is not None:
                        where.setdefault(known.name, set()).add(user.meta[LAYER])
    readers = []
    for name, own in arguments.items():
        elsewhere = sorted(where.get(name, set()))
        suffix = f" of {layer_span(elsewhere)}" if tuple(elsewhere) != layers else ""
        readers.append(f"{name}({', '.join(own)}){suffix}")
    return tuple(readers)
