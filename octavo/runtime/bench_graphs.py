"""``octavo bench graphs``: what replaying CUDA graphs and compiling with Inductor do for the body of a model.

At every row count eager calls are measured against replay, and operators as they are against compiled ones, in turn.
Without a GPU a replay calls the program's pieces on static buffers, and what only a GPU has is None.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from octavo.errors import UsageError
from octavo.graphs.buckets import check_buckets
from octavo.graphs.measured import capture_facts
from octavo.graphs.program import Program
from octavo.graphs.tables import counted, size, table
from octavo.passes.breaks import PieceKind
from octavo.runtime.assemble import Progress, assemble, plan
from octavo.runtime.bench import describe_environment
from octavo.runtime.bench_bodies import Bodies, Step, Variant
from octavo.runtime.bench_clock import seconds_of
from octavo.runtime.bench_trace import Recorded, idle_share, record
from octavo.runtime.config import EngineConfig

Call = Callable[[], object]
_UNTRACED: dict[str, Any] = {"launches": None, "segments_idle_share": None}
"""Until a row count has been traced."""


def row_counts(text: str, chunk: int) -> tuple[int, ...]:
    """Row counts such as ``1,16,128``. Raises :class:`UsageError` for what no step can have."""
    try:
        return check_buckets([int(part) for part in text.split(",")], chunk)
    except ValueError as error:
        reason = str(error) if isinstance(error, UsageError) else "expected row counts such as 1,16,128"
        raise UsageError(f"--rows {text}: {reason}") from error


def with_room(config: EngineConfig, rows: int) -> EngineConfig:
    """The configuration with state for one request of so many rows, unless it says how much state there is.

    Raises :class:`UsageError` for options that this measurement has no use for, or for too little room.
    """
    default = EngineConfig()
    unused = {"--graphs": config.graphs != default.graphs, "--buckets": config.buckets != default.buckets}
    unused |= {"--dump-dir": config.dump_dir is not None, "--ranks": config.ranks != default.ranks}
    for option, given in unused.items():
        if given:
            raise UsageError(
                f"{option} does not apply: bench graphs runs steps of one rank in every way, at the row counts of "
                "--rows, and writes no dump. Leave it out."
            )
    if config.kv_tokens is None and config.memory_fraction is None:
        config = dataclasses.replace(config, kv_tokens=max(rows, 2))
    longest = plan(config).capacity.max_model_len
    if longest < rows:
        raise UsageError(
            f"--rows {rows}: a request has room for {longest} tokens. Raise --kv-tokens, --memory-fraction or "
            "--max-model-len, or ask for fewer rows."
        )
    return config


@torch.no_grad()
def measure_graphs(
    config: EngineConfig, rows: tuple[int, ...], repeat: int, progress: Progress
) -> Iterator[dict[str, Any]]:
    """All figures, as ``--json`` writes them, again and again as they become complete; ``rows`` ascend.

    Seconds of segments are medians of ``repeat`` runs, those of steps of a fifth as many, two if there are so many: the
    experts of large models take their time.
    """
    began = time.perf_counter()
    phases: dict[str, float] = {}

    def ended(phase: str) -> None:
        phases[phase] = time.perf_counter() - began - sum(phases.values())

    config = with_room(config, rows[-1])
    assembly = assemble(config, progress)
    ended("weights")
    device = assembly.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        bodies = Bodies(assembly, rows, progress)
        ended("programs")
        captures = _capture(bodies, progress)
        ended("capture")
        report: dict[str, Any] = {
            "environment": describe_environment(device, assembly.describe(config)),
            "repeat": repeat,
            "phase_seconds": phases,
            "program": _program_entry(bodies),
            "rows": [],
            "capture": captures,
            "compile": _compile_entry(bodies),
        }
        for count in rows:
            report["rows"].append(_measure_rows(bodies, count, repeat, progress) | _UNTRACED)
            ended(f"{count} rows")
            yield report
        for place, entry in enumerate(report["rows"]):  # last, since a profiler may slow down what follows it
            progress("tracing", place, len(rows))
            entry.update(_trace_rows(bodies, entry["rows"]))
            ended(f"tracing {entry['rows']} rows")
            yield report


def _capture(bodies: Bodies, progress: Progress) -> dict[str, Any]:
    """By variant: what capturing whole steps took, beside the peak of an eager step of the most rows."""
    if bodies.assembly.device.type != "cuda":
        return dict.fromkeys(bodies.variants)
    peaks = {name: _eager_peak(bodies, variant) for name, variant in bodies.variants.items()}
    bodies.capture(progress)
    found = {}
    for name, variant in bodies.variants.items():
        captures = variant.step.captures
        pool_bytes = sum(capture.pool_bytes for capture in captures)
        found[name] = {
            "seconds": sum(capture.seconds for capture in captures),
            "pool_bytes": pool_bytes,
            "graph_bytes": sum(capture.graph_bytes for capture in captures),
            "eager_peak_bytes": peaks[name],
            "pool_share_of_eager_peak": pool_bytes / peaks[name],
            "buckets": [capture_facts(capture) for capture in captures],
        }
    return found


def _eager_peak(bodies: Bodies, variant: Variant) -> int:
    """Bytes that the second eager step of the most rows takes beside weights, state and buffers."""
    device = bodies.assembly.device
    step = bodies.prepare(bodies.buckets[-1])
    variant.step.run_eager(step.whole)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    variant.step.run_eager(step.whole)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _measure_rows(bodies: Bodies, rows: int, repeat: int, progress: Progress) -> dict[str, Any]:
    assembly = bodies.assembly
    step = bodies.prepare(rows)
    calls = {
        (what, name, way): call
        for name, variant in bodies.variants.items()
        for (what, way), call in _ways(variant, step, rows).items()
    }
    for call in calls.values():  # libraries load their kernels at the first
        call()
    times: dict[tuple[str, str, str], list[float]] = {key: [] for key in calls}
    for done in range(repeat):
        progress(f"{rows} rows", done, repeat)
        for key, call in calls.items():
            if key[0] == "segments" or done < max(2, repeat // 5):
                times[key].append(seconds_of(call, assembly.device))
    text = assembly.config.text_config
    pairs = rows * text.num_experts_per_tok * len(assembly.model.experts) / text.n_routed_experts
    entry: dict[str, Any] = {"rows": rows, "expected_pairs": pairs}
    for what in ("segments", "step"):
        entry[f"{what}_seconds"] = {
            name: {way: statistics.median(times[what, name, way]) for way in ("eager", "graphs")}
            for name in bodies.variants
        }
    return entry


def _ways(variant: Variant, step: Step, rows: int) -> dict[tuple[str, str], Call]:
    return {
        ("segments", "eager"): functools.partial(variant.segments.run_eager, step.segments),
        ("segments", "graphs"): functools.partial(_launch_all, variant.segments.launches(rows)),
        ("step", "eager"): functools.partial(variant.step.run_eager, step.whole),
        ("step", "graphs"): functools.partial(_replay, variant.step, step, rows),
    }


def _launch_all(launches: tuple[Call, ...]) -> None:
    for launch in launches:
        launch()


def _replay(program: Program, step: Step, rows: int) -> None:
    program.load(step.whole, rows)
    program.replay(rows)


def _trace_rows(bodies: Bodies, rows: int) -> dict[str, Any]:
    """Launches of a step's pieces, with the stand-in for the experts, and how long the GPU idled inside graphs."""
    traced = _trace(bodies, rows) if bodies.assembly.device.type == "cuda" else {}
    launches: dict[str, Any] = {what: _launches(traced, [what]) for what in ("inputs", "breaks")}
    launches["segments"], idle = {}, {}
    for name, variant in bodies.variants.items():
        graphs = [(name, number) for number in range(len(variant.segments.instructions))]
        launches["segments"][name] = {
            "eager": _launches(traced, [(name, "eager")]),
            "graphs": _launches(traced, graphs),
        }
        complete = all(key in traced for key in graphs)
        idle[name] = idle_share([traced[key] for key in graphs]) if complete else None
    return {"launches": launches, "segments_idle_share": idle}


