"""Everything that a dump says of a finished program, as plain data: the report, and what the pages are written from."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node

from octavo.graphs.describe import dtype_name, operation_of, value_names
from octavo.graphs.moves import Move, moves_of
from octavo.kernels.operator import OPERATORS
from octavo.passes.base import LAYER, Compilation, PassContext, backend_of, operator_of, values_of
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction, Source
from octavo.passes.plan_buffers import INPUT_PIECE, Buffer
from octavo.passes.split import SplitPiece

SCHEMA = 2
"""Of the report; raised when a field changes its meaning or goes away."""
GENERATOR = "octavo graphs dump"
Facts = dict[str, Any]


def facts_of(compilation: Compilation, context: PassContext, buckets: Sequence[int]) -> Facts:
    """Pieces, regions, buffers, buckets and collectives of a lowered compilation, ready for JSON."""
    names = value_names(compilation)
    moves = moves_of(compilation, context)
    kinds = _kinds(compilation)
    buffers = [_buffer(buffer, compilation, names) for buffer in compilation.buffers.values()]
    pieces = _pieces(compilation, names, kinds, moves)
    regions = _regions(compilation)
    facts: Facts = {
        "ranks": context.ranks,
        "rows": _placement(context),
        "device": context.device,
        "backends": {name: context.backends.get(name, "reference") for name in sorted(OPERATORS)},
        "kinds": [_kind(name, members, compilation, pieces, regions) for name, members in kinds.items()],
        "pieces": pieces,
        "regions": regions,
        "buffers": buffers,
        "storages": _storages(compilation, names),
        "experts": "replicated" if context.replicated_experts else "sharded",
        "collectives": [_collective(move) for move in moves],
        "collectives_captured": {
            "value": context.collectives.value,
            "reason": context.collectives.reason,
            "bytes_sent_per_row": sum(move.bytes_sent for move in moves),
        },
        "results": [names[node.name] for node in compilation.graph.output_node().all_input_nodes],
    }
    row_bytes = sum(storage["bytes_per_row"] for storage in facts["storages"])
    sent = sum(move.bytes_sent for move in moves)
    facts["buckets"] = [
        {
            "rows": bucket,
            "buffer_bytes": bucket * row_bytes,
            "collective_bytes_sent_per_rank": round(bucket * sent),
            "most_padding_rows": bucket - (buckets[place - 1] if place else 0) - 1,
        }
        for place, bucket in enumerate(buckets)
    ]
    facts["plan_hash"] = _plan_hash(facts)
    return facts


def _plan_hash(facts: Facts) -> str:
    """Equal on ranks that fit together. Digests and texts are left out: they may hold a rank's first expert."""
    equal = {
        what: [{key: value for key, value in each.items() if key not in ("digest", "text")} for each in facts[what]]
        for what in ("kinds", "regions")
    }
    return hashlib.sha256(json.dumps(facts | equal, sort_keys=True).encode()).hexdigest()[:16]


def _placement(context: PassContext) -> str:
    if context.ranks == 1:
        return "whole"
    return "sharded" if context.sharded else "replicated"


def _kinds(compilation: Compilation) -> dict[str, list[int]]:
    """Places of equal pieces, by a name such as S1 (segment), B1 (break), C1 (collective)."""
    groups: dict[tuple[PieceKind, str], list[int]] = {}
    for place, instruction in enumerate(compilation.instructions):
        groups.setdefault((instruction.kind, instruction.digest), []).append(place)
    counts: Counter[PieceKind] = Counter()
    named = {}
    for (kind, _), members in groups.items():
        counts[kind] += 1
        named[f"{kind.value[0].upper()}{counts[kind]}"] = members
    return named


