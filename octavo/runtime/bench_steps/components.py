"""Where a step's time goes: device time of every operator, summed by the component of the floor that it belongs to.

The instructions of the programs run eagerly, one node after another, compiled regions included. On a GPU the profiler
says what ran for each; on the CPU a clock does. Inductor merges kernels within an operator, never across two.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from octavo.passes.base import ROLE, backend_of, operator_of
from octavo.passes.lower import Instruction, Source
from octavo.runtime.bench_kernels.case import BF16_PER_SECOND
from octavo.runtime.bench_steps.steps import Stage, StepInputs, Steps
from octavo.runtime.bench_trace import record
from octavo.runtime.floor import Component, Floor

ROUTED = "router and experts"
"""One operator computes both."""
NORMS, OTHER = "norms", "other"
"""What has no floor of its own: it could be fused into the products beside it, and the glue between operators."""
_ROUNDS = 3
"""Of which the median counts."""

_BY_OPERATOR = {
    "embed_tokens": Component.EMBEDDING.value,
    "attend": Component.ATTENTION.value,
    "commit_window": Component.ATTENTION.value,
    "publish": Component.COMPRESSOR.value,
    "index_query": Component.INDEX_PROJECTIONS.value,
    "select": Component.INDEX_SCORING.value,
    "select_candidates": Component.INDEX_SCORING.value,
    "experts": ROUTED,
    "shared_expert": Component.SHARED_EXPERT.value,
    "combine": Component.SHARED_EXPERT.value,
    "stream_mean": Component.MHC.value,
    "rms_norm": NORMS,
    "window_latent": NORMS,
    "token_classes": Component.ENGRAM.value,
}
_BY_BEGINNING = {"mhc_": Component.MHC.value, "engram_": Component.ENGRAM.value}
_BY_ROLE = {
    "attn.compressor": Component.COMPRESSOR.value,
    "attn.indexer": Component.INDEX_PROJECTIONS.value,
    "attn": Component.PROJECTIONS.value,
    "engram": Component.ENGRAM.value,
    "ffn.gate": ROUTED,
    "ffn.shared_experts": Component.SHARED_EXPERT.value,
}
"""Of projections, by the beginning of the path of their module within its layer; the longest come first."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What an operator took in one step, all its calls together."""

    component: str
    operator: str
    """With its backend, such as ``linear_f8.torch``; ``-`` for the glue between operators."""
    compiled: bool
    """Its insides by Inductor."""
    calls: int
    seconds: float
    kernels: int | None
    """Launched; None on the CPU."""


Key = tuple[str, str, bool]
"""Component, operator and whether it is compiled."""


def component_of(operator: str, stage: str, role: str) -> str:
    """The component that an operator's call belongs to; :data:`OTHER` if nothing is known of it.

    ``stage`` is ``prelude``, ``body`` or ``epilogue``, ``role`` the path of its module within its layer.
    """
    if stage == "epilogue":
        return Component.HEAD.value
    if stage == "prelude" and operator != "embed_tokens":
        return Component.ENGRAM.value
    if operator in _BY_OPERATOR:
        return _BY_OPERATOR[operator]
    named = [component for beginning, component in _BY_BEGINNING.items() if operator.startswith(beginning)]
    placed = [component for beginning, component in _BY_ROLE.items() if f"{role}.".startswith(f"{beginning}.")]
    return (*named, *placed, OTHER)[0]


def time_operators(steps: Steps, step: StepInputs) -> list[Spent]:
    """What every operator takes in one step, in the order of first use; medians of three runs.

    Empty if the profiler lost events, or may not see them.
    """
    keys = [key for stage in steps.stages for _, key in _nodes(stage)]
    nodes = itertools.chain.from_iterable(walk(steps, step) for _ in range(_ROUNDS))
    call = functools.partial(next, nodes)
    calls = dict.fromkeys(range(_ROUNDS * len(keys)), call)
    found = _on_device(calls, step.last.device) if step.last.device.type == "cuda" else _on_host(calls)
    if len(found) < len(calls):
        return []
    spent: dict[Key, list[tuple[float, int | None]]] = {}
    for place, key in enumerate(keys):
        rounds = [found[place + number * len(keys)] for number in range(_ROUNDS)]
        spent.setdefault(key, []).append((statistics.median(seconds for seconds, _ in rounds), rounds[-1][1]))
    return [
        Spent(
            *key,
            calls=len(each),
            seconds=sum(seconds for seconds, _ in each),
            kernels=None if each[0][1] is None else sum(kernels or 0 for _, kernels in each),
        )
        for key, each in spent.items()
    ]


def _on_device(calls: Mapping[int, Callable[[], object]], device: torch.device) -> dict[int, tuple[float, int | None]]:
    """Seconds in which kernels, copies and fills ran, and their number."""
    recorded = record(calls, device)
    return {key: (sum(end - start for start, end in each.work), each.launches) for key, each in recorded.items()}