def _trace(bodies: Bodies, rows: int) -> dict[Hashable, Recorded]:
    """What loads the inputs, all breaks, and by variant all segments eagerly and each one's graph."""
    step, plain = bodies.prepare(rows), bodies.variants["plain"].step
    pieces = zip(plain.instructions, plain.launches(rows), strict=True)
    breaks = tuple(launch for instruction, launch in pieces if instruction.kind is not PieceKind.SEGMENT)
    calls: dict[Hashable, Call] = {
        "inputs": functools.partial(plain.load, step.whole, rows),
        "breaks": functools.partial(_launch_all, breaks),
    }
    for name, variant in bodies.variants.items():
        calls[name, "eager"] = functools.partial(variant.segments.run_eager, step.segments)
        calls |= {(name, number): launch for number, launch in enumerate(variant.segments.launches(rows))}
    return record(calls, bodies.assembly.device)


def _launches(traced: Mapping[Hashable, Recorded], keys: Sequence[Hashable]) -> int | None:
    """Of some calls together, if all of them were recorded."""
    return sum(traced[key].launches for key in keys) if all(key in traced for key in keys) else None


def _program_entry(bodies: Bodies) -> dict[str, int]:
    """Instructions by kind, and copies that a step in graphs mode makes beside its work."""
    compilation = bodies.compilation
    kinds = Counter(instruction.kind.value for instruction in compilation.instructions)
    return {
        "segments": kinds["segment"],
        "breaks": kinds["break"],
        "inputs_loaded": sum(name in compilation.buffers for name in compilation.inputs),
        "results_copied": sum(len(instruction.results) for instruction in compilation.instructions),
        "buffer_bytes": bodies.variants["plain"].step.buffer_bytes,
    }


