"""Defects of every kind, made behind the planner's back, are found before a program exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.kernels import OPERATORS
from octavo.passes.base import LAYER, PIECE, Compilation, GraphError, PassContext
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Source
from octavo.passes.plan_buffers import INPUT_PIECE
from octavo.passes.prove import Prove
from tests.passes.compiled import changed_instruction, collectives, compiled, fresh, layer_nodes, run_all
from tests.passes.test_place import delete

CONTEXT = PassContext(ranks=2)


def crossing(compilation: Compilation, layer: int = 5) -> str:
    """A buffer that the attention of a layer hands to the segment behind it."""
    node = layer_nodes(compilation, "attend", layer)[0]
    assert node.name in compilation.buffers
    return node.name


def writer_of(compilation: Compilation, name: str) -> int:
    (place,) = [i for i, each in enumerate(compilation.instructions) if name in each.results]
    return place


def reader_of(compilation: Compilation, name: str) -> int:
    readers = [i for i, each in enumerate(compilation.instructions) if name in [o.name for o in each.operands]]
    return readers[0]


def live_value(compilation: Compilation) -> str:
    """An operand of a captured segment is this step's own tensor."""
    place = reader_of(compilation, crossing(compilation))
    operands = list(compilation.instructions[place].operands)
    at = [operand.name for operand in operands].index(crossing(compilation))
    operands[at] = replace(operands[at], source=Source.LIVE)
    changed_instruction(compilation, place, operands=tuple(operands))
    return "reads the live value"


def two_writers(compilation: Compilation) -> str:
    name = crossing(compilation)
    place = writer_of(compilation, name) + 1
    results = compilation.instructions[place].results
    changed_instruction(compilation, place, results=(*results, name))
    return "which .* wrote before"


def no_policy(compilation: Compilation) -> str:
    name = crossing(compilation)
    compilation.buffers[name] = replace(compilation.buffers[name], dead_rows="whatever")
    return f"reads dead rows of {name}, for which there is no policy"


def unlisted(compilation: Compilation) -> str:
    """A value survives a break without a buffer."""
    name = crossing(compilation)
    del compilation.buffers[name]
    return f"(reads|writes) {name}, which has no buffer"


def overlapping(compilation: Compilation) -> str:
    """A value's storage is given to another that is written before the last reader."""
    name = crossing(compilation)
    buffers = compilation.buffers
    inside = [b for b in buffers.values() if b.writer != INPUT_PIECE and b.writer < buffers[name].writer <= b.last]
    victim = next(b for b in inside if b.last > buffers[name].writer)
    buffers[name] = replace(buffers[name], storage=victim.storage)
    return "whose address now holds"


def read_before_write(compilation: Compilation) -> str:
    name = crossing(compilation)
    place = writer_of(compilation, name)
    steps = compilation.instructions
    steps[place], steps[place + 1] = steps[place + 1], steps[place]
    return "(before anything writes it|must run before)"


def never_written(compilation: Compilation) -> str:
    name = crossing(compilation)
    place = writer_of(compilation, name)
    kept = tuple(result for result in compilation.instructions[place].results if result != name)
    changed_instruction(compilation, place, results=kept)
    return f"reads {name} before anything writes it"


def missing_gather(compilation: Compilation) -> str:
    """A layer's latents stay where they are, though other ranks' rows attend to them."""
    node = next(n for n in collectives(compilation) if n.meta[LAYER] == 5)
    delete(node)
    return "needs all rows of"


def missing_sum(compilation: Compilation) -> str:
    delete(layer_nodes(compilation, "reduce_rows", 5)[0])
    return "needs the sum of"


def wrong_order(compilation: Compilation) -> str:
    """Rank-major where global order is needed: shapes fit, and the piece looks like other layers'."""
    node = next(n for n in layer_nodes(compilation, "gather_rows", 5) if n.args[2])
    node.update_arg(2, False)
    return "needs ordered rows"


def swapped_pools(compilation: Compilation) -> str:
    """A layer's window is committed before the layer attends: no value says so, only the pool."""
    attend = layer_nodes(compilation, "attend", 5)[0].meta[PIECE]
    commit = layer_nodes(compilation, "commit_window", 5)[0].meta[PIECE]
    assert attend != commit, "the test needs them in instructions of their own"
    steps = compilation.instructions
    steps[attend], steps[commit] = steps[commit], steps[attend]
    return "must run before"


DEFECTS: list[Callable[[Compilation], str]] = [
    live_value,
    two_writers,
    no_policy,
    unlisted,
    overlapping,
    read_before_write,
    never_written,
    missing_gather,
    missing_sum,
    wrong_order,
]


def lowered(capturable: frozenset[str] | None = None) -> tuple[Compilation, PassContext]:
    context = replace(CONTEXT, capturable=capturable)
    return run_all(fresh(2), context, last="lower"), context


@pytest.fixture
def program() -> Compilation:
    return lowered()[0]


def test_the_body_is_proved(program: Compilation) -> None:
    operands = sum(len(each.operands) for each in program.instructions)
    assert Prove().run(program, CONTEXT).matched > operands + len(list(program.calls()))


@pytest.mark.parametrize("inject", DEFECTS, ids=[inject.__name__ for inject in DEFECTS])
def test_defects(program: Compilation, inject: Callable[[Compilation], str]) -> None:
    """The error names a node or instruction, layer 5 or its neighbour, and the rule."""
    rule = inject(program)
    with pytest.raises(GraphError, match=rf"^\w+ \(layer [3456]\): .*{rule}"):
        Prove().run(program, CONTEXT)


def test_pools_out_of_order() -> None:
    """With one break between them attend and commit are instructions of their own, and may not change places."""
    program, context = lowered(frozenset(OPERATORS) - {"attend"})
    rule = swapped_pools(program)
    with pytest.raises(GraphError, match=rf"\(layer 5\): .*{rule}"):
        Prove().run(program, context)


def test_overwritten_result(program: Compilation) -> None:
    """What the program returns must still be there at its end."""
    (name, *_) = [node.name for node in program.graph.output_node().all_input_nodes][1:]
    later = next(b for b in program.buffers.values() if b.writer > program.buffers[name].writer)
    program.buffers[later.name] = replace(later, storage=program.buffers[name].storage)
    with pytest.raises(GraphError, match=rf"^{re.escape(name)}.*: is a result of the program and its storage"):
        Prove().run(program, CONTEXT)


def test_every_buffer_is_needed(program: Compilation, long_form: bool) -> None:
    """Whichever buffer is taken away, the proof fails."""
    assert len(program.buffers) > 100
    for name, buffer in list(program.buffers.items())[:: 1 if long_form else 8]:
        del program.buffers[name]
        with pytest.raises(GraphError, match=re.escape(name)):
            Prove().run(program, CONTEXT)
        program.buffers[name] = buffer
    Prove().run(program, CONTEXT)


def test_every_order_matters(program: Compilation, long_form: bool) -> None:
    """Each instruction that reads its predecessor's result cannot run before it."""
    steps = program.instructions
    tried = 0
    for place in range(0, len(steps) - 1, 1 if long_form else 3):
        if set(steps[place].results) & {operand.name for operand in steps[place + 1].operands}:
            steps[place], steps[place + 1] = steps[place + 1], steps[place]
            with pytest.raises(GraphError):
                Prove().run(program, CONTEXT)
            steps[place], steps[place + 1] = steps[place + 1], steps[place]
            tried += 1
    assert tried > len(steps) // 6
    assert {step.kind for step in steps} == set(PieceKind)


def test_compiled_programs_are_proved() -> None:
    for ranks in (1, 2):
        assert compiled(ranks).instructions
