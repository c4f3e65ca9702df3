"""``octavo bench prefill`` and ``decode`` on the CPU: the steps measured, their components, baselines, the report."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer.main
from torch import Tensor

from octavo.errors import OctavoError, UsageError
from octavo.runtime.assemble import Assembly, assemble
from octavo.runtime.bench_cli import bench_app
from octavo.runtime.bench_steps import huggingface, measure
from octavo.runtime.bench_steps.baselines import make_baselines
from octavo.runtime.bench_steps.components import NORMS, OTHER, ROUTED, component_of, time_operators
from octavo.runtime.bench_steps.measure import trace_step, ways_named
from octavo.runtime.bench_steps.plot import plot_svg
from octavo.runtime.bench_steps.report import report_lines
from octavo.runtime.bench_steps.routing import routed
from octavo.runtime.bench_steps.steps import StepInputs, Steps, filled_pools, step_inputs
from octavo.runtime.bench_trace import Recorded
from octavo.runtime.config import EngineConfig
from octavo.runtime.floor import Component, Routing, StepShape, step_floor
from octavo.runtime.pools import Pools

SMALL = ("--weights", "random", "--preset", "mini", "--layers", "3", "--device", "cpu", "--repeat", "2")
"""Three layers have Engram, a source, and layers of both ratios."""
SHAPES = (
    StepShape(rows=24, context=40),
    StepShape(rows=3, requests=3, context=40, sampled=3),
)
"""A prefill and a decode step."""


def run(*arguments: str | Path) -> None:
    """``octavo bench``, errors raised as they are."""
    typer.main.get_command(bench_app).main([str(argument) for argument in arguments], standalone_mode=False)


def silent(phase: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    """All layers: candidates and all four sources among them."""
    return assemble(EngineConfig(weights="random", preset="mini", device="cpu", kv_tokens=512, max_requests=3))


@pytest.fixture(scope="module")
def pools(assembly: Assembly) -> Pools:
    return filled_pools(assembly)


@pytest.fixture(scope="module")
def steps(assembly: Assembly, pools: Pools) -> Steps:
    return Steps(assembly, pools, SHAPES, assembly.backends, False, True, silent)


@pytest.fixture(params=SHAPES, ids=("prefill", "decode"))
def step(request: pytest.FixtureRequest, assembly: Assembly, pools: Pools) -> StepInputs:
    return step_inputs(assembly, pools, request.param)


def state(pools: Pools) -> list[Tensor]:
    return [*pools.rings, *pools.entries, *pools.keys, *pools.pending, pools.history]


@pytest.fixture
def reset(pools: Pools) -> Callable[[], None]:
    """Brings back the state as it is now: steps move it on."""
    saved = [tensor.clone() for tensor in state(pools)]

    def restore() -> None:
        for tensor, before in zip(state(pools), saved, strict=True):
            tensor.copy_(before)

    return restore


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of prefill steps, as the command line writes it; its plot lies beside it."""
    directory = tmp_path_factory.mktemp("report")
    file, plot = directory / "steps.json", directory / "steps.svg"
    run("prefill", *SMALL, "--rows", "8,24", "--context", "0,40", "--ways", "all", "--json", file, "--plot", plot)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert plot.read_text(encoding="utf-8") == plot_svg(found)
    return found


def test_report_of_prefill_steps(report: dict[str, Any]) -> None:
    text = assemble(EngineConfig(weights="random", preset="mini", layers=3, device="cpu")).config.text_config
    assert report["kind"] == "prefill" and report["layers"] == 3 and report["resident_experts"] == 8
    assert report["capture"] == {"plain": None} and report["baselines"] == {}
    assert report["program"]["segments"] > 0 and report["program"]["buffer_bytes"] > 0
    assert list(report["phase_seconds"])[:4] == ["weights", "programs", "capture", "baselines"]
    assert [(entry["rows"], entry["context"]) for entry in report["steps"]] == [(8, 0), (24, 0), (8, 40), (24, 40)]
    for entry in report["steps"]:
        rows = entry["rows"]
        assert (entry["requests"], entry["sampled"]) == (1, 1) and entry["pairs"] == rows * 2
        assert 0 < entry["experts"] <= 8
        chosen = [Routing(entry["pairs"], entry["experts"])] * 3
        floor = step_floor(text, StepShape(rows=rows, context=entry["context"]), routed=chosen).seconds
        assert entry["floor_seconds"] == pytest.approx(floor), "experts' bytes bound few rows, in proportion"
        assert list(entry["ways"]) == ["eager", "graphs"]
        for way in entry["ways"].values():
            assert way["tokens_per_second"] == pytest.approx(rows / way["seconds"])
            assert way["share_of_floor"] == pytest.approx(floor / way["seconds"])
        assert {entry[name] for name in ("launches", "kernels", "busy_seconds", "segments_idle_share")} == {None}


