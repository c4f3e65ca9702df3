"""The memory of a step: the peak that the graph foretells is what an eager run holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Interpreter

from octavo.graphs.compile import input_names
from octavo.graphs.footprint import buffer_bytes, peak_bytes
from octavo.graphs.program import Program
from octavo.passes.lower import Instruction
from tests.passes.compiled import CPU, batch, compiled, new_pools, resident_tensors


def test_peak_is_that_of_a_run() -> None:
    """A real run, node by node in the order of the graph, with everything weighed that some later node still needs."""
    compilation = compiled()
    values = {path: value.clone() for path, value in batch([21]).values(0, 1, True).items()}
    resident = resident_tensors(0, 1, new_pools())
    paths = {name: entry.path for name, entry in compilation.inputs.items()}
    held: dict[str, object] = {name: (values | resident)[path] for name, path in paths.items()}
    fixed = {name for name, path in paths.items() if path in resident}
    order = list(compilation.graph.nodes)
    last = {argument.name: node for node in order for argument in node.all_input_nodes}
    interpreter = Interpreter(compilation.module, garbage_collect_values=False)
    interpreter.env = {node: held[node.name] for node in order if node.op == "placeholder"}
    peak = 0
    with torch.no_grad():
        for node in order:
            if node.op == "call_function":
                held[node.name] = interpreter.run_node(node)
                interpreter.env[node] = held[node.name]
            peak = max(peak, storage_bytes([value for name, value in held.items() if name not in fixed]))
            for argument in node.all_input_nodes:
                if last[argument.name] is node and argument.name not in fixed:
                    held.pop(argument.name, None)
    assert peak_bytes(compilation, 21) == peak > 21 * 4 * 128 * 2


def storage_bytes(values: list[object]) -> int:
    """Bytes of the distinct storages behind tensors and tuples of them."""
    found = {}
    for value in values:
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def test_buffers_are_what_a_program_allocates() -> None:
    for ranks in (1, 4):
        compilation = compiled(ranks)
        program = Program(compilation, resident_tensors(0, ranks, new_pools()), (8, 24), CPU)
        assert buffer_bytes(compilation, 24) == program.buffer_bytes > 0


@torch.no_grad()
def test_eager_runs_forget_what_is_read() -> None:
    """Values that cross boundaries are dropped behind their last reader, in this mode as in the plan."""
    compilation = compiled()
    pools = new_pools()
    program = Program(compilation, resident_tensors(0, 1, pools), (24,), CPU)
    program.warm_up()
    names = input_names(compilation)
    values = {names[path]: value for path, value in batch([21]).values(0, 1, True).items() if path in names}
    held: list[int] = []
    forget = program._forget

    def weigh(instruction: Instruction, live: dict[str, Tensor]) -> None:
        held.append(storage_bytes(list(live.values())))
        forget(instruction, live)

    program._forget = weigh  # type: ignore[method-assign]
    program.run_eager(values)
    assert len(held) == len(program.instructions)
    assert max(held) <= 1.2 * peak_bytes(compilation, 21), "everything of every layer is held"
