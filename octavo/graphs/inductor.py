"""Compiles regions with Inductor: one artifact for each kind, for every number of rows.

For numerics ``fast`` alone. An operator's results are rounded where they are stored, whatever happens inside; between
its operations Inductor may keep more precision than eager PyTorch does (:func:`probe_casts`), and its ``exp`` and sums
are its own. Artifacts lie in Inductor's cache on disk: a second start of the same program compiles nothing. (Another
program may compile anew, since torch's key names the module through which torch was imported first.)
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from octavo.errors import OctavoError
from octavo.graphs.regions import (
    Compilable,
    Region,
    Traced,
    check_guards,
    compilable_backend,
    find_regions,
    rows_of,
    trace,
    trace_region,
)
from octavo.passes.base import VALUE, GraphError
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction

REMEDY = "Start with --compile none: operators then run as they are."
OPTIONS: Mapping[str, Any] = {
    "emulate_precision_casts": True,
    # Quantisers divide by powers of two: an approximate quotient could fall on the other side of a tie.
    "eager_numerics.division_rounding": True,
    # Reductions are not timed to choose among orders of summation: ranks and starts agree to the bit.
    "deterministic": True,
    # Kernels are few and small. Workers would outlive the start, and begin with importing torch.
    "compile_threads": 1,
    # Launches are chosen at the first call, on its tensors, and not now, on more memory than may be free.
    "triton.autotune_at_compile_time": False,
}
"""What Inductor is told. ``standalone_compile`` would choose launches while it compiles."""


@dataclass(frozen=True, slots=True)
class CompiledKind:
    """What compiling one kind took."""

    name: str
    """Operator and backend, such as ``rms_norm.torch``."""
    text: str
    """What makes the kind: operands, arguments and results."""
    count: int
    """Regions of this kind in the program."""
    seconds: float
    cached: bool
    """Found in Inductor's cache."""


@dataclass(frozen=True, slots=True)
class CompiledRegions:
    """A program's segments with artifacts in the place of regions."""

    modules: Mapping[int, GraphModule]
    """By instruction number: as the instruction's own module, which stays as it was."""
    kinds: tuple[CompiledKind, ...]
    seconds: float
    casts_survive: bool
    """Of :func:`probe_casts`."""

    def describe(self) -> str:
        """One line for people."""
        count, cached = sum(kind.count for kind in self.kinds), sum(kind.cached for kind in self.kinds)
        casts = "kept" if self.casts_survive else "dropped"
        return (
            f"{count} regions of {len(self.kinds)} kinds compiled in {self.seconds:.1f} s, {cached} kinds from the "
            f"cache; BF16 round trips inside a region are {casts}"
        )


