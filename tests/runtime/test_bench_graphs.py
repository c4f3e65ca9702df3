"""``octavo bench graphs`` on the CPU: the programs measured, options, the report, and how traces are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from octavo.errors import UsageError
from octavo.graphs.inductor import CompiledKind, CompiledRegions
from octavo.graphs.measured import capture_facts
from octavo.graphs.program import BucketCapture
from octavo.kernels.experts import experts
from octavo.passes.base import operator_of
from octavo.passes.breaks import PieceKind
from octavo.runtime.assemble import assemble
from octavo.runtime.bench_bodies import Bodies, without_experts
from octavo.runtime.bench_cli import bench_app
from octavo.runtime.bench_graphs import report_lines
from octavo.runtime.bench_trace import Event, Recorded, idle_share, mark_bytes, read_trace
from octavo.runtime.config import EngineConfig
from tests.model.mini_run import MINI

ROWS = (1, 40)
"""The second has more rows than a selection has places: then it depends on what it is made from."""
SMALL = ("--model", MINI, "--device", "cpu", "--rows", "1,40", "--repeat", "2")


def run(*arguments: str | Path) -> None:
    """``octavo bench``, errors raised as they are."""
    typer.main.get_command(bench_app).main([str(argument) for argument in arguments], standalone_mode=False)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for member in value.values():
            yield from numbers(member)
    else:
        yield value


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    """All layers of the mini model: buffers share storages, breaks give selections or only write."""
    assembly = assemble(EngineConfig(model=MINI, device="cpu", kv_tokens=64, max_requests=2))
    return Bodies(assembly, ROWS, lambda phase, done, total: None)


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], bodies: Bodies) -> None:
    file = tmp_path / "graphs.json"
    run("graphs", *SMALL, "--json", file)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert set(report) == {"environment", "repeat", "phase_seconds", "program", "rows", "capture", "compile"}
    phases = report["phase_seconds"]
    assert list(phases)[:3] == ["weights", "programs", "capture"] and all(seconds >= 0 for seconds in phases.values())
    assert list(phases)[3:] == [*(f"{rows} rows" for rows in ROWS), *(f"tracing {rows} rows" for rows in ROWS)]
    assert set(report["environment"]) == {"octavo", "torch", "threads", "device", "engine"} and report["repeat"] == 2
    instructions = bodies.compilation.instructions
    kinds = Counter(instruction.kind for instruction in instructions)
    program = report["program"]
    assert (program["segments"], program["breaks"]) == (kinds[PieceKind.SEGMENT], kinds[PieceKind.BREAK]) != (0, 0)
    assert program["results_copied"] == sum(len(instruction.results) for instruction in instructions)
    assert program["inputs_loaded"] == len(bodies.prepare(ROWS[-1]).whole)
    assert program["buffer_bytes"] == bodies.variants["plain"].step.buffer_bytes
    assert [entry["rows"] for entry in report["rows"]] == list(ROWS)
    text = bodies.assembly.config.text_config
    for entry in report["rows"]:
        assert entry["expected_pairs"] == entry["rows"] * text.num_experts_per_tok
        for what in ("segments_seconds", "step_seconds"):
            assert set(entry[what]) == {"plain"} and set(entry[what]["plain"]) == {"eager", "graphs"}
            assert all(seconds > 0 for seconds in numbers(entry[what]))
        assert set(entry["launches"]) == {"inputs", "breaks", "segments"}
        assert {*numbers(entry["launches"]), *numbers(entry["segments_idle_share"])} == {None}
    assert report["capture"] == {"plain": None} and report["compile"] is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{program['segments']} segments, {program['breaks']} breaks")
    rows = [line.replace("|", " ").split() for line in lines[4:6]]
    assert [row[0] for row in rows] == ["1", "40"] and {row[6] for row in rows} == {"-"}


def test_pairs_of_resident_experts(tmp_path: Path) -> None:
    file = tmp_path / "graphs.json"
    run("graphs", *SMALL, "--layers", "1", "--experts", "2", "--repeat", "1", "--json", file)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [entry["expected_pairs"] for entry in report["rows"]] == [1 * 2 * 2 / 8, 40 * 2 * 2 / 8]


def test_compiled_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured beside the plain one. What is compiled is not the question here, so nothing is."""
    kinds = (CompiledKind("rms_norm.torch", "", 6, 0.5, True), CompiledKind("linear.torch", "", 1, 0.5, False))
    monkeypatch.setattr(
        "octavo.runtime.bench_bodies.compile_regions", lambda *_, **__: CompiledRegions({}, kinds, 1.25, True)
    )
    file = tmp_path / "graphs.json"
    run("graphs", *SMALL, "--layers", "3", "--numerics", "fast", "--compile", "inductor", "--json", file)
    report = json.loads(file.read_text(encoding="utf-8"))
    for entry in report["rows"]:
        for what in ("segments_seconds", "step_seconds"):
            assert set(entry[what]) == {"plain", "inductor"} and all(seconds > 0 for seconds in numbers(entry[what]))
    assert report["compile"]["seconds"] == 1.25 and report["compile"]["cache_hits"] == 1
    assert [kind["count"] for kind in report["compile"]["kinds"]] == [6, 1]
    lines = capsys.readouterr().out.splitlines()
    row = lines[4].replace("|", " ").split()
    assert float(row[6]) == pytest.approx(float(row[2]) / float(row[5]), abs=0.02), "rounded in the table"
    assert lines[-1] == "inductor: 7 regions of 2 kinds compiled in 1.2 s, 1 kinds from the cache"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "0,4"), "--rows 0,4: bucket 0"),
        (("--rows", "4,25", "--chunk", "24"), "bucket 25: .*chunk of 24 rows"),
        (("--rows", "4,x"), "--rows 4,x: expected row counts such as 1,16,128"),
        (("--rows", ""), "expected row counts"),
        (("--rows", "8,4"), "ascending"),
        (("--rows", "65", "--kv-tokens", "64"), "--rows 65: a request has room for 64 tokens"),
        (("--json", "nowhere/out.json"), "--json nowhere/out.json: cannot be written"),
        (("--numerics", "reference", "--compile", "inductor"), "Inductor's exp, log1p and mean differ"),
        (("--graphs", "off"), "--graphs does not apply"),
        (("--dump-dir", "here"), "--dump-dir does not apply"),
        (("--ranks", "2"), "--ranks does not apply"),
        (("--buckets", "1,8"), "--buckets does not apply"),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run("graphs", "--model", MINI, "--device", "cpu", *arguments)


