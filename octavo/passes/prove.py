"""Pass 11: provenance. From the lowered program and the contracts, never from the planner's own tables.

It walks the instructions as the executor will and checks that every captured segment reads weights, pools and static
buffers alone; that a buffer is written once, before it is read, and still holds its value then; that every dead row
that is read has a policy; and that every operator is given the rows that its contract asks for. A violation stops the
start-up and names node and layer (design section 4).
"""

from __future__ import annotations

from torch.fx import Node

from octavo.kernels.operator import DeadRows
from octavo.passes.base import (
    PIECE,
    Compilation,
    GraphError,
    InputKind,
    PassContext,
    PassReport,
    operator_of,
    tensor_arguments,
)
from octavo.passes.lower import Instruction, Source
from octavo.passes.place import check_placed
from octavo.passes.plan_buffers import INPUT_PIECE

POLICIES = frozenset(policy.value for policy in DeadRows)


class Prove:
    name = "prove"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        if not compilation.instructions:
            raise GraphError("no instructions: lower runs first")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        holds: dict[int, str] = {}
        """What value each storage holds now."""
        written: dict[str, str] = {}
        """Who wrote each buffer."""
        for name, buffer in compilation.buffers.items():
            if buffer.writer == INPUT_PIECE:
                written[name], holds[buffer.storage] = "the step's inputs", name
        facts = check_placed(compilation, context) + _check_pools(compilation)
        for instruction in compilation.instructions:
            for operand in instruction.operands:
                _check_operand(operand.source, operand.name, instruction, compilation, written, holds)
                facts += 1
            for name in instruction.results:
                _check_result(name, instruction, compilation, written)
                written[name], holds[compilation.buffers[name].storage] = instruction.title, name
                facts += 1
        for node in compilation.graph.output_node().all_input_nodes:
            if node.name not in written:
                raise GraphError("is a result of the program and nothing writes it", node)
            if holds[compilation.buffers[node.name].storage] != node.name:
                raise GraphError("is a result of the program and its storage is overwritten", node)
        return PassReport(facts)

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        pass


def _check_pools(compilation: Compilation) -> int:
    """Instructions read and write pools in the order of contracts, whatever order their nodes had before."""
    writers: dict[str, list[tuple[int, Instruction]]] = {}
    readers: list[tuple[int, Instruction, str, bool]] = []
    moment = 0
    for instruction in compilation.instructions:
        inputs = [node for node in instruction.module.graph.nodes if node.op == "placeholder"]
        names = {node: operand.name for node, operand in zip(inputs, instruction.operands, strict=True)}
        for node in instruction.module.graph.nodes:
            known = operator_of(node)
            if known is None:
                continue
            moment += 1
            for argument, value in tensor_arguments(node):
                name = names.get(value)
                entry = None if name is None else compilation.inputs.get(name)
                if name is None or entry is None or entry.kind is not InputKind.POOL:
                    continue
                if argument in known.mutates:
                    writers.setdefault(name, []).append((moment, instruction))
                else:
                    readers.append((moment, instruction, name, known.reads_before_write(argument)))
    for when, reader, name, before in readers:
        for written, writer in writers.get(name, []):
            if (when < written) is not before:
                side = "before" if before else "after"
                layer = reader.layers[0] if reader.layers else None
                node = _reader(name, reader, compilation)
                raise GraphError(f"{reader.title} reads {name} and must run {side} {writer.title}", node, layer)
    return len(readers)


def _check_operand(
    source: Source,
    name: str,
    instruction: Instruction,
    compilation: Compilation,
    written: dict[str, str],
    holds: dict[int, str],
) -> None:
    layer = instruction.layers[0] if instruction.layers else None
    reader = _reader(name, instruction, compilation)
    if source is Source.LIVE:
        raise GraphError(f"{instruction.title} reads the live value {name}, which has no static buffer", reader, layer)
    if source is not Source.STATIC:
        return
    if name not in compilation.buffers:
        raise GraphError(f"{instruction.title} reads {name}, which has no buffer", reader, layer)
    buffer = compilation.buffers[name]
    if name not in written:
        raise GraphError(f"{instruction.title} reads {name} before anything writes it", reader, layer)
    if holds[buffer.storage] != name:
        raise GraphError(
            f"{instruction.title} reads {name}, whose address now holds {holds[buffer.storage]}", reader, layer
        )
    if buffer.dead_rows not in POLICIES and not buffer.dead_rows.startswith("filled with "):
        raise GraphError(f"{instruction.title} reads dead rows of {name}, for which there is no policy", reader, layer)


def _check_result(name: str, instruction: Instruction, compilation: Compilation, written: dict[str, str]) -> None:
    layer = instruction.layers[0] if instruction.layers else None
    if name not in compilation.buffers:
        raise GraphError(f"{instruction.title} writes {name}, which has no buffer", name, layer)
    if name in written:
        raise GraphError(f"{instruction.title} writes {name}, which {written[name]} wrote before", name, layer)


def _reader(name: str, instruction: Instruction, compilation: Compilation) -> Node | str:
    """The node of the whole graph that reads the value in this instruction."""
    found: Node | str = name
    for node in compilation.graph.nodes:
        if node.name == name:
            readers = [user for user in node.users if user.meta.get(PIECE) == instruction.number]
            found = readers[0] if readers else node
    return found