def _pieces(
    compilation: Compilation, names: dict[str, str], kinds: dict[str, list[int]], moves: Sequence[Move]
) -> list[Facts]:
    named = {place: name for name, members in kinds.items() for place in members}
    moved = {move.piece: f"{move.operation}: {move.why}" for move in moves}
    why = {i.number: moved[i.number] for i in compilation.instructions if i.kind is PieceKind.COLLECTIVE}
    why |= {i.number: "; ".join(i.reasons) for i in compilation.instructions if i.kind is PieceKind.BREAK}
    pieces = []
    for place, (instruction, piece) in enumerate(zip(compilation.instructions, compilation.pieces, strict=True)):
        pieces.append(
            {
                "number": instruction.number,
                "kind": instruction.kind.value,
                "of": named[place],
                "layers": list(instruction.layers),
                "why": why.get(instruction.number, "") or _between(place, compilation, named),
                "inputs": [
                    {"from": _provenance(operand.source), "name": names[operand.name]}
                    for operand in instruction.operands
                ],
                "writes": [names[name] for name in instruction.results],
                "updates": _updates(piece, names),
            }
        )
    return pieces


def _between(place: int, compilation: Compilation, named: dict[int, str]) -> str:
    """Why a segment begins and ends: its neighbours."""
    last = len(compilation.instructions) - 1
    begin = "the start" if place == 0 else f"{_operations(compilation.pieces[place - 1])} ({named[place - 1]})"
    end = "the end" if place == last else f"{_operations(compilation.pieces[place + 1])} ({named[place + 1]})"
    return f"from {begin} to {end}"


def _common_why(members: list[int], compilation: Compilation, pieces: list[Facts]) -> str:
    """The reason of equal pieces; segments name all their neighbours."""
    if len(members) == 1 or compilation.instructions[members[0]].kind is not PieceKind.SEGMENT:
        return str(pieces[members[0]]["why"])
    last = len(compilation.pieces) - 1
    begins = ("the start" if place == 0 else _operations(compilation.pieces[place - 1]) for place in members)
    ends = ("the end" if place == last else _operations(compilation.pieces[place + 1]) for place in members)
    return f"from {' or '.join(dict.fromkeys(begins))} to {' or '.join(dict.fromkeys(ends))}"


def _operations(piece: SplitPiece) -> str:
    return ", ".join(dict.fromkeys(operation_of(node) for node in piece.piece.nodes if _computes(node)))


def _computes(node: Node) -> bool:
    """Whether it is more than the unpacking of a result."""
    return "getitem" not in str(node.target)


def _provenance(source: Source) -> str:
    return source.value if source is not Source.STATIC else "buffer"


def _updates(piece: SplitPiece, names: dict[str, str]) -> list[str]:
    """Pools that the piece writes."""
    found: dict[str, None] = {}
    for node in piece.piece.nodes:
        known = operator_of(node)
        if known is None or not known.mutates:
            continue
        for argument, value in zip((a.name for a in known.overload._schema.arguments), node.args, strict=False):
            if argument in known.mutates and isinstance(value, Node):
                found[names[value.name]] = None
    return list(found)


def _regions(compilation: Compilation) -> list[Facts]:
    """Kinds of regions, in order of first appearance: what would be compiled once each."""
    kinds: dict[str, Facts] = {}
    for piece in compilation.pieces:
        for node in piece.piece.nodes:
            text = piece.regions.get(node.name)
            if text is None:
                continue
            if text not in kinds:
                name = f"{operation_of(node)}.{backend_of(node).name}"
                kinds[text] = {"of": f"R{len(kinds) + 1}", "name": name, "count": 0, "layers": [], "text": text}
            kinds[text]["count"] += 1
            if node.meta[LAYER] is not None and node.meta[LAYER] not in kinds[text]["layers"]:
                kinds[text]["layers"].append(node.meta[LAYER])
    return list(kinds.values())


