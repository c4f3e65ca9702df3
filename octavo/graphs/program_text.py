"""A program as Python that a person can read, and that runs: one function per kind of piece, and the step's list."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from octavo.graphs.beside import runs_beside
from octavo.graphs.describe import WIDTH, operation_of, shapes_of, value_names
from octavo.graphs.facts import Facts
from octavo.graphs.tables import ranges
from octavo.kernels.collectives import gather_rows, shard_rows
from octavo.passes.base import Compilation, operator_of, tensor_arguments
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction, Source
from octavo.passes.split import SplitPiece

_HEADER = '''"""Written by `{generator}` to be read: the engine runs the same instructions, but not from this file.

It is Python nevertheless: `step` runs it, given dicts of tensors by name (import octavo.kernels first). Equal pieces
are one function. In comments, r is the number of rows on this rank. Assigning to `b[...]` stands for copying into
that static buffer.
"""

import torch
from torch import ops
'''
_SOURCES = {Source.STATIC: "b", Source.WEIGHT: "w", Source.CONSTANT: "w", Source.POOL: "p", Source.LIVE: "live"}


def program_text(compilation: Compilation, facts: Facts, generator: str) -> list[str]:
    """Lines of the program; ``facts`` are the compilation's (:func:`octavo.graphs.facts.facts_of`)."""
    names = value_names(compilation)
    lines = _HEADER.format(generator=generator).split("\n")
    for kind in facts["kinds"]:
        if kind["kind"] != PieceKind.COLLECTIVE.value:
            place = kind["pieces"][0]
            lines += ["", *_function(compilation.pieces[place], kind, names), ""]
    lines += [
        "",
        "def step(b, w, p, communicator=None):",
        '    """b: static buffers. w: weights and constants. p: pools, which the pieces update in place."""',
    ]
    layers: tuple[int, ...] | None = None
    functions = {kind["of"]: _function_name(kind) for kind in facts["kinds"]}
    for instruction, piece, fact in zip(compilation.instructions, compilation.pieces, facts["pieces"], strict=True):
        if instruction.layers[:1] and instruction.layers[:1] != layers:
            layers = instruction.layers[:1]
            lines.append(f"    # layer {layers[0]}")
        lines += _instruction(instruction, piece, functions[fact["of"]], names)
    results = "".join(f'b["{result}"], ' for result in facts["results"])
    return [*lines, f"    return {results.rstrip(', ')}"]


def _function_name(kind: Facts) -> str:
    return f"{kind['kind']}_{kind['of'][1:]}"


def _function(piece: SplitPiece, kind: Facts, names: dict[str, str]) -> list[str]:
    nodes = {node.name: node for own in piece.piece.nodes for node in (own, *own.all_input_nodes)}
    local: dict[str, str] = {}
    taken: set[str] = {"ops", "torch"}
    for name in piece.operands:
        local[name] = _identifier(names[name], taken)
    parameters = [f"{local[name]},  # {shapes_of(nodes[name])}" for name in piece.operands]
    if _moves_rows(piece):
        taken.add("communicator")
        parameters.insert(0, "communicator,")
    head = [f"def {_function_name(kind)}(", *(f"    {parameter}" for parameter in parameters), "):"]
    times = "Once" if kind["count"] == 1 else f"{kind['count']} times"
    body = [f'"""{times}, {kind["why"]}. Pieces: {ranges(kind["pieces"])}."""']
    beside = runs_beside(piece.piece.nodes) if piece.piece.kind is PieceKind.SEGMENT else {}
    for node in piece.piece.nodes:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            local[node.name] = f"{local[source.name]}[{index}]"
            continue
        call = _call(node, local)
        if node.users:
            local[node.name] = _identifier(names[node.name], taken)
            call[0] = f"{local[node.name]} = {call[0]}"
        call[-1] += f"  # {shapes_of(node)}" if node.users else ""
        call[-1] += ", on a second stream of a GPU until it is read" if node in beside else ""
        body += call
    if piece.results:
        body.append(f"return {', '.join(local[name] for name in piece.results)}")
    return head + [f"    {line}" for line in body]


