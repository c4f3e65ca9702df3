"""The mini body compiled for a number of ranks, as ``octavo graphs`` does it: fake tensors, all passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.graphs.buckets import ladder
from octavo.graphs.compile import compilation_of
from octavo.graphs.dump import DumpWriter
from octavo.graphs.explain import Prepared
from octavo.graphs.facts import Facts
from octavo.graphs.inductor import CompiledKind, CompiledRegions
from octavo.graphs.measured import measured_of
from octavo.graphs.program import BucketCapture
from octavo.graphs.regions import find_regions
from octavo.kernels.choice import Numerics, choose_backends
from octavo.model.model import empty_model
from octavo.model.presets import cut_layers, preset
from octavo.passes.base import Compilation, Pass, PassContext
from octavo.passes.breaks import PieceKind
from octavo.passes.runner import PassResult, run_passes
from octavo.runtime.parts import body_inputs, classify
from octavo.runtime.pools import Pools, PoolSizes, Storage

TOP = 64


def export(layers: int = 10, bf16_weights: bool = False) -> Compilation:
    """Before any pass; no memory is taken by weights."""
    config, device = cut_layers(preset("mini"), layers), torch.device("cpu")
    text = config.text_config
    with FakeTensorMode():
        model = empty_model(config, device, bf16_weights=bf16_weights)
        sizes = PoolSizes(slots=3, pages=5, max_pages=4)
        inputs = body_inputs(text, Pools(text, sizes, Storage.BF16, device), torch.bfloat16)
        return compilation_of(model.body, inputs, classify)


def compiled(
    ranks: int,
    sharded: bool,
    after: Callable[[Pass, Compilation], None] | None = None,
    source: Compilation | None = None,
    numerics: Numerics = "reference",
) -> tuple[Prepared, list[PassResult]]:
    compilation = export() if source is None else source
    context = PassContext(ranks=ranks, sharded=sharded, backends=choose_backends(numerics, "cpu"))
    results = run_passes(compilation, context, after=after)
    return Prepared(compilation, context, ladder(TOP)), results


@functools.cache
def prepared(ranks: int, sharded: bool = True) -> Prepared:
    """Shared by tests that only read it."""
    return compiled(ranks, sharded)[0]


def write_dump(
    directory: Path,
    ranks: int,
    layers: int = 10,
    numerics: Numerics = "reference",
    measure: Callable[[Prepared], Facts] | None = None,
) -> tuple[Facts, Prepared]:
    """``measure`` makes up what a start of the program would have measured."""
    writer = DumpWriter(directory)
    source = export(layers)
    writer.captured(source)
    program, results = compiled(ranks, True, writer.after, source, numerics)
    measured = measure(program) if measure is not None else None
    report = writer.finish(
        program.compilation, program.context, program.buckets, results, ["mini"], {"export": 1.0}, measured
    )
    return report, program


def fabricated(program: Prepared, *, seconds: float = 1.5, cached: bool = False, casts_survive: bool = True) -> Facts:
    """What a start with CUDA graphs and compiled regions could have measured, of the regions that are there."""
    kinds = tuple(
        CompiledKind(region.name, region.text, len(region.nodes), seconds, cached)
        for region in find_regions(program.compilation.instructions)
    )
    segments = sum(each.kind is PieceKind.SEGMENT for each in program.compilation.instructions)
    captures = [
        BucketCapture(rows, segments, seconds / 10, 5_000_000 if rows == TOP else 0, 70_000 * rows)
        for rows in reversed(program.buckets)
    ]
    return measured_of(captures, CompiledRegions({}, kinds, seconds * len(kinds), casts_survive))