def _compile_entry(bodies: Bodies) -> dict[str, Any] | None:
    compiled = bodies.variants.get("inductor")
    if compiled is None or compiled.regions is None:
        return None
    regions = compiled.regions
    return {
        "seconds": regions.seconds,
        "cache_hits": sum(kind.cached for kind in regions.kinds),
        "casts_survive": regions.casts_survive,
        "kinds": [dataclasses.asdict(kind) for kind in regions.kinds],
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as text: a line for every row count, then what captures and compilation took."""
    program, found = report["program"], report["compile"]
    lines = [
        f"{counted(program['segments'], 'segment')}, {counted(program['breaks'], 'break')}; a step on static buffers "
        f"loads {counted(program['inputs_loaded'], 'input')} and copies {counted(program['results_copied'], 'result')}",
        f"milliseconds, medians of {report['repeat']} runs of segments, without breaks and without the experts' work",
        *table(_HEADINGS, [_row(entry) for entry in report["rows"]], right="|".join(_HEADINGS)),
    ]
    for name, capture in report["capture"].items():
        lines += _capture_lines(name, capture) if capture is not None else [f"{name}: capture -"]
    if found is not None:
        count = sum(kind["count"] for kind in found["kinds"])
        lines.append(
            f"inductor: {count} regions of {len(found['kinds'])} kinds compiled in {found['seconds']:.1f} s, "
            f"{found['cache_hits']} kinds from the cache"
        )
    return lines


_HEADINGS = (
    *("rows", "pairs", "segments: eager", "graphs", "inductor", "both", "speed-up", "idle"),
    *("launches: eager", "graphs", "step: eager", "graphs", "both"),
)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    segments, step = entry["segments_seconds"], entry["step_seconds"]
    nothing = {"eager": None, "graphs": None}
    plain, compiled = segments["plain"], segments.get("inductor", nothing)
    last = "inductor" if "inductor" in segments else "plain"
    inputs, breaks, launches = (entry["launches"][what] for what in ("inputs", "breaks", "segments"))
    eager, graphs = (launches["plain"][way] for way in ("eager", "graphs"))
    return (
        f"{entry['rows']:,}",
        f"{entry['expected_pairs']:,.1f}",
        *(_milliseconds(way[name]) for way in (plain, compiled) for name in ("eager", "graphs")),
        f"{plain['eager'] / compiled['graphs']:.2f}" if compiled["graphs"] else "-",
        _or_dash(entry["segments_idle_share"][last], ".1%"),
        _or_dash(_sum(eager, breaks), ","),
        _or_dash(_sum(inputs, graphs, breaks), ","),
        *(_milliseconds(step["plain"][name]) for name in ("eager", "graphs")),
        _milliseconds(step.get("inductor", nothing)["graphs"]),
    )


def _capture_lines(name: str, capture: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: captured in {capture['seconds']:.1f} s; graphs {size(capture['graph_bytes'])}, "
        f"pool {size(capture['pool_bytes'])}, {capture['pool_share_of_eager_peak']:.2f} of the "
        f"{size(capture['eager_peak_bytes'])} that an eager step of the most rows takes"
    ]
    for bucket in capture["buckets"]:
        lines.append(
            f"  {bucket['rows']:,} rows: {bucket['segments']} segments in {bucket['seconds']:.2f} s, "
            f"graphs {size(bucket['graph_bytes'])}, pool {size(bucket['pool_bytes'])}"
        )
    return lines


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _milliseconds(seconds: float | None) -> str:
    return _or_dash(None if seconds is None else seconds * 1e3, ",.2f")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