def _moves_rows(piece: SplitPiece) -> bool:
    return any(known is not None and known.contract.collective for known in map(operator_of, piece.piece.nodes))


def _communication(call: Node) -> tuple[str, str]:
    """What stands before and behind what a collective is given."""
    if operator_of(call) is shard_rows:
        return "communicator.shard([", "])"
    if operator_of(call) is gather_rows:
        return "communicator.gather([", f"], ordered={bool(call.args[2])})"
    return "communicator.reduce(", f", scatter={bool(call.args[2])})"


def _call(node: Node, local: dict[str, str]) -> list[str]:
    assert isinstance(node.target, torch._ops.OpOverload)
    known = operator_of(node)
    if known is not None and known.contract.collective:
        head, tail = _communication(node)
        return _wrapped(head, [local[value.name] for _, value in tensor_arguments(node)], tail)
    schema = [argument.name for argument in node.target._schema.arguments]
    ours = operator_of(node) is not None
    given = [(name if ours else "", value) for name, value in zip(schema, node.args, strict=False)]
    given += list(node.kwargs.items())
    arguments = [(f"{name}=" if name else "") + _literal(value, local) for name, value in given]
    namespace = node.target.namespace
    return _wrapped(f"ops.{namespace}.{operation_of(node)}.{node.target._overloadname}(", arguments, ")")


def _literal(value: Any, local: dict[str, str]) -> str:
    if isinstance(value, Node):
        return local[value.name]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(member, local) for member in value)}]"
    return repr(value)


def _instruction(instruction: Instruction, piece: SplitPiece, function: str, names: dict[str, str]) -> list[str]:
    operands = [f'{_SOURCES[operand.source]}["{names[operand.name]}"]' for operand in instruction.operands]
    targets = [f'b["{names[name]}"]' for name in instruction.results]
    head, tail = f"{function}(", ")"
    call = piece.piece.nodes[0]
    if instruction.kind is PieceKind.COLLECTIVE:
        head, tail = _communication(call)
        if len(targets) == 1 and operator_of(call) in (gather_rows, shard_rows):
            targets = [f"({targets[0]},)"]
    elif _moves_rows(piece):
        operands.insert(0, "communicator")
    assignment = [f"{', '.join(targets)} = "] if targets else [""]
    if len(assignment[0]) > WIDTH // 2:
        assignment = ["(", *(f"    {target}," for target in targets), ") = "]
    lines = _wrapped(assignment[-1] + head, operands, tail)
    lines[-1] += f"  # {instruction.number}"
    return [f"    {line}" for line in (*assignment[:-1], *lines)]


def _wrapped(head: str, arguments: Sequence[str], tail: str) -> list[str]:
    """One line if it fits, else as many arguments in each as fit."""
    joined = head + ", ".join(arguments) + tail
    if len(joined) <= WIDTH:
        return [joined]
    lines, current = [head], ""
    for place, argument in enumerate(arguments):
        part = argument + ("," if place + 1 < len(arguments) else "")
        if current and len(current) + len(part) + 5 > WIDTH:
            lines.append(f"    {current}")
            current = part
        else:
            current = f"{current} {part}" if current else part
    return [*lines, f"    {current}", tail]


def _identifier(name: str, taken: set[str]) -> str:
    """A Python name for a value or input, without its layer; unique among ``taken``, to which it is added."""
    short = re.sub(r"^(L\d+|step|rows|tokens|state|layers\.\d+)\.", "", name)
    short = re.sub(r"[^0-9A-Za-z]+", "_", short).strip("_")
    if not short.isidentifier() or keyword.iskeyword(short):
        short = f"v_{short}"
    found, number = short, 2
    while found in taken:
        found, number = f"{short}_{number}", number + 1
    taken.add(found)
    return found
