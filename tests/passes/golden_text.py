"""The compiled mini body as text that depends on nothing but what it computes: not on torch's names or symbols."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from octavo.passes.base import LAYER, PLACEMENT, ROLE, VALUE, Compilation, Placement, operator_of, values_of
from octavo.passes.plan_buffers import INPUT_PIECE
from tests.passes.compiled import compiled

GOLDENS = Path(__file__).parent.parent / "goldens" / "graphs"
CASES = {"one_rank": (1, True), "four_ranks_sharded": (4, True), "four_ranks_replicated": (4, False)}


class _Name(str):
    """Printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def numbering(compilation: Compilation) -> dict[str, str]:
    """Own name of every value: inputs by path, calls by their place among the calls."""
    names = {}
    calls = 0
    for node in compilation.graph.nodes:
        if node.op == "placeholder":
            names[node.name] = compilation.inputs[node.name].path
        elif node.op == "call_function":
            names[node.name] = f"%{calls}"
            calls += 1
    return names


def shape_text(value: torch.Tensor) -> str:
    """dtype[shape]; the one dynamic extent is r, n times r on n ranks."""
    extents = []
    for extent in value.shape:
        factor = re.match(r"(\d+)(\*|$)", str(extent))
        symbolic = not str(extent).isdigit()
        extents.append((factor[1] if factor else "") + "r" * symbolic)
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(extents)}]"


def _operation(node: Node) -> str:
    known = operator_of(node)
    if known is not None:
        return known.name
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return "item"


def _placement_text(node: Node) -> str:
    placement = node.meta[PLACEMENT]
    several = placement if isinstance(placement, tuple) else (placement,)
    return "; ".join(each.value for each in several if isinstance(each, Placement))


def graph_text(compilation: Compilation) -> str:
    """One line a call: number, operation, arguments, layer, role, shapes and placement."""
    names = numbering(compilation)
    lines = []
    for node in compilation.calls():
        arguments = map_arg(node.args, lambda other: _Name(names[other.name]))
        values = " ".join(shape_text(value) for value in values_of(node)) if node.meta[VALUE] is not None else "none"
        layer = "-" if node.meta[LAYER] is None else node.meta[LAYER]
        where = f"layer {layer} {node.meta[ROLE] or '-'}"
        text = ", ".join(repr(argument) for argument in arguments)
        lines.append(f"{names[node.name]} = {_operation(node)}({text}) | {where} | {values} | {_placement_text(node)}")
    results = [names[node.name] for node in compilation.graph.output_node().all_input_nodes]
    return "\n".join([*lines, f"results {', '.join(results)}", ""])


def plan_text(compilation: Compilation) -> str:
    """Pieces with their reasons, operands and results; then buffers with their lives and storages."""
    names = numbering(compilation)
    lines = []
    for instruction in compilation.instructions:
        reasons = "; ".join(instruction.reasons) or "-"
        operands = ", ".join(f"{operand.source.value} {names[operand.name]}" for operand in instruction.operands)
        results = ", ".join(names[name] for name in instruction.results) or "nothing"
        lines += [f"piece {instruction.title} | {reasons}", f"  reads {operands}", f"  writes {results}"]
    for buffer in compilation.buffers.values():
        writer = "inputs" if buffer.writer == INPUT_PIECE else f"piece {buffer.writer}"
        shape = f"{str(buffer.dtype).removeprefix('torch.')}[{buffer.rows_factor}r{list(buffer.row_shape)}]"
        readers = ", ".join(str(reader) for reader in buffer.readers)
        lines.append(
            f"buffer {names[buffer.name]} | {shape} | {writer} -> {readers} | storage {buffer.storage} "
            f"| dead rows {buffer.dead_rows}"
        )
    return "\n".join([*lines, ""])


def texts() -> dict[str, str]:
    """Every golden text by file name."""
    found = {}
    for name, (ranks, sharded) in CASES.items():
        compilation = compiled(ranks, 0, sharded)
        found[f"{name}.graph.txt"] = graph_text(compilation)
        found[f"{name}.plan.txt"] = plan_text(compilation)
    return found
