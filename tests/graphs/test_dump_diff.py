"""Two dumps in words: nothing for equal ones, and each thing that differs by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from octavo.errors import UsageError
from octavo.graphs.describe import describe
from octavo.graphs.dump import claim, write_overview
from octavo.graphs.dump_diff import compare_dumps, read_graph
from octavo.runtime.graphs_cli import graphs_app
from tests.graphs.mini_program import compiled, export, fabricated, write_dump

LAYERS = 3


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of one program: ``one``, ``again`` (the same), ``four`` (ranks), ``started`` (with what was measured)."""
    root = tmp_path_factory.mktemp("dumps")
    claim(root / "started")
    report, _ = write_dump(root / "started" / "body", 1, LAYERS, "fast", fabricated)
    write_overview(root / "started", ["mini"], {"body": report})
    for name, ranks in (("one", 1), ("again", 1), ("four", 4)):
        claim(root / name)
        report, _ = write_dump(root / name / "body", ranks, LAYERS)
        write_overview(root / name, ["mini"], {"body": report})
    return root


def changed(source: Path, target: Path, change: Callable[[Any], None]) -> list[str]:
    """What is said after ``change`` was done to the report of a copied program."""
    return changed_file(source, target, "report.json", change)


def changed_file(source: Path, target: Path, name: str, change: Callable[[Any], None]) -> list[str]:
    shutil.copytree(source, target)
    file = target / "body" / name
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))
    return compare_dumps(source, target)


def test_equal_dumps(dumps: Path) -> None:
    assert compare_dumps(dumps / "one", dumps / "again") == []
    assert compare_dumps(dumps / "one" / "body", dumps / "again" / "body") == []


def test_ranks(dumps: Path) -> None:
    """Every part of a report speaks up where one rank and four differ."""
    found = compare_dumps(dumps / "one", dumps / "four")
    assert found[0] == "body" and all(line.startswith("  ") for line in found[1:])
    lines = [line.strip() for line in found]
    for said in (
        "ranks: 1 -> 4",
        "rows: whole -> sharded",
        "collectives: 0 -> 9",
        "collectives that reduce-scatter: 0 -> 3",
        "pass place noted: nothing -> 9 collectives",
        "added: 9",
        "+ latents=L*.gather_rows[0]",
    ):
        assert said in lines, said
    for begin in ("instructions: ", "segments: ", "kind C1, only in B: collective x ", "a rank sends, a row: 0 B -> "):
        assert sum(line.startswith(begin) for line in lines) == 1, begin
    assert any(line.startswith("buffers, only in B: ") and "L*.gather_rows[0] (layers 0-2)" in line for line in lines)
    assert any("buffers with another shape: [b] -> [4*b]: state.write_slots" in line for line in lines)
    assert any(line.startswith("graphs differ from pass place on; after prove: +9") for line in lines)
    back = [line.strip() for line in compare_dumps(dumps / "four", dumps / "one")]
    assert "ranks: 4 -> 1" in back and "removed: 9" in back


def set_field(*path: str | int, value: Any) -> Callable[[Any], None]:
    def change(report: Any) -> None:
        for step in path[:-1]:
            report = report[step]
        report[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_field("device", value="cuda"), "device: cpu -> cuda"),
        (set_field("backends", "attend", value="triton"), "backend of attend: reference -> triton"),
        (set_field("pieces", 1, "why", value="no stream"), "breaks because no stream: 0 -> 1"),
        (set_field("buffers", 0, "dead_rows", value="zero"), "dead rows: filled with 0 -> zero: rows.embeds"),
        (set_field("buffers", 0, "storage", value=99), "1 buffer of both with another writer, reader or storage"),
        (set_field("buckets", 0, "rows", value=3), "buckets, only in B: 3"),
        (set_field("buckets", 2, "buffer_bytes", value=7), "buffers in the bucket of 4 rows: "),
        (set_field("kinds", 0, "digest", value="0"), "the same operators in the same layers"),
        (set_field("kinds", 0, "count", value=9), "kind S1, count: 1 -> 9"),
        (set_field("passes", 5, "name", value="spread"), "passes, only in A: place"),
        (set_field("passes", 5, "difference", value="+1"), "pass place did: "),
        (set_field("results", value=["x"]), "differs in results of report.json"),
    ],
)
def test_each_difference_is_named(dumps: Path, tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    lines = changed(dumps / "one", tmp_path / "changed", change)
    assert lines[0] == "body" and any(said in line for line in lines[1:]), lines


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_field("regions", 0, "count", value=9), ["regions of stream_mean.reference: 3 -> 9"]),
        (
            set_field("regions", 0, "text", value="in0"),
            ["regions with other shapes or constants: stream_mean.reference"],
        ),
        (
            set_field("regions", value=[{"of": "R1", "name": "x.torch", "count": 2, "layers": [], "text": "y"}]),
            ["regions of stream_mean.reference: 3 -> 0", "regions of x.torch: 0 -> 2"],
        ),
    ],
)
def test_regions(dumps: Path, tmp_path: Path, change: Callable[[Any], None], said: list[str]) -> None:
    lines = [line.strip() for line in changed(dumps / "started", tmp_path / "changed", change)]
    assert set(said) <= set(lines), lines


