"""``octavo graphs``: what the compiler makes of a model, for reading, without weights and without their memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.options import with_options
from octavo.runtime.terminal import say

if TYPE_CHECKING:
    from octavo.graphs.explain import Prepared
    from octavo.passes.base import Compilation, Pass
    from octavo.passes.runner import PassResult
    from octavo.runtime.assemble import Plan

graphs_app = typer.Typer(help="Show how a model is compiled, and what a batch would do.", no_args_is_help=True)

Ranks = Annotated[int, typer.Option(min=1, help="Ranks that rows and experts are dealt over.")]


@graphs_app.command("dump")
@with_options
def dump(
    engine: EngineConfig,
    out: Annotated[Path, typer.Option(help="Directory to write; must be new, empty or an older dump.")],
    ranks: Ranks = 1,
) -> None:
    """Write graphs, passes, pieces, buffers, buckets and the program to a directory; start with its index.md."""
    from octavo.graphs.dump import DumpWriter, claim, write_overview

    planned = _plan(engine)
    # Both programs of several ranks have a directory of their own. All are claimed before anything is compiled.
    writers = {(True, ""): DumpWriter(out)} if ranks == 1 else {}
    if ranks > 1:
        claim(out)
        writers = {(sharded, name): DumpWriter(out / name) for sharded, name in _NAMES.items()}
    reports = {}
    title = _title(engine, planned, ranks)
    for (sharded, name), writer in writers.items():
        compiled = _compile(planned, engine, ranks, sharded, before=writer.captured, after=writer.after)
        prepared, results, timeline = compiled.prepared, compiled.results, compiled.timeline
        reports[name] = writer.finish(
            prepared.compilation, prepared.context, prepared.buckets, results, title, timeline
        )
        count = len(prepared.compilation.instructions)
        say(f"{name or 'program'}: {count} instructions, {sum(timeline.values()):.1f} s")
    if ranks > 1:
        write_overview(out, title, reports)
    typer.echo(out / "index.md")


@graphs_app.command("explain")
@with_options
def explain_command(
    engine: EngineConfig,
    rows: Annotated[str, typer.Option(help="Rows (tokens) of a batch; several are explained apart: 300,5000.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests that the rows of each batch belong to.")] = 1,
    ranks: Ranks = 1,
) -> None:
    """Say what a batch would do and why: local rows, bucket, padding, instructions, breaks, bytes between ranks."""
    from octavo.graphs.explain import Batch, explain, placement_of

    batches = [Batch(count, requests) for count in _row_counts(rows)]
    for batch in batches:
        batch.check(engine.max_requests)
    planned = _plan(engine)
    programs: dict[bool, Prepared] = {}
    lines: list[str] = []
    for batch in batches:
        steps = batch.steps(engine.chunk)
        if len(steps) > 1:
            lines.append(f"{batch.rows:,} rows take {len(steps)} steps of at most {engine.chunk:,} rows (--chunk):")
        for step in dict.fromkeys(steps):
            sharded = placement_of(step, ranks).sharded
            if sharded not in programs:
                programs[sharded] = _compile(planned, engine, ranks, sharded).prepared
            lines += [*explain(step, programs[sharded], max_requests=engine.max_requests), ""]
    typer.echo("\n".join(lines[:-1]))


_NAMES = {True: "sharded", False: "replicated"}


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


def _title(engine: EngineConfig, planned: Plan, ranks: int) -> list[str]:
    import torch

    text = planned.config.text_config
    experts = _experts(planned, ranks)
    return [
        f"{engine.model or f'preset {engine.preset}'}: {text.num_hidden_layers} layers, {len(experts)} of "
        f"{text.n_routed_experts} experts on a rank, {engine.numerics} numerics",
        planned.capacity.describe(),
        f"torch {torch.__version__}",
    ]


def _experts(planned: Plan, ranks: int) -> range:
    """The first rank's share."""
    return planned.experts[: -(-len(planned.experts) // ranks)]


def _buckets(engine: EngineConfig, ranks: int, sharded: bool) -> tuple[int, ...]:
    """Local row counts of a program: the sharded one reaches a rank's share of a chunk (design section 5)."""
    from octavo.runtime.body_program import choose_buckets

    if ranks == 1:
        return choose_buckets(engine.buckets, engine.chunk)
    top = -(-engine.chunk // ranks) if sharded else max(engine.max_requests, ranks - 1)
    if engine.buckets in ("default", "dense"):
        return choose_buckets(engine.buckets, top)
    given = choose_buckets(engine.buckets, engine.chunk)
    return tuple(size for size in given if size <= top) or (top,)


def _compile(
    planned: Plan,
    engine: EngineConfig,
    ranks: int,
    sharded: bool,
    before: Callable[[Compilation], None] | None = None,
    after: Callable[[Pass, Compilation], None] | None = None,
) -> _Compiled:
    """Export and rewrite the body under fake tensors: shapes alone, so the largest model fits."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from octavo.graphs.compile import compilation_of
    from octavo.graphs.explain import Prepared
    from octavo.model.model import empty_model
    from octavo.passes.base import PassContext
    from octavo.passes.runner import run_passes
    from octavo.runtime.body_inputs import classify, example_inputs

    began = time.perf_counter()
    text, capacity = planned.config.text_config, planned.capacity
    dtype = torch.float32 if engine.numerics == "plain" else torch.bfloat16
    buckets = _buckets(engine, ranks, sharded)
    with FakeTensorMode():
        model = empty_model(planned.config, planned.device, _experts(planned, ranks))
        inputs = example_inputs(text, capacity.sizes, capacity.storage, dtype, planned.device)
        compilation = compilation_of(model.body, inputs, classify)
    exported = time.perf_counter()
    if before is not None:
        before(compilation)
    context = PassContext(ranks=ranks, sharded=sharded, device=planned.device.type)
    results = run_passes(compilation, context, after=after)
    timeline = {"export": exported - began, "passes and notes": time.perf_counter() - exported}
    return _Compiled(Prepared(compilation, context, buckets), results, timeline)
