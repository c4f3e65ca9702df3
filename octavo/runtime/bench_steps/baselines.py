"""What a step is measured against: the same model, weights and state by plain PyTorch, and a third party's layers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from octavo.errors import UsageError
from octavo.passes.base import Compilation, backend_of, operator_of
from octavo.runtime.assemble import Assembly, Progress
from octavo.runtime.bench_steps.huggingface import HuggingFaceLayers
from octavo.runtime.bench_steps.steps import Stage, StepInputs, Steps, plain_backends
from octavo.runtime.floor import StepShape
from octavo.runtime.pools import Pools

BASELINES = ("eager", "compile", "huggingface")


class Baseline(Protocol):
    """Another way to compute steps."""

    name: str
    layers: int
    """That its steps have."""

    def has(self, shape: StepShape) -> bool:
        """Whether it can compute such a step."""
        ...

    def call(self, step: StepInputs) -> Callable[[], object]:
        """What computes the step, to be called again and again."""
        ...

    def describe(self) -> dict[str, Any]:
        """What is to be known of it, of the steps called so far."""
        ...


def baselines_named(text: str | None) -> tuple[str, ...]:
    """Names such as ``eager,compile``; none by default. Raises :class:`UsageError` for others."""
    chosen = tuple(text.split(",")) if text else ()
    for name in chosen:
        if name not in BASELINES:
            raise UsageError(f"--baselines {text}: expected some of {', '.join(BASELINES)}")
    if "huggingface" in chosen:
        HuggingFaceLayers.require()
    return chosen


def make_baselines(
    names: tuple[str, ...], assembly: Assembly, pools: Pools, shapes: tuple[StepShape, ...], progress: Progress
) -> list[Baseline]:
    """Raises :class:`OctavoError` for what this machine does not have."""
    made: list[Baseline] = []
    if "eager" in names or "compile" in names:
        plain = Steps(assembly, pools, shapes, plain_backends(assembly.backends), False, False, progress)
        layers = assembly.config.text_config.num_hidden_layers
        made += [kind(plain, layers) for name, kind in (("eager", Eager), ("compile", Compiled)) if name in names]
    if "huggingface" in names:
        made.append(HuggingFaceLayers(assembly))
    return made


class Eager:
    """Every operator's plain PyTorch function, called one operation after another."""

    name = "eager"

    def __init__(self, steps: Steps, layers: int) -> None:
        self._steps, self.layers = steps, layers

    def has(self, shape: StepShape) -> bool:
        return True

    def call(self, step: StepInputs) -> Callable[[], object]:
        return functools.partial(self._steps.eager, step)

    def describe(self) -> dict[str, Any]:
        return {"what": "plain PyTorch operations, called eagerly"}


class Compiled:
    """The same functions as one graph of PyTorch's operations for each stage, given to ``torch.compile``."""

    name = "compile"

    def __init__(self, steps: Steps, layers: int) -> None:
        self._steps, self.layers = steps, layers
        self._modules: dict[str, Callable[..., Any]] = {
            stage.part.name: torch.compile(plain_module(stage.compilation), dynamic=False) for stage in steps.stages
        }
        self._seconds = 0.0
        """That first calls took."""

    def has(self, shape: StepShape) -> bool:
        return True

    def call(self, step: StepInputs) -> Callable[[], object]:
        began = time.perf_counter()
        self._steps.run(step, self._run)
        self._seconds += time.perf_counter() - began
        return functools.partial(self._steps.run, step, self._run)

    def describe(self) -> dict[str, Any]:
        """Graphs, and reasons of breaks, as torch counts them over all shapes."""
        from torch._dynamo.utils import counters

        return {
            "what": "the same operations through torch.compile, for each shape anew",
            "first_call_seconds": self._seconds,
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "break_reasons": sorted({reason.partition("\n")[0] for reason in counters["graph_break"]}),
        }

    def _run(self, stage: Stage, values: dict[str, Tensor], rows: int) -> tuple[Tensor, ...]:
        inputs = stage.compilation.inputs
        operands = [
            values[node.name] if node.name in values else stage.resident[inputs[node.name].path]
            for node in _read(stage.compilation)
        ]
        return tuple(self._modules[stage.part.name](*operands))


def plain_module(compilation: Compilation) -> GraphModule:
    """The whole graph with every operator's call replaced by the function behind it, so that a compiler sees through.

    Its inputs are those that are read, in the graph's order.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in _read(compilation):
        copies[node] = graph.placeholder(node.name)
    for node in compilation.graph.nodes:
        if node.op == "placeholder":
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if operator_of(node) is not None:
            copy.target = backend_of(node).function
    return GraphModule(compilation.module, graph)


def _read(compilation: Compilation) -> list[Node]:
    return [node for node in compilation.graph.nodes if node.op == "placeholder" and node.users]
