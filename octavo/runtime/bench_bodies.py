"""The body of a model as programs to measure: whole steps, and the segments alone without the work of the experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from octavo.graphs.compile import input_names, leaves_of
from octavo.graphs.cuda import Recorder
from octavo.graphs.inductor import CompiledRegions, compile_regions
from octavo.graphs.program import Program
from octavo.kernels.experts import experts
from octavo.kernels.paging import pages_for
from octavo.model.inputs import Tokens
from octavo.passes.base import VALUE, Compilation, GraphInput, InputKind, PassContext, operator_of, tensor_arguments
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Source
from octavo.runtime.assemble import Assembly, Progress
from octavo.runtime.parts import body_part, classify
from octavo.runtime.pools import Pools
from octavo.runtime.step_program import compile_part


@dataclass(frozen=True, slots=True)
class Variant:
    """The body with its operators as they are, or compiled."""

    step: Program
    segments: Program
    """The segments alone, each :func:`without_experts`. What breaks give them is an input."""
    regions: CompiledRegions | None


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of the two programs for one step, by name."""

    whole: dict[str, Tensor]
    segments: dict[str, Tensor]


class Bodies:
    """The variants of one body on the same weights and pools, and steps for them: one request from its start."""

    def __init__(self, assembly: Assembly, buckets: tuple[int, ...], progress: Progress) -> None:
        """Regions are compiled if the assembly says so. A request has room for the largest bucket."""
        self.assembly, self.buckets = assembly, buckets
        text, capacity, device = assembly.config.text_config, assembly.capacity, assembly.device
        self._pools = Pools(text, capacity.sizes, capacity.storage, device)
        pages = pages_for(buckets[-1])
        self._pools.page_table[0, :pages] = torch.arange(pages, dtype=torch.int32, device=device)
        part = body_part(assembly.model.body, text, self._pools, assembly.dtype)
        context = PassContext(device=device.type, backends=assembly.backends)
        self.compilation = _breaks_apart(compile_part(part, buckets, context).compilation)
        self._resident: dict[str, Tensor] = dict(part.module.named_parameters()) | dict(part.module.named_buffers())
        self._resident |= {path: leaf for path, leaf in leaves_of(part.inputs) if classify(path).kind is InputKind.POOL}
        self.variants = {"plain": self._variant(None)}
        if assembly.inductor:
            regions = compile_regions(
                self.compilation.instructions,
                device=device.type,
                largest_rows=buckets[-1],
                progress=lambda done, total: progress("compiling regions", done, total),
            )
            self.variants["inductor"] = self._variant(regions)

    def capture(self, progress: Progress) -> None:
        """Turn the segments of all programs into CUDA graphs.

        A variant has a pool of its own, which its whole step fills first: its captures tell what an engine's would.
        """
        total = 2 * len(self.variants) * len(self.buckets)
        done = itertools.count(1)
        for variant in self.variants.values():
            recorder = Recorder(self.assembly.device)
            for program in (variant.step, variant.segments):
                program.capture(recorder, lambda: progress("capturing", next(done), total))

    def prepare(self, rows: int) -> Step:
        """Run a whole step of so many rows with ``plain``, and load what the segments alone read.

        Until the next call segments and breaks may run again, in any order.
        """
        device, vocabulary = self.assembly.device, self.assembly.config.text_config.vocab_size
        ids = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(rows)).to(device)
        positions = torch.arange(rows, dtype=torch.int32, device=device)
        zeros = torch.zeros_like(positions)
        live = torch.ones(rows, dtype=torch.bool, device=device)
        inputs = {
            "rows": self.assembly.prelude(Tokens(ids, zeros, positions, zeros, live, ~live), self._pools.history),
            "state": self._pools.state(zeros, positions, zeros),
        }
        names = input_names(self.compilation)
        whole = {names[path]: leaf for path, leaf in leaves_of(inputs) if names[path] in self.compilation.buffers}
        program = self.variants["plain"].step
        program.load(whole, rows)
        program.replay(rows)
        given = {name: program.view(name, rows).clone() for name in _results_of_breaks(self.compilation)}
        for variant in self.variants.values():
            variant.segments.load(whole | given, rows)
        return Step(whole, whole | given)

    def _variant(self, regions: CompiledRegions | None) -> Variant:
        modules = {each.number: each.module for each in self.compilation.instructions}
        modules |= regions.modules if regions is not None else {}
        alone = _segments_alone(self.compilation)
        light = {each.number: without_experts(modules[each.number]) for each in alone.instructions}
        return Variant(self._program(self.compilation, modules), self._program(alone, light), regions)

    def _program(self, compilation: Compilation, modules: Mapping[int, GraphModule]) -> Program:
        program = Program(compilation, self._resident, self.buckets, self.assembly.device, modules=modules)
        program.warm_up()
        return program


def without_experts(module: GraphModule) -> GraphModule:
    """A copy in which the routed experts cost one cast: their input in the dtype of their sum."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if operator_of(node) is experts:
            x = copies[dict(tensor_arguments(node))["x"]]
            copies[node] = graph.call_function(_stand_in, (x, node.meta[VALUE].dtype))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(module, graph)


def _stand_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def _breaks_apart(compilation: Compilation) -> Compilation:
    """What breaks read and write keeps its storage to itself, so that it outlasts the step."""
    breaks = [each for each in compilation.instructions if each.kind is not PieceKind.SEGMENT]
    read = [operand.name for each in breaks for operand in each.operands if operand.source is Source.STATIC]
    storages = itertools.count(1 + max(buffer.storage for buffer in compilation.buffers.values()))
    own = {
        name: dataclasses.replace(compilation.buffers[name], storage=next(storages))
        for name in dict.fromkeys([*read, *_results_of_breaks(compilation)])
    }
    return dataclasses.replace(compilation, buffers=compilation.buffers | own)


def _segments_alone(compilation: Compilation) -> Compilation:
    """The segments as a program whose inputs are the step's and the results of its breaks."""
    given = {
        name: GraphInput(InputKind.ROWS, name, 0 if compilation.buffers[name].dtype.is_floating_point else -1)
        for name in _results_of_breaks(compilation)
    }
    segments = [each for each in compilation.instructions if each.kind is PieceKind.SEGMENT]
    return dataclasses.replace(compilation, instructions=segments, inputs=compilation.inputs | given)


def _results_of_breaks(compilation: Compilation) -> list[str]:
    """Names of their buffers."""
    breaks = (each for each in compilation.instructions if each.kind is not PieceKind.SEGMENT)
    return [name for each in breaks for name in each.results]
