"""``octavo graphs``: what the compiler makes of a model, for reading, without weights and without their memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.options import with_options
from octavo.runtime.terminal import say

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from octavo.graphs.explain import Prepared
    from octavo.passes.base import Compilation, Pass, PassContext
    from octavo.passes.runner import PassResult
    from octavo.runtime.assemble import Plan
    from octavo.runtime.parts import Part

graphs_app = typer.Typer(help="Show how a model is compiled, and what a batch would do.", no_args_is_help=True)


@graphs_app.command("dump")
@with_options
def dump(
    engine: EngineConfig,
    out: Annotated[Path, typer.Option(help="Directory to write; must be new, empty or an older dump.")],
) -> None:
    """Write graphs, passes, pieces, regions, buffers, buckets and the program to a directory.

    Start with its index.md or, in a browser, with its report.html.
    """
    from octavo.graphs.dump import PAGE, DumpWriter, claim, write_overview

    planned, ranks = _plan(engine), engine.ranks
    claim(out)
    traced = _trace(engine, planned)
    title = _title(engine, planned)
    reports = {}
    for name, part, placed, buckets in _programs(engine, traced, ranks):
        writer = DumpWriter(out / name)
        compiled = _compile(part, placed, buckets, traced.fake, before=writer.captured, after=writer.after)
        prepared, results, timeline = compiled.prepared, compiled.results, compiled.timeline
        reports[name] = writer.finish(
            prepared.compilation, prepared.context, prepared.buckets, results, title, timeline
        )
        count = len(prepared.compilation.instructions)
        say(f"{name}: {count} instructions, {sum(timeline.values()):.1f} s")
    write_overview(out, title, reports)
    say(f"to look at: {out / PAGE}")
    typer.echo(out / "index.md")


@graphs_app.command("explain")
@with_options
def explain_command(
    engine: EngineConfig,
    rows: Annotated[str, typer.Option(help="Rows (tokens) of a batch; several are explained apart: 300,5000.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests that the rows of each batch belong to.")] = 1,
) -> None:
    """Say what a batch would do and why: local rows, bucket, padding; the body's breaks and bytes between ranks."""
    from octavo.graphs.explain import Batch, explain, placement_of

    batches = [Batch(count, requests) for count in _row_counts(rows)]
    for batch in batches:
        batch.check(engine.max_requests)
    planned, ranks = _plan(engine), engine.ranks
    traced = _trace(engine, planned)
    programs: dict[bool, Prepared] = {}
    lines: list[str] = []
    for batch in batches:
        steps = batch.steps(engine.chunk)
        if len(steps) > 1:
            lines.append(f"{batch.rows:,} rows take {len(steps)} steps of at most {engine.chunk:,} rows (--chunk):")
        for step in dict.fromkeys(steps):
            sharded = placement_of(step, ranks).sharded
            if sharded not in programs:
                context = dataclasses.replace(traced.context, ranks=ranks, sharded=sharded)
                buckets = _buckets(engine)[sharded]
                programs[sharded] = _compile(traced.body, context, buckets, traced.fake).prepared
            explained = explain(
                step, programs[sharded], max_requests=engine.max_requests, head_buckets=_head_buckets(engine)
            )
            lines += [*explained, ""]
    typer.echo("\n".join(lines[:-1]))