class CompiledRegion(nn.Module):
    """An artifact in the place of a node: called with its operands, it gives what the node gives.

    The first call loads kernels and must not happen while a CUDA graph is captured.
    """

    def __init__(self, region: Region, traced: Traced, artifact: Callable[..., Any], largest_rows: int) -> None:
        super().__init__()
        self.title = f"{region.name.replace('.', '_')}_{region.digest}"
        self._artifact = artifact
        self._single = isinstance(region.nodes[0].meta[VALUE], Tensor)
        self._largest_rows = largest_rows
        counted = [(place, *rows) for place, value in enumerate(traced.inputs) if (rows := rows_of(value)) is not None]
        self._rows = counted[0] if counted else None

    def forward(self, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Raises :class:`GraphError` for more rows than were promised: indices could overflow."""
        if self._rows is not None:
            place, axis, factor = self._rows
            rows = operands[place].shape[axis] // factor
            if rows > self._largest_rows:
                raise GraphError(f"{self.title} is compiled for at most {self._largest_rows} rows, and {rows} came")
        results = self._artifact(*[operand.contiguous() for operand in operands])
        return results[0] if self._single else tuple(results)


def compile_regions(
    instructions: Iterable[Instruction],
    *,
    device: str,
    largest_rows: int,
    compilable: Compilable = compilable_backend,
    progress: Callable[[int, int], None] | None = None,
) -> CompiledRegions:
    """Compile every kind of region in the segments; ``progress(done, total)`` after each.

    Artifacts serve 1 to ``largest_rows`` rows, the largest bucket. Raises :class:`OctavoError` if nothing can be
    compiled for ``device`` here, or naming the operator and layer of a kind that cannot.
    """
    began = time.perf_counter()
    instructions = list(instructions)
    casts_survive = probe_casts(device)
    regions = find_regions(instructions, compilable)
    kinds = []
    artifacts: dict[Node, CompiledRegion] = {}
    for done, region in enumerate(regions, start=1):
        kind, artifact = _compile_kind(region, largest_rows)
        kinds.append(kind)
        artifacts.update(dict.fromkeys(region.nodes, artifact))
        if progress is not None:
            progress(done, len(regions))
    replaced: dict[GraphModule, GraphModule] = {}
    modules = {}
    for instruction in instructions:
        if instruction.kind is PieceKind.SEGMENT:
            if instruction.module not in replaced:
                replaced[instruction.module] = _replaced(instruction.module, artifacts)
            modules[instruction.number] = replaced[instruction.module]
    return CompiledRegions(modules, tuple(kinds), time.perf_counter() - began, casts_survive)


def probe_casts(device: str) -> bool:
    """Whether a compiled function rounds where it says so: F32 to BF16 and back between two products.

    torch 2.13 does, 2.11 drops the pair. To be shown, not to decide by. Raises :class:`OctavoError` if nothing can be
    compiled for ``device`` here.
    """
    _require_compilers(device)
    return _casts_survive(device)


@functools.cache  # a matter of torch and the device, and a second of compiling for each program
def _casts_survive(device: str) -> bool:
    def round_trip(x: Tensor) -> tuple[Tensor]:
        return ((x.float() * (1 + 2**-9)).bfloat16().float() * 3,)

    example = torch.ones(64, dtype=torch.bfloat16, device=device)
    try:
        (result,) = _artifact(trace(round_trip, [example], 1), 1)(example)
    except Exception as error:
        raise OctavoError(f"Inductor cannot compile for {device} here: {_first_line(error)}. {REMEDY}") from error
    return bool((result == 3).all())


def _require_compilers(device: str) -> None:
    """The compilers that Inductor calls, looked for as it does."""
    from torch._inductor import config

    if torch.device(device).type == "cpu":
        candidates = [name for name in config.cpp.cxx if name is not None]
        if not any(map(shutil.which, candidates)):
            raise OctavoError(
                f"compiling for the CPU needs a C++ compiler, and there is none of {', '.join(candidates)}. "
                f"Install one (apt-get install g++). Or: {REMEDY}"
            )
    elif find_spec("triton") is None:
        raise OctavoError(f"compiling for {device} needs triton, which is not installed. Install it. Or: {REMEDY}")


def _compile_kind(region: Region, largest_rows: int) -> tuple[CompiledKind, CompiledRegion]:
    began = time.perf_counter()
    from torch._dynamo.utils import counters  # a second of importing, for those who compile alone

    hits = counters["inductor"]["fxgraph_cache_hit"]
    try:
        traced = trace_region(region, largest_rows)
        artifact = _artifact(traced, largest_rows)
    except GraphError:
        raise
    except Exception as error:
        layer = "" if region.layer is None else f" (layer {region.layer})"
        raise OctavoError(
            f"{region.name}{layer} cannot be compiled: {type(error).__name__}: {_first_line(error)}. {REMEDY}"
        ) from error
    cached = counters["inductor"]["fxgraph_cache_hit"] > hits
    kind = CompiledKind(region.name, region.text, len(region.nodes), time.perf_counter() - began, cached)
    return kind, CompiledRegion(region, traced, artifact, largest_rows)


def _artifact(traced: Traced, largest_rows: int) -> Callable[..., Any]:
    """A callable that computes the traced function: ``artifact(*inputs) -> results``."""
    from torch._inductor import standalone_compile

    for node in traced.outputs:
        # Where "from_graph" looks for the mode of the symbols; without it, it makes one that knows none of them.
        node.meta["example_value"] = node.meta[VALUE]
    with torch.no_grad():
        artifact = standalone_compile(
            traced.module, list(traced.inputs), dynamic_shapes="from_graph", options={"config_patches": dict(OPTIONS)}
        )
    check_guards(traced, largest_rows)
    return artifact


def _replaced(module: GraphModule, artifacts: Mapping[Node, CompiledRegion]) -> GraphModule:
    """A copy of the module with its regions replaced."""
    root, graph = nn.Module(), Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        artifact = artifacts.get(node)
        if artifact is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            root.add_module(artifact.title, artifact)
            operands = tuple(copies[operand] for operand in node.all_input_nodes)
            copies[node] = graph.call_module(artifact.title, operands)
            copies[node].meta = dict(node.meta)
    return GraphModule(root, graph)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