def toggle_feature(facts: Any) -> None:
    facts["features"][0]["found"] = not facts["features"][0]["found"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_field("regions", "kinds", 0, "count", value=9), "compiled regions of stream_mean.reference: 3 -> 9"),
        (set_field("regions", "casts_survive", value=False), "BF16 round trips inside a region: kept -> dropped"),
        (set_field("regions", value=None), "compiled: regions -> nothing"),
        (set_field("captures", value=[]), "CUDA graphs: 22 -> 0"),
        (toggle_feature, "feature of torch check_input_liveness: "),
    ],
)
def test_what_a_start_measured(dumps: Path, tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    program, line = changed_file(dumps / "started", tmp_path / "changed", "measured.json", change)
    assert program == "body" and line.strip().startswith(said)


def test_what_differs_by_itself_is_left_out(dumps: Path, tmp_path: Path) -> None:
    """Seconds, bytes and the cache; and the whole of it, where only one was started."""

    def change(facts: Any) -> None:
        facts["regions"]["seconds"] = 0.1
        for kind in facts["regions"]["kinds"]:
            kind.update(seconds=0.01, cached=True)
        for capture in facts["captures"]:
            capture.update(seconds=0.01, pool_bytes=3, graph_bytes=4)

    assert changed_file(dumps / "started", tmp_path / "changed", "measured.json", change) == []
    (tmp_path / "changed" / "body" / "measured.json").unlink()
    assert compare_dumps(dumps / "started", tmp_path / "changed") == []
    assert compare_dumps(tmp_path / "changed", dumps / "started") == []


def test_regions_differ_once(dumps: Path, tmp_path: Path) -> None:
    """What the report and the start both say is said once."""
    shutil.copytree(dumps / "started", tmp_path / "changed")
    for name in ("report.json", "measured.json"):
        file = tmp_path / "changed" / "body" / name
        facts = json.loads(file.read_text())
        kinds = facts["regions"] if name == "report.json" else facts["regions"]["kinds"]
        kinds[0]["count"] = 9
        file.write_text(json.dumps(facts))
    lines = [line.strip() for line in compare_dumps(dumps / "started", tmp_path / "changed")]
    assert lines == ["body", "regions of stream_mean.reference: 3 -> 9"]


def test_a_dump_of_another_version(dumps: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="report of schema 1, and this version reads schema 2"):
        changed(dumps / "one", tmp_path / "changed", set_field("schema", value=1))


def test_a_program_that_only_one_has(dumps: Path, tmp_path: Path) -> None:
    report, _ = write_dump(tmp_path / "body", 1, LAYERS)
    shutil.copytree(tmp_path / "body", tmp_path / "epilogue")
    write_overview(tmp_path, ["mini", "two"], {"body": report, "epilogue": report})
    assert compare_dumps(dumps / "one", tmp_path) == ["title, only in B: two", "programs, only in B: epilogue"]


def test_a_graph_that_changed_alone(dumps: Path, tmp_path: Path) -> None:
    """The reports are equal, a text is not."""
    shutil.copytree(dumps / "one", tmp_path / "changed")
    file = tmp_path / "changed" / "body" / "passes" / "11_prove.txt"
    text = file.read_text()
    assert text.count(" epsilon=1e-20") > 1
    file.write_text(text.replace(" epsilon=1e-20", " epsilon=0.5", 1))
    lines = compare_dumps(dumps / "one", tmp_path / "changed")
    assert any("graphs differ from pass prove on" in line for line in lines)
    assert [line.strip() for line in lines if "epsilon" in line] == ["- epsilon=1e-20", "+ epsilon=0.5"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_graphs_are_read_back(dumps: Path, ranks: int) -> None:
    """Name, operator, arguments and shapes of every node, from the text."""
    program, _ = compiled(ranks, True, source=export(LAYERS))
    expected = describe(program.compilation)
    found = read_graph(dumps / {1: "one", 4: "four"}[ranks] / "body" / "passes" / "11_prove.txt")
    assert found.canonical() == expected.canonical() and len(found.calls) > 60
    assert [node.arguments for node in found.calls] == [node.arguments for node in expected.calls]
    assert any(note[0] == "placement" for node in found.calls for note in node.notes)
    assert not any(note[0] == "piece" for node in found.calls for note in node.notes)


def test_paths_without_a_dump(dumps: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_text('{"generator": "another tool"}')
    claim(tmp_path / "begun")
    for path, message in (
        (tmp_path / "nowhere", "holds no graph dump"),
        (tmp_path / "other", "holds no graph dump"),
        (tmp_path / "begun", "was not finished"),
    ):
        for pair in ((dumps / "one", path), (path, dumps / "one")):
            with pytest.raises(UsageError, match=message):
                compare_dumps(*pair)


def test_command(dumps: Path) -> None:
    def run(*names: str) -> typer.testing.Result:
        return typer.testing.CliRunner().invoke(graphs_app, ["diff", *(str(dumps / name) for name in names)])

    equal, different, bad = run("one", "again"), run("one", "four"), run("one", "nowhere")
    assert equal.exit_code == 0 and equal.stdout.startswith("equal")
    assert different.exit_code == 1 and "ranks: 1 -> 4" in different.stdout
    assert isinstance(bad.exception, UsageError) and bad.exception.exit_code == 2 and bad.stdout == ""