@graphs_app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="Directory of a dump, or of one of its programs.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Compare two dumps in words. Exit code 0 if they are equal, 1 if not, 2 for a path that holds no dump."""
    from octavo.graphs.dump_diff import compare_dumps

    lines = compare_dumps(first, second)
    equal = "equal, but for what a start measures and the history of steps, which are not compared"
    typer.echo("\n".join(lines) if lines else equal)
    if lines:
        raise typer.Exit(1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    """The parts of a step on fake tensors: shapes alone, so the largest model fits."""

    prelude: Part
    body: Part
    epilogue: Part
    fake: FakeTensorMode
    context: PassContext
    """Of one rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    prepared: Prepared
    results: list[PassResult]
    timeline: dict[str, float]


def _row_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--rows {text}: expected row counts such as 300,5000") from error
    if min(counts) < 1:
        raise UsageError(f"--rows {text}: a batch has at least one row")
    return counts


def _plan(engine: EngineConfig) -> Plan:
    """Sizes as an engine would choose them, without asking how much memory is free unless told to."""
    from octavo.runtime.assemble import plan
    from octavo.runtime.capacity import DEFAULT_TOKENS_ON_CPU

    if engine.kv_tokens is None and engine.memory_fraction is None:
        engine = dataclasses.replace(engine, kv_tokens=DEFAULT_TOKENS_ON_CPU)
    return plan(engine)


def _title(engine: EngineConfig, planned: Plan) -> list[str]:
    import torch

    from octavo.runtime.model_source import model_name

    text = planned.config.text_config
    return [
        f"{model_name(engine)}: {text.num_hidden_layers} layers, {len(planned.experts)} of "
        f"{text.n_routed_experts} experts on a rank, {planned.numerics} numerics",
        planned.capacity.describe(),
        f"torch {torch.__version__}",
    ]


def _buckets(engine: EngineConfig) -> dict[bool, tuple[int, ...]]:
    """Local row counts of the programs of each placement."""
    from octavo.runtime.step_program import ladders

    return ladders(engine.buckets, engine.chunk, engine.max_requests, engine.ranks)


def _trace(engine: EngineConfig, planned: Plan) -> _Traced:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from octavo.kernels.choice import choose_backends
    from octavo.model.model import empty_model
    from octavo.model.prelude import Prelude, empty_tables
    from octavo.model.token_classes import pad_class, token_map
    from octavo.passes.base import PassContext
    from octavo.runtime.assemble import activation_dtype
    from octavo.runtime.model_source import tokenizer_of
    from octavo.runtime.parts import body_part, epilogue_part, prelude_part
    from octavo.runtime.pools import Pools

    text, capacity, device = planned.config.text_config, planned.capacity, planned.device
    dtype = activation_dtype(planned.numerics)
    pad = pad_class(token_map(tokenizer_of(engine, planned.config).backend, text), text)
    tables_device = device if planned.engram == "device" else torch.device("cpu")
    fake = FakeTensorMode()
    with fake:
        model = empty_model(planned.config, device, planned.experts)
        pools = Pools(text, capacity.sizes, capacity.storage, device)
        classes = torch.zeros(text.vocab_size, dtype=torch.int64, device=device)
        tables = empty_tables(text, tables_device, device)
        prelude = prelude_part(Prelude(model.embed, tables, classes, pad, dtype), pools)
        body = body_part(model.body, text, pools, dtype)
        epilogue = epilogue_part(model.head, text, dtype, device)
    context = PassContext(
        device=device.type,
        backends=choose_backends(planned.numerics, device.type, text),
        replicated_experts=engine.expert_placement == "replicated",
    )
    return _Traced(prelude, body, epilogue, fake, context)


def _programs(
    engine: EngineConfig, traced: _Traced, ranks: int
) -> Iterator[tuple[str, Part, PassContext, tuple[int, ...]]]:
    """(directory, part, context, buckets) of every program. The head runs on the first rank alone."""
    for part in (traced.prelude, traced.body):
        for sharded, buckets in _buckets(engine).items():
            name = part.name if ranks == 1 else f"{part.name}-{'sharded' if sharded else 'replicated'}"
            context = dataclasses.replace(traced.context, ranks=ranks, sharded=sharded)
            yield name, part, context, buckets
    yield traced.epilogue.name, traced.epilogue, traced.context, _head_buckets(engine)


def _head_buckets(engine: EngineConfig) -> tuple[int, ...]:
    from octavo.runtime.step_program import head_buckets

    return head_buckets(engine.max_requests)


def _compile(
    part: Part,
    context: PassContext,
    buckets: tuple[int, ...],
    fake: FakeTensorMode,
    before: Callable[[Compilation], None] | None = None,
    after: Callable[[Pass, Compilation], None] | None = None,
) -> _Compiled:
    """Export and rewrite one part."""
    from octavo.graphs.compile import compilation_of
    from octavo.graphs.explain import Prepared
    from octavo.passes.runner import run_passes
    from octavo.runtime.parts import classify

    began = time.perf_counter()
    with fake:
        compilation = compilation_of(part.module, part.inputs, classify)
    exported = time.perf_counter()
    if before is not None:
        before(compilation)
    results = run_passes(compilation, context, after=after)
    timeline = {"export": exported - began, "passes and notes": time.perf_counter() - exported}
    return _Compiled(Prepared(compilation, context, buckets), results, timeline)