def test_options_before_the_subcommand_are_not_lost_in_silence() -> None:
    with pytest.raises(UsageError, match="--requests: options of bench graphs follow it"):
        run("--requests", "3", "graphs", *SMALL)


@pytest.mark.parametrize("rows", ROWS)
def test_segments_alone(bodies: Bodies, rows: int) -> None:
    """Again and again, eagerly and on static buffers, they compute the same: what breaks gave them is still there."""
    step, program = bodies.prepare(rows), bodies.variants["plain"].segments
    found = []
    for _ in range(2):
        for launch in program.launches(rows):
            launch()
        found.append([program.view(name, rows).clone() for name in program.outputs])
        found.append(list(program.run_eager(step.segments)))
    assert all(torch.equal(a, b) for outputs in found[1:] for a, b in zip(outputs, found[0], strict=True))
    assert all(bool(output.isfinite().all()) for output in found[0])
    selected = [value for name, value in step.segments.items() if name.startswith("select")]
    assert selected and all(-1 <= int(value.min()) <= int(value.max()) < rows for value in selected)


def test_whole_steps(bodies: Bodies) -> None:
    """With their experts, and breaks may run by themselves behind them."""
    rows = ROWS[-1]
    step, variant = bodies.prepare(rows), bodies.variants["plain"]
    program, given = variant.step, [name for name in step.segments if name not in step.whole]
    before = [program.view(name, rows).clone() for name in given]
    for instruction, launch in zip(program.instructions, program.launches(rows), strict=True):
        if instruction.kind is not PieceKind.SEGMENT:
            launch()
    assert given and all(torch.equal(program.view(name, rows), a) for name, a in zip(given, before, strict=True))
    program.load(step.whole, rows)
    replayed = program.replay(rows)[0].clone()
    assert torch.equal(replayed, program.run_eager(step.whole)[0])
    assert not torch.equal(replayed, variant.segments.run_eager(step.segments)[0])


def test_stand_in_for_the_experts(bodies: Bodies) -> None:
    """One cast in the place of each call, of the same shape and dtype; the originals keep their experts."""
    replaced = 0
    for instruction in bodies.compilation.instructions:
        if instruction.kind is PieceKind.SEGMENT:
            calls = [node for node in instruction.module.graph.nodes if operator_of(node) is experts]
            copy = without_experts(instruction.module)
            assert len(copy.graph.nodes) == len(instruction.module.graph.nodes)
            assert not [node for node in copy.graph.nodes if operator_of(node) is experts]
            replaced += len(calls)
    assert replaced == bodies.assembly.config.text_config.num_hidden_layers