def _on_host(calls: Mapping[int, Callable[[], object]]) -> dict[int, tuple[float, int | None]]:
    found: dict[int, tuple[float, int | None]] = {}
    for key, call in calls.items():
        began = time.perf_counter()
        call()
        found[key] = time.perf_counter() - began, None
    return found


def _nodes(stage: Stage) -> Iterator[tuple[Node, Key]]:
    """Every node that computes, and what its time is counted as."""
    for instruction in stage.compilation.instructions:
        module = _module(stage, instruction)
        # A compiled module has the nodes of the other, artifacts in the place of some.
        for node, plain in zip(module.graph.nodes, instruction.module.graph.nodes, strict=True):
            if not _computes(node):
                continue
            known = operator_of(plain)
            if known is None:
                yield node, (OTHER, "-", False)
            else:
                component = component_of(known.name, stage.part.name, plain.meta.get(ROLE) or "")
                yield node, (component, f"{known.name}.{backend_of(plain).name}", node.op == "call_module")


def walk(steps: Steps, step: StepInputs, compiled: bool = True) -> Iterator[None]:
    """Runs the three programs; every step of the iterator is one node that computes. Regions that were compiled run so,
    if ``compiled``."""
    rows = yield from _run(steps.prelude, steps.prelude_inputs(step), compiled)
    results = yield from _run(steps.body, steps.body_inputs(step, rows), compiled)
    yield from _run(steps.epilogue, steps.epilogue_inputs(step, results), compiled)


def _run(stage: Stage, values: Mapping[str, Tensor], compiled: bool) -> Generator[None, None, tuple[Tensor, ...]]:
    live = dict(values)
    inputs = stage.program.inputs
    for instruction in stage.compilation.instructions:
        operands = [
            live[operand.name] if operand.source is Source.STATIC else stage.resident[inputs[operand.name].path]
            for operand in instruction.operands
        ]
        module = _module(stage, instruction) if compiled else instruction.module
        results = yield from _interpret(module, operands)
        live.update(zip(instruction.results, results, strict=True))
    return tuple(live[name] for name in stage.program.outputs)


def _interpret(module: GraphModule, operands: Sequence[Tensor]) -> Generator[None, None, tuple[Tensor, ...]]:
    """The module node by node. Values are dropped behind their last use, so that memory does as in a step."""
    given = iter(operands)
    values: dict[Node, Any] = {}
    last = {operand: node for node in module.graph.nodes for operand in node.all_input_nodes}
    dying: dict[Node, list[Node]] = {}
    for operand, node in last.items():
        dying.setdefault(node, []).append(operand)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            (results,) = args
            return tuple(results)
        target = module.get_submodule(node.target) if node.op == "call_module" else node.target
        values[node] = target(*args, **kwargs)
        del args, kwargs
        for operand in dying.get(node, ()):
            del values[operand]
        if _computes(node):
            yield
    raise AssertionError("a graph without an output")


def _module(stage: Stage, instruction: Instruction) -> GraphModule:
    compiled = stage.regions.modules if stage.regions is not None else {}
    return compiled.get(instruction.number, instruction.module)


def _computes(node: Node) -> bool:
    return node.op == "call_module" or (node.op == "call_function" and node.target is not operator.getitem)


def component_entries(floor: Floor, spent: Sequence[Spent]) -> list[dict[str, Any]]:
    """By component: its floor, and what was measured of it, None where nothing was."""
    entries: dict[str, dict[str, Any]] = {}
    for part in floor.components():
        name = ROUTED if part.component in (Component.ROUTER, Component.EXPERTS) else part.component.value
        entry = entries.setdefault(name, _empty(name))
        entry["bytes"] += part.bytes
        entry["operations"] += part.operations
        entry["operations_per_second"] = part.operations_per_second
        entry["floor_seconds"] += part.seconds
    for each in spent:
        entry = entries.setdefault(each.component, _empty(each.component))
        entry["seconds"] = (entry["seconds"] or 0.0) + each.seconds
        if each.kernels is not None:
            entry["kernels"] = (entry["kernels"] or 0) + each.kernels
        entry["operators"].append(dataclasses.asdict(each))
    for entry in entries.values():
        if entry["seconds"]:
            entry["share_of_floor"] = entry["floor_seconds"] / entry["seconds"]
    return list(entries.values())


def _empty(name: str) -> dict[str, Any]:
    return {
        "component": name,
        "bytes": 0.0,
        "operations": 0.0,
        "operations_per_second": BF16_PER_SECOND,
        "floor_seconds": 0.0,
        "seconds": None,
        "share_of_floor": None,
        "kernels": None,
        "operators": [],
    }
