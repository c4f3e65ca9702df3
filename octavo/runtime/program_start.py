"""The start of an engine's programs: compile, make sure that they fit, make buffers, capture, write the dump."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from octavo.graphs.buckets import worst_padding
from octavo.graphs.cuda import Recorder
from octavo.graphs.dump import DumpWriter, write_overview
from octavo.graphs.facts import facts_of
from octavo.graphs.footprint import buffer_bytes, peak_bytes
from octavo.graphs.inductor import compile_regions
from octavo.graphs.measured import measured_of
from octavo.kernels.collectives import Communicator
from octavo.model.memory import check_memory
from octavo.passes.base import PassContext
from octavo.runtime.assemble import Assembly
from octavo.runtime.config import GraphMode
from octavo.runtime.parts import Part
from octavo.runtime.pools import Pools
from octavo.runtime.step_program import Compiled, Exported, StepProgram, compile_part, export_part

RESERVE = 1.15
"""Times the peak of an eager step that is kept free: allocators keep more than what is asked of them."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A program to be made."""

    part: Part
    buckets: tuple[int, ...]
    context: PassContext


@dataclass(frozen=True, slots=True)
class Started:
    """Programs that are ready, in the order of the plan."""

    programs: list[StepProgram]
    description: str
    timeline: list[tuple[str, float]]
    """Phases and their seconds, over all programs."""
    plan_hash: str
    """Of all programs, equal on ranks that fit together; empty for one rank."""


def start_programs(
    plan: Sequence[Planned],
    mode: GraphMode,
    assembly: Assembly,
    pools: Pools,
    communicator: Communicator | None,
    dump_dir: Path | None,
    progress: Callable[[int, int], None] | None,
) -> Started:
    """Make all programs. Raises :class:`OctavoError` if they do not fit, before their buffers are made.

    ``progress(done, total)`` counts programs exported, compiled, and captured bucket by bucket.
    """
    captured = assembly.device.type == "cuda" and mode not in ("off", "eager")
    total = len(plan) * (1 + assembly.inductor) + sum(len(each.buckets) for each in plan) * captured
    done = itertools.count()

    def advance() -> None:
        if progress is not None:
            progress(next(done), total)

    advance()
    times = [time.perf_counter()]
    compiled = []
    exports: dict[nn.Module, Exported] = {}
    for each in plan:
        writer = DumpWriter(dump_dir / each.part.name) if dump_dir is not None else None
        known = exports.get(each.part.module)
        exported = exports.setdefault(each.part.module, known or export_part(each.part))
        # The seconds of a part that has two placements are those of the first.
        counted = exported if known is None else dataclasses.replace(exported, seconds=0.0)
        compiled.append(compile_part(each.part, each.buckets, each.context, writer, counted))
        advance()
    times.append(time.perf_counter())
    if assembly.inductor:
        for place, ready in enumerate(compiled):
            compiled[place] = _with_regions(ready, assembly)
            advance()
    times.append(time.perf_counter())
    if mode != "off":
        _reserve(compiled, assembly.device, pools)
    programs = [StepProgram(each.part, each.buckets, mode, each, communicator) for each in compiled]
    times.append(time.perf_counter())
    if captured:
        recorder = Recorder(assembly.device, debug=mode in ("compare", "poison"))
        for program in programs:
            program.capture(recorder, advance)
    times.append(time.perf_counter())
    title = _title(mode, programs)
    if dump_dir is not None:
        compiler = "inductor" if assembly.inductor else "none"
        _dump(dump_dir, [title, f"compile {compiler}, torch {torch.__version__}"], compiled, programs)
    times.append(time.perf_counter())
    told = [title]
    if communicator is not None:
        capturable = communicator.capturable
        where = "in captured segments" if capturable.value else "between segments"
        told.append(f"collectives {where}: {capturable.reason}")
    told += [f"{each.part.name}: {each.regions.describe()}" for each in compiled if each.regions is not None]
    return Started(
        programs,
        "\n".join(told),
        _timeline(compiled, times, assembly.inductor, captured, dump_dir is not None),
        _plan_hash(compiled) if communicator is not None else "",
    )


def _with_regions(ready: Compiled, assembly: Assembly) -> Compiled:
    """Steps beyond the largest bucket, which run as plain calls, have the same kernels."""
    ranks = ready.context.ranks
    prepared = ready.buckets[-1] * ranks
    chunk = -(-assembly.chunk // ranks) * ranks
    regions = compile_regions(
        ready.compilation.instructions,
        device=assembly.device.type,
        largest_rows=prepared if ready.part.name == "epilogue" else max(prepared, chunk),
    )
    return dataclasses.replace(ready, regions=regions)


def _reserve(compiled: Sequence[Compiled], device: torch.device, pools: Pools) -> None:
    """Refuse, before buffers are made, what the largest bucket would need more than there is.

    An eager step of that many rows stays possible beside the buffers: debug modes take it.
    """
    needed = 0 if device.type == "cuda" else pools.bytes  # fresh host pages are counted as free until used
    needed += sum(buffer_bytes(each.compilation, each.buckets[-1]) for each in compiled)
    peak = max(peak_bytes(each.compilation, each.buckets[-1]) for each in compiled)
    check_memory(needed + int(RESERVE * peak), device)


def _title(mode: GraphMode, programs: Sequence[StepProgram]) -> str:
    buckets = programs[0].buckets
    return (
        f"graphs {mode}: {'; '.join(program.describe() for program in programs)}; {len(buckets)} buckets to "
        f"{buckets[-1]:,} rows, at most {worst_padding(buckets):.0%} padding; "
        f"{sum(program.buffer_bytes for program in programs) / 1e6:.0f} MB of buffers"
    )


def _plan_hash(compiled: Sequence[Compiled]) -> str:
    return ",".join(facts_of(each.compilation, each.context, each.buckets)["plan_hash"] for each in compiled)


def _timeline(
    compiled: Sequence[Compiled], times: Sequence[float], inductor: bool, captured: bool, dumped: bool
) -> list[tuple[str, float]]:
    """``times`` are the ends of phases; phases that did not take place have no entry."""
    exports, passes = sum(each.export_seconds for each in compiled), sum(each.pass_seconds for each in compiled)
    tracing, compiling, making, capturing, dumping = (end - begin for begin, end in itertools.pairwise(times))
    timeline = [("export", exports), ("passes and proof", passes)]
    if inductor:
        timeline.append(("compilation", compiling))
    timeline.append(("buffers", making))
    if captured:
        timeline.append(("capture", capturing))
    if dumped:  # notes on every pass are taken while tracing
        timeline.append(("dump", tracing - exports - passes + dumping))
    return timeline


def _dump(directory: Path, title: Sequence[str], compiled: Sequence[Compiled], programs: Sequence[StepProgram]) -> None:
    reports = {}
    for each, program in zip(compiled, programs, strict=True):
        assert each.dump is not None
        timeline = {"export": each.export_seconds, "passes and proof": each.pass_seconds}
        if each.regions is not None:
            timeline["compilation"] = each.regions.seconds
        if program.captures:
            timeline["capture"] = sum(capture.seconds for capture in program.captures)
        reports[each.part.name] = each.dump.finish(
            each.compilation,
            each.context,
            each.buckets,
            each.passes,
            title,
            timeline,
            measured_of(program.captures, each.regions),
        )
    write_overview(directory, title, reports)