def event(category: str, start: float, duration: float, correlation: int, size: int = 0) -> Event:
    """As the profiler writes it; microseconds."""
    arguments = (
        {"correlation": correlation, "bytes": size} if category == "gpu_memcpy" else {"correlation": correlation}
    )
    return {"ph": "X", "cat": category, "ts": start, "dur": duration, "args": arguments}


def marked(number: int, start: float, *work: Event) -> list[Event]:
    """Events of a call between its marks."""
    before, after = mark_bytes(number)
    end = max((event["ts"] + event["dur"] for event in work), default=start)
    return [
        event("gpu_memcpy", start - 5, 1, 9000 + 2 * number, before),
        *work,
        event("gpu_memcpy", end + 5, 1, 9001 + 2 * number, after),
    ]


# Far from zero, as the profiler's clock is, where F64 has steps of 1/1024.
BASE = 4.0e12
GRAPH = marked(0, BASE, *(event("kernel", BASE + 10 * place, 8, 1) for place in range(5)))
EAGER = marked(
    1,
    BASE + 100,
    event("kernel", BASE + 100, 10, 2),
    event("gpu_memset", BASE + 104, 10, 3),
    event("gpu_memcpy", BASE + 124, 16, 4, 64),
)


def test_a_trace_is_read_by_its_marks() -> None:
    other = [
        {"ph": "M", "name": "process_name", "ts": 0.0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": BASE, "dur": 3, "args": {"correlation": 1}},
        event("kernel", BASE + 70, 1, 7),
        event("gpu_memcpy", BASE + 80, 1, 8, 2),
        event("kernel", BASE - 1e9, 1, 6),
    ]
    found = read_trace([*EAGER, *other, *GRAPH])
    assert set(found) == {0, 1}
    assert found[0].launches == 1 and len(found[0].work) == 5, "a graph is launched once"
    assert found[1].launches == 3
    assert [value for span in found[1].work for value in span] == pytest.approx([0, 10e-6, 4e-6, 14e-6, 24e-6, 40e-6])
    assert idle_share([found[0]]) == pytest.approx(8 / 48)
    assert idle_share([found[1]]) == pytest.approx(10 / 40), "what overlaps counts once"
    assert idle_share([found[0], found[1]]) == pytest.approx(18 / 88)


def test_calls_without_work() -> None:
    found = read_trace(marked(0, BASE))
    assert found == {0: Recorded(0, ())} and idle_share([found[0]]) is None


@pytest.mark.parametrize("lost", (0, len(GRAPH) - 1))
def test_calls_whose_marks_are_lost_are_missing(lost: int) -> None:
    assert set(read_trace([*GRAPH[:lost], *GRAPH[lost + 1 :], *EAGER])) == {1}


def test_text_of_a_report_from_a_gpu() -> None:
    capture = BucketCapture(16, 9, 0.5, 3_000_000, 40_000)
    report = {
        "repeat": 20,
        "program": {"segments": 9, "breaks": 8, "inputs_loaded": 9, "results_copied": 60, "buffer_bytes": 1},
        "rows": [
            {
                "rows": 16,
                "expected_pairs": 12.0,
                "segments_seconds": {
                    "plain": {"eager": 0.04, "graphs": 0.02},
                    "inductor": {"eager": 0.01, "graphs": 0.005},
                },
                "step_seconds": {
                    "plain": {"eager": 0.06, "graphs": 0.03},
                    "inductor": {"eager": 0.02, "graphs": 0.0125},
                },
                "launches": {
                    "inputs": 10,
                    "breaks": 200,
                    "segments": {"plain": {"eager": 5000, "graphs": 9}, "inductor": {"eager": 900, "graphs": 9}},
                },
                "segments_idle_share": {"plain": 0.5, "inductor": 0.123},
            }
        ],
        "capture": {
            "plain": None,
            "inductor": {
                "seconds": 2.0,
                "pool_bytes": 3_000_000,
                "graph_bytes": 40_000,
                "eager_peak_bytes": 4_000_000,
                "pool_share_of_eager_peak": 0.75,
                "buckets": [capture_facts(capture)],
            },
        },
        "compile": None,
    }
    lines = report_lines(report)
    assert lines[4].replace("|", " ").split() == [
        *("16", "12.0", "40.00", "20.00", "10.00", "5.00", "8.00", "12.3%", "5,200", "219", "60.00", "30.00", "12.50")
    ]
    assert lines[5] == "plain: capture -"
    assert "pool 3 MB, 0.75 of the 4 MB" in lines[6] and "9 segments in 0.50 s, graphs 40 KB, pool 3 MB" in lines[7]