def _calls(piece: SplitPiece, regions: Mapping[str, str]) -> list[Facts]:
    """What a piece computes, in order: operators, with the kind of those that are regions, and nodes between them.

    ``layer`` is a place among the piece's layers, ``regions`` the names of kinds by text.
    """
    calls: list[Facts] = []
    place = 0
    for node in piece.piece.nodes:
        if node.meta[LAYER] is not None:
            place = piece.layers.index(node.meta[LAYER])
        if _computes(node):
            what = "operator" if operator_of(node) is not None else "node"
            calls.append({"layer": place, what: operation_of(node)})
            if node.name in piece.regions:
                calls[-1]["region"] = regions[piece.regions[node.name]]
    return calls


def _kind(
    name: str, members: list[int], compilation: Compilation, pieces: list[Facts], regions: Sequence[Facts]
) -> Facts:
    first: Instruction = compilation.instructions[members[0]]
    piece: SplitPiece = compilation.pieces[members[0]]
    nodes = [node for node in piece.piece.nodes if _computes(node)]
    counts: Counter[str] = Counter()
    bytes_by: Counter[str] = Counter()
    values = {node.name: node for node in compilation.graph.nodes}
    for operand in first.operands:
        provenance = _provenance(operand.source)
        counts[provenance] += 1
        if operand.source is Source.STATIC:
            bytes_by[provenance] += compilation.buffers[operand.name].row_bytes
        else:
            bytes_by[provenance] += sum(value.nbytes for value in values_of(values[operand.name]))
    return {
        "of": name,
        "kind": first.kind.value,
        "count": len(members),
        "pieces": [compilation.instructions[place].number for place in members],
        "layers": sorted({layer for place in members for layer in compilation.instructions[place].layers}),
        "why": _common_why(members, compilation, pieces),
        "nodes": len(nodes),
        "operators": dict(Counter(operation_of(node) for node in nodes)),
        "calls": _calls(piece, {region["text"]: region["of"] for region in regions}),
        "inputs": dict(counts),
        "buffer_bytes_in_per_row": bytes_by["buffer"],
        "buffer_bytes_out_per_row": sum(compilation.buffers[result].row_bytes for result in first.results),
        "weight_bytes": bytes_by["weight"] + bytes_by["constant"],
        "pool_bytes": bytes_by["pool"],
        "digest": first.digest,
    }


def _buffer(buffer: Buffer, compilation: Compilation, names: dict[str, str]) -> Facts:
    factor = "b" if buffer.rows_factor == 1 else f"{buffer.rows_factor}*b"
    end = len(compilation.pieces)
    aliases = [
        names[other.name]
        for other in compilation.buffers.values()
        if other.storage == buffer.storage and other.name != buffer.name
    ]
    return {
        "name": names[buffer.name],
        "dtype": dtype_name(buffer.dtype),
        "shape": f"[{', '.join((factor, *map(str, buffer.row_shape)))}]",
        "bytes_per_row": buffer.row_bytes,
        "writer": "step inputs" if buffer.writer == INPUT_PIECE else buffer.writer,
        "readers": ["result" if reader == end else reader for reader in buffer.readers],
        "life": [buffer.writer, buffer.last],
        "storage": buffer.storage,
        "aliases": aliases,
        "dead_rows": buffer.dead_rows,
    }


def _storages(compilation: Compilation, names: dict[str, str]) -> list[Facts]:
    tenants: dict[int, list[Buffer]] = {}
    for buffer in compilation.buffers.values():
        tenants.setdefault(buffer.storage, []).append(buffer)
    return [
        {
            "storage": storage,
            "bytes_per_row": max(buffer.row_bytes for buffer in members),
            "buffers": [names[buffer.name] for buffer in members],
        }
        for storage, members in sorted(tenants.items())
    ]


def _collective(move: Move) -> Facts:
    return {
        "piece": move.piece,
        "layers": list(move.layers),
        "operation": move.operation,
        "values": list(move.values),
        "readers": list(move.readers),
        "why": move.why,
        "bytes_in_per_row": move.bytes_in,
        "bytes_out_per_row": move.bytes_out,
        "bytes_sent_per_row": move.bytes_sent,
    }