def test_components_have_times_and_floors(report: dict[str, Any]) -> None:
    """Floors sum to the step's; every one was measured; what has no floor stands beside them."""
    for entry in report["steps"]:
        components = {each["component"]: each for each in entry["components"]}
        with_floor = {each.value for each in Component} - {"router", "experts"} | {ROUTED}
        assert set(components) == with_floor | {NORMS, OTHER}
        assert sum(each["floor_seconds"] for each in components.values()) == pytest.approx(entry["floor_seconds"])
        for name, each in components.items():
            assert (
                each["seconds"] == pytest.approx(sum(o["seconds"] for o in each["operators"])) and each["seconds"] > 0
            )
            assert each["share_of_floor"] == pytest.approx(each["floor_seconds"] / each["seconds"])
            assert (each["floor_seconds"] > 0) == (name in with_floor)
        assert [operator["operator"] for operator in components[OTHER]["operators"]] == ["-"], "all operators are known"


def test_decode_against_the_same_operations_called_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    run("decode", *SMALL, "--batch", "1,3", "--context", "70", "--baselines", "eager", "--json", file)
    found = json.loads(file.read_text(encoding="utf-8"))
    for entry, requests in zip(found["steps"], (1, 3), strict=True):
        assert (entry["rows"], entry["requests"], entry["sampled"], entry["context"]) == (
            requests,
            requests,
            requests,
            70,
        )
        (way,) = entry["ways"].values()
        other = entry["baselines"]["eager"]
        assert other["seconds_per_layer"] == other["seconds"] / 3
        assert other["times_ours"] == pytest.approx(other["seconds"] / way["seconds"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("decode: 3 layers, 8 resident experts, medians of 2;")
    assert "decode of 1 request, context 70:" in lines and "decode of 3 requests, context 70:" in lines
    assert lines[-1].startswith("baseline eager: plain PyTorch operations")


def test_replayed_and_eager_steps_agree(steps: Steps, step: StepInputs, reset: Callable[[], None]) -> None:
    """To the bit, and everything is finite although the state is random."""
    replayed = steps.replay(step).clone()
    reset()
    assert replayed.shape[0] == step.shape.sampled and bool(replayed.isfinite().all())
    assert torch.equal(steps.eager(step), replayed)


def test_operators_are_timed_one_by_one(
    assembly: Assembly, pools: Pools, steps: Steps, step: StepInputs, reset: Callable[[], None]
) -> None:
    """What runs node by node, three times, is the step: it leaves the same state behind. Every call is counted."""
    for _ in range(3):
        steps.eager(step)
    expected = [tensor.clone() for tensor in state(pools)]
    reset()
    spent = time_operators(steps, step)
    assert all(torch.equal(a, b) for a, b in zip(expected, state(pools), strict=True))
    text = assembly.config.text_config
    calls = Counter[str]()
    for each in spent:
        calls[each.operator.partition(".")[0]] += each.calls
        assert each.seconds > 0 and each.kernels is None and not each.compiled
    layers, sources = text.num_hidden_layers, len(text.index_source_layer_ids)
    assert calls["attend"] == calls["experts"] == calls["shared_expert"] == layers
    assert calls["select"] + calls["select_candidates"] == sources == 1 + calls["select"]
    assert calls["linear_f8"] == 4 * layers + sources + len(text.engram_layer_ids)
    projections = [each for each in spent if each.component == Component.PROJECTIONS.value]
    assert sum(each.calls for each in projections) == 5 * layers


def test_the_floor_counts_the_experts_that_are_chosen(
    assembly: Assembly, steps: Steps, step: StepInputs, reset: Callable[[], None]
) -> None:
    """A layer whose bias sends all rows to two experts reads two; the others are dealt as it comes."""
    text = assembly.config.text_config
    weights = assembly.model.official_parameters()
    bias = weights["layers.2.ffn.gate.bias"]
    before = bias.clone()
    bias[torch.tensor([3, 6])] += 50.0
    crowded = routed(steps, step)
    bias.copy_(before)
    reset()
    assert len(crowded) == text.num_hidden_layers
    assert crowded[2] == Routing(2 * step.shape.rows, 2)
    assert all(each.pairs == 2 * step.shape.rows and each.experts > 2 for each in (*crowded[:2], *crowded[3:]))
    floors = [step_floor(text, step.shape, routed=each) for each in (crowded, None)]
    first, second = ({p.layer: p for p in floor.parts if p.component is Component.EXPERTS} for floor in floors)
    assert first[2].bytes < second[2].bytes and first[2].operations == second[2].operations


@pytest.mark.parametrize(
    ("operator", "stage", "role", "component"),
    [
        ("linear_f8", "body", "attn.wq_b", "projections"),
        ("linear_f8_pair", "body", "attn", "projections"),
        ("linear_f8", "body", "attn.indexer.wq_b", "index projections"),
        ("linear_f32", "body", "attn.compressor.wgate", "compressor"),
        ("linear_f8", "body", "engram.wkv", "Engram"),
        ("linear_f32", "epilogue", "", "head"),
        ("commit_window", "body", "attn", "attention"),
        ("commit_window", "prelude", "", "Engram"),
        ("embed_tokens", "prelude", "embed", "embedding"),
        ("mhc_mix_and_collapse", "body", "", "mHC"),
        ("sort_everything", "body", "attn_norm", "other"),
    ],
)
def test_components_of_operators(operator: str, stage: str, role: str, component: str) -> None:
    """The same operator belongs to several, by where it stands; what is not known is named so."""
    assert component_of(operator, stage, role) == component


@pytest.mark.parametrize("lost", (False, True))
def test_traces_of_steps(
    monkeypatch: pytest.MonkeyPatch, steps: Steps, step: StepInputs, reset: Callable[[], None], lost: bool
) -> None:
    """As a profiler would see them: every call launches two kernels and idles for a fifth of it. The step is whole."""

    def record(calls: Mapping[Any, Callable[[], object]], device: torch.device) -> dict[Any, Recorded]:
        for call in calls.values():
            call()
        found = {key: Recorded(2, ((0.0, 3e-6), (4e-6, 5e-6))) for key in calls}
        if lost:
            found.popitem()
        return found

    expected: Tensor = steps.replay(step).clone()
    steps.epilogue.program.poison()
    reset()
    monkeypatch.setattr(measure, "record", record)
    found = trace_step(steps, step)
    assert torch.equal(steps.epilogue.results(step.shape.sampled)[0], expected)
    if lost:
        assert set(found.values()) == {None}
        return
    calls = sum(1 + len(stage.compilation.instructions) for stage in steps.stages)
    assert found["launches"] == found["kernels"] == 2 * calls
    assert found["busy_seconds"] == pytest.approx(4e-6 * calls)
    assert found["segments_idle_share"] == pytest.approx(1 / 5)


def test_the_graph_for_the_compiler_is_the_same_model(
    monkeypatch: pytest.MonkeyPatch, assembly: Assembly, pools: Pools, step: StepInputs, reset: Callable[[], None]
) -> None:
    """All operators are gone from it, and it computes what the eager baseline does. What torch.compile makes of it is
    not the question here."""
    given: list[torch.fx.GraphModule] = []

    def compile_nothing(module: torch.fx.GraphModule, **options: Any) -> torch.fx.GraphModule:
        given.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    eager, compiled = make_baselines(("eager", "compile"), assembly, pools, SHAPES, silent)
    targets = [node.target for module in given for node in module.graph.nodes if node.op == "call_function"]
    assert len(given) == 3 and not [t for t in targets if str(t).startswith("octavo.")]
    results = []
    for call in (compiled.call(step), eager.call(step)):
        reset()
        result = call()
        assert isinstance(result, Tensor)
        results.append(result.clone())
    assert torch.equal(*results)
    assert compiled.describe()["first_call_seconds"] > 0


def test_baselines_that_run_out_of_memory_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(self: Steps, step: StepInputs) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(Steps, "eager", no_room)
    file = tmp_path / "steps.json"
    run("decode", *SMALL, "--batch", "1", "--context", "0", "--baselines", "eager", "--json", file)
    (entry,) = json.loads(file.read_text(encoding="utf-8"))["steps"]
    assert entry["baselines"] == {"eager": {"error": "CUDA out of memory"}}
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prefill", "--rows", "0,4"), "--rows 0,4: bucket 0"),
        (("prefill", "--rows", "4,x"), "--rows 4,x: expected ascending numbers"),
        (("prefill", "--rows", "4,25", "--chunk", "24"), "bucket 25: .*chunk of 24 rows"),
        (("decode", "--batch", "4,2"), "--batch 4,2: .*ascending"),
        (("prefill", "--context", "5,0"), "--context 5,0: expected ascending numbers of tokens"),
        (("prefill", "--context", ""), "--context : expected ascending"),
        (
            ("prefill", "--rows", "8", "--context", "60", "--kv-tokens", "64"),
            "room for 64 tokens, and 68 are asked for",
        ),
        (
            ("decode", "--batch", "4", "--context", "0", "--kv-tokens", "128"),
            "128 tokens in all, and 256 are asked for",
        ),
        (("prefill", "--ways", "fast"), "--ways fast: expected all, or some of eager, graphs, inductor, both"),
        (("prefill", "--ways", "both"), "both compiles regions, and nothing is compiled here"),
        (("prefill", "--baselines", "eager,vllm"), "--baselines eager,vllm: expected some of eager, compile"),
        (("prefill", "--json", "nowhere/out.json"), "--json nowhere/out.json: cannot be written"),
        (("decode", "--plot", "nowhere/out.svg"), "--plot nowhere/out.svg: cannot be written"),
        (("prefill", "--graphs", "off"), "--graphs does not apply: bench prefill"),
        (("decode", "--max-requests", "3"), "--max-requests does not apply: bench decode"),
        (("decode", "--ranks", "2"), "--ranks does not apply"),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(arguments[0], *SMALL, *arguments[1:])


def test_a_third_party_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    with pytest.raises(OctavoError, match="not installed here or too old"):
        run("prefill", *SMALL, "--baselines", "huggingface")


def test_ways() -> None:
    assert ways_named(None, True) == ("both",) and ways_named(None, False) == ("graphs",)
    assert ways_named("all", True) == ("eager", "graphs", "inductor", "both")
    assert ways_named("both,eager", True) == ("eager", "both"), "in their own order"


@pytest.fixture
def from_a_gpu(report: dict[str, Any]) -> dict[str, Any]:
    """The report with what only a GPU has, in round numbers."""
    found = copy.deepcopy(report)
    found["steps"] = found["steps"][:1]
    (entry,) = found["steps"]
    entry |= {"launches": 20, "kernels": 1586, "busy_seconds": 0.01, "segments_idle_share": 0.028}
    entry["ways"] = {"both": {"seconds": 0.0105, "tokens_per_second": 48_475.0, "share_of_floor": 0.346}}
    entry["baselines"] = {
        "compile": {"seconds": 0.021, "seconds_per_layer": 0.007, "times_ours": 2.0},
        "huggingface": {"error": "CUDA out of memory"},
    }
    for each in entry["components"]:
        each |= {"seconds": 0.001, "kernels": 4, "share_of_floor": 0.25}
        each["operators"] = [
            {"operator": "a.triton", "seconds": 0.0002, "compiled": False},
            {"operator": "b.torch", "seconds": 0.0008, "compiled": True},
        ]
    found["capture"] = {"inductor": {"seconds": 27.0, "graph_bytes": 73_400_000, "pool_bytes": 2_540_000_000}}
    found["program"] |= {"segments": 3, "breaks": 0, "buffer_bytes": 706_000_000}
    found["baselines"] = {
        "compile": {"what": "the same", "first_call_seconds": 61.26, "graphs": 5, "break_reasons": ["one", "two"]},
        "huggingface": {"what": "4 layers"},
    }
    return found


def test_text_of_a_report_from_a_gpu(from_a_gpu: dict[str, Any]) -> None:
    lines = report_lines(from_a_gpu)
    experts = f"{from_a_gpu['steps'][0]['experts']:.1f}"
    assert lines[0].endswith("medians of 2; 3 segments, 0 breaks; the floor is an H200's")
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        *("8", "0", "16.0", experts, "0.000", "10.500", "48,475", "34.6%", "20", "1,586", "2.8%"),
        *("21.000", "2.00", "out of memory", "-"),
    ]
    (attention,) = [line for line in lines if line.startswith("| attention")]
    assert [cell.strip() for cell in attention.strip("|").split("|")][2:] == [
        *("1.000", "25.0%", "7.7%", "4", "b.torch* 0.800, a.triton 0.200"),
    ]
    assert lines[-3] == "inductor: captured in 27.0 s; graphs 73.4 MB, pool 2.54 GB, buffers 706 MB"
    assert lines[-2] == "baseline compile: the same; first call seconds: 61.3; graphs: 5; break reasons: one, two"
    assert lines[-1] == "baseline huggingface: 4 layers"


def test_plot(from_a_gpu: dict[str, Any], report: dict[str, Any]) -> None:
    """Well-formed; a panel a step; every component in the legend, and those that multiply stand in the panel."""
    one, four = (ElementTree.fromstring(plot_svg(each)) for each in (from_a_gpu, report))
    panels = [len(image.findall("{*}g")) for image in (one, four)]
    assert panels == [1, 4]
    words = [text.text or "" for text in one.findall(".//{*}text")]
    assert "prefill of 8 rows, context 0: 10.500 ms, 48,475 tokens/s, 34.6% of floor" in words
    entries = from_a_gpu["steps"][0]["components"]
    assert sum(bool(re.match(rf"{each['component']}(:| 25)", word)) for each in entries for word in words) == len(
        entries
    )
    multiplying = [each for each in entries if each["operations"]]
    assert len(list(one.findall(".//{*}circle"))) == len(entries) + len(multiplying)
    for axis, most in (("cx", 400.0), ("cy", 300.0)):
        assert all(0 <= float(circle.get(axis, "-1")) <= most for circle in one.findall(".//{*}circle"))
