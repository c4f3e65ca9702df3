"""``octavo bench prefill`` and ``decode``: what steps take beside their floor, as an engine runs them and otherwise.

The floor is that of an H200, wherever the steps run. Without a GPU a replay calls the program's pieces on static
buffers, and what only a GPU has is None.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UsageError
from octavo.graphs.measured import capture_facts
from octavo.passes.breaks import PieceKind
from octavo.runtime.assemble import Assembly, Progress, assemble, choose_compiler, plan
from octavo.runtime.bench import describe_environment
from octavo.runtime.bench_clock import seconds_of
from octavo.runtime.bench_steps.baselines import Baseline, baselines_named, make_baselines
from octavo.runtime.bench_steps.components import component_entries, time_operators
from octavo.runtime.bench_steps.routing import routed
from octavo.runtime.bench_steps.shapes import Kind, with_room
from octavo.runtime.bench_steps.steps import Stage, StepInputs, Steps, filled_pools, step_inputs
from octavo.runtime.bench_trace import idle_share, record
from octavo.runtime.config import EngineConfig
from octavo.runtime.floor import Floor, Routing, StepShape, step_floor

Call = Callable[[], object]
Key = tuple[str, str]
"""``ways`` or ``baselines``, and a name."""
_VARIANT = {False: "plain", True: "inductor"}
_TOGETHER = 4
"""Steps that are timed one behind another."""
_UNTRACED: dict[str, Any] = dict.fromkeys(("launches", "kernels", "busy_seconds", "segments_idle_share"))
"""Until a step has been traced, and on the CPU."""
WAYS = ("eager", "graphs", "inductor", "both")
"""Operators as they are or compiled with Inductor, called one after another or replayed."""


def ways_named(text: str | None, inductor: bool) -> tuple[str, ...]:
    """``all`` or names such as ``eager,both``; by default the way of an engine. Raises :class:`UsageError` for others,
    and for those with Inductor where nothing is compiled."""
    possible = WAYS if inductor else WAYS[:2]
    if text is None:
        return possible[-1:]
    if text == "all":
        return possible
    chosen = tuple(text.split(","))
    for name in chosen:
        if name not in WAYS:
            raise UsageError(f"--ways {text}: expected all, or some of {', '.join(WAYS)}")
        if name not in possible:
            raise UsageError(
                f"--ways {text}: {name} compiles regions, and nothing is compiled here. Ask for "
                f"{' or '.join(possible)}, or start with --numerics fast --compile inductor."
            )
    return tuple(name for name in WAYS if name in chosen)


@torch.no_grad()
def measure_steps(
    config: EngineConfig,
    kind: Kind,
    shapes: tuple[StepShape, ...],
    ways: str | None,
    baselines: str | None,
    repeat: int,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """All figures, as ``--json`` writes them, again and again as they become complete.

    Seconds are medians of ``repeat`` turns, those of baselines of a fifth as many, two at least. On a GPU a turn is
    some steps one behind another, since an engine launches a step before it reads what the last one drew.
    """
    began = time.perf_counter()
    phases: dict[str, float] = {}

    def ended(phase: str) -> None:
        phases[phase] = time.perf_counter() - began - sum(phases.values())

    config = with_room(config, kind, shapes)
    planned = plan(config)
    names = ways_named(ways, choose_compiler(config.compile, planned.numerics, planned.device))
    compared = baselines_named(baselines)
    assembly = assemble(config, progress)
    device, layers = assembly.device, assembly.config.text_config.num_hidden_layers
    ended("weights")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        pools = filled_pools(assembly)
        variants = {
            compiled: Steps(assembly, pools, shapes, assembly.backends, compiled, True, progress)
            for compiled in sorted({way in WAYS[2:] for way in names})
        }
        ended("programs")
        captures = _capture(variants, device, progress)
        ended("capture")
        others = make_baselines(compared, assembly, pools, shapes, progress)
        report: dict[str, Any] = {
            "kind": kind,
            "environment": describe_environment(device, assembly.describe(config)),
            "repeat": repeat,
            "layers": layers,
            "resident_experts": len(assembly.model.experts),
            "phase_seconds": phases,
            "program": _program_entry(next(iter(variants.values()))),
            "capture": captures,
            "baselines": {},
            "steps": [],
        }
        ended("baselines")
        floors: list[Floor] = []
        for shape in shapes:
            step = step_inputs(assembly, pools, shape)
            floor = _floor(assembly, shape, routed(next(iter(variants.values())), step))
            floors.append(floor)
            measured, failed = _measure(variants, names, others, step, repeat, progress)
            report["steps"].append(_entry(floor, measured, failed, {o.name: o.layers for o in others}, layers))
            report["baselines"] = {other.name: other.describe() for other in others}
            ended(_title(shape))
            yield report
        traced = variants[max(variants)]
        for place, (shape, floor) in enumerate(zip(shapes, floors, strict=True)):  # last: a profiler may slow down
            progress("tracing", place, len(shapes))
            step = step_inputs(assembly, pools, shape)
            report["steps"][place] |= trace_step(traced, step) if device.type == "cuda" else _UNTRACED
            report["steps"][place]["components"] = component_entries(floor, time_operators(traced, step))
            ended(f"tracing {_title(shape)}")
            yield report


def _title(shape: StepShape) -> str:
    return f"{shape.rows} rows, context {shape.context}"


def _floor(assembly: Assembly, shape: StepShape, chosen: tuple[Routing, ...]) -> Floor:
    text, resident = assembly.config.text_config, len(assembly.model.experts)
    return step_floor(text, shape, resident, assembly.capacity.storage, routed=chosen)


def _capture(variants: Mapping[bool, Steps], device: torch.device, progress: Progress) -> dict[str, Any]:
    """By variant, what capturing all steps took; None without a GPU."""
    if device.type != "cuda":
        return dict.fromkeys(map(_VARIANT.__getitem__, variants))
    total = sum(len(stage.program.buckets) for steps in variants.values() for stage in steps.stages)
    done = itertools.count(1)
    found = {}
    for compiled, steps in variants.items():
        steps.capture(lambda: progress("capturing", next(done), total))
        found[_VARIANT[compiled]] = {
            "seconds": sum(capture.seconds for capture in steps.captures),
            "pool_bytes": sum(capture.pool_bytes for capture in steps.captures),
            "graph_bytes": sum(capture.graph_bytes for capture in steps.captures),
            "buckets": [capture_facts(capture) for capture in steps.body.program.captures],
        }
    return found


def _program_entry(steps: Steps) -> dict[str, int]:
    """Of all three stages: instructions by kind, and bytes of static buffers."""
    kinds = Counter(each.kind for stage in steps.stages for each in stage.compilation.instructions)
    return {
        "segments": kinds[PieceKind.SEGMENT],
        "breaks": kinds[PieceKind.BREAK],
        "buffer_bytes": sum(stage.program.buffer_bytes for stage in steps.stages),
    }


def _measure(
    variants: Mapping[bool, Steps],
    ways: Sequence[str],
    others: Sequence[Baseline],
    step: StepInputs,
    repeat: int,
    progress: Progress,
) -> tuple[dict[Key, float], dict[str, str]]:
    """Median seconds of ways and baselines, and why a baseline has none; those without such a step are missing."""
    calls: dict[Key, Call] = {}
    for way in ways:
        steps = variants[way in WAYS[2:]]
        call = functools.partial(steps.replay if way in ("graphs", "both") else steps.eager, step)
        call()  # libraries load their kernels at the first
        calls["ways", way] = call
    failed: dict[str, str] = {}
    for other in others:
        if other.has(step.shape):
            progress(f"{_title(step.shape)}, {other.name}", 0, 1)
            try:
                compared = other.call(step)
                compared()
                calls["baselines", other.name] = compared
            except torch.OutOfMemoryError as error:
                failed[other.name] = str(error).partition(". ")[0]
    device = step.last.device
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for done in range(repeat):
        progress(_title(step.shape), done, repeat)
        for key, measured in calls.items():
            if key[0] == "ways" or done < max(2, repeat // 5):
                times[key].append(seconds_of(measured, device, _TOGETHER))
    return {key: statistics.median(found) for key, found in times.items()}, failed


def _entry(
    floor: Floor, measured: Mapping[Key, float], failed: Mapping[str, str], layers: Mapping[str, int], own_layers: int
) -> dict[str, Any]:
    """Of one step. ``layers`` are those of each baseline: one with others is compared layer by layer."""
    shape = floor.shape
    ours = min(seconds for (group, _), seconds in measured.items() if group == "ways")
    entry: dict[str, Any] = {
        **dataclasses.asdict(shape),
        "pairs": floor.routing.pairs,
        "experts": floor.routing.experts,
        "floor_seconds": floor.seconds,
        "ways": {},
        "baselines": {name: {"error": reason} for name, reason in failed.items()},
        **_UNTRACED,
        "components": component_entries(floor, []),
    }
    for (group, name), seconds in measured.items():
        if group == "ways":
            entry["ways"][name] = {
                "seconds": seconds,
                "tokens_per_second": shape.rows / seconds,
                "share_of_floor": floor.seconds / seconds,
            }
        else:
            a_layer = seconds / layers[name]
            entry["baselines"][name] = {
                "seconds": seconds,
                "seconds_per_layer": a_layer,
                "times_ours": a_layer / (ours / own_layers),
            }
    return entry


def trace_step(steps: Steps, step: StepInputs) -> dict[str, Any]:
    """Launches of a replayed step, what ran in it, and the share of idle time inside graphs; None for lost events."""
    calls: dict[tuple[str, int], Call] = {}
    segments = []

    def load(stage: Stage, inputs: Callable[[], dict[str, Tensor]], rows: int) -> None:
        stage.program.load(inputs(), rows)

    inputs_of: tuple[Callable[[], dict[str, Tensor]], ...] = (
        lambda: steps.prelude_inputs(step),
        lambda: steps.body_inputs(step, steps.prelude.results(step.shape.rows)),
        lambda: steps.epilogue_inputs(step, steps.body.results(step.shape.rows)),
    )
    for stage, inputs in zip(steps.stages, inputs_of, strict=True):
        rows = step.shape.sampled if stage is steps.epilogue else step.shape.rows
        name = stage.part.name
        calls[name, -1] = functools.partial(load, stage, inputs, rows)
        for number, launch in enumerate(stage.program.launches(rows)):
            calls[name, number] = launch
            if stage.compilation.instructions[number].kind is PieceKind.SEGMENT:
                segments.append((name, number))
    traced = record(calls, step.last.device)
    if len(traced) < len(calls):
        return dict(_UNTRACED)
    work = [each.work for each in traced.values()]
    return {
        "launches": sum(each.launches for each in traced.values()),
        "kernels": sum(map(len, work)),
        "busy_seconds": sum(end - start for spans in work for start, end in spans),
        "segments_idle_share": idle_share([traced[key] for key in segments]),
    }
