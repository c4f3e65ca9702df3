"""A dump says what is true, the same twice, in a directory that is checked first."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from octavo.errors import UsageError
from octavo.graphs import pages
from octavo.graphs.describe import describe
from octavo.graphs.differences import compare
from octavo.graphs.dump import DumpWriter, claim
from octavo.graphs.facts import Facts, facts_of
from octavo.graphs.measured import measured_of
from octavo.graphs.program_text import program_text
from octavo.graphs.regions import find_regions
from octavo.graphs.tables import ranges, size, table
from octavo.model.model import empty_model
from octavo.model.presets import preset
from octavo.model.random_weights import randomise
from octavo.passes.base import Compilation, InputKind
from tests.graphs.mini_program import TOP, compiled, export, fabricated, prepared, write_dump

PASSES = (
    *("normalise", "fuse", "choose", "verify", "place", "propagate", "breaks", "plan_buffers", "split", "lower"),
    "prove",
)
Dump = tuple[Path, Facts, Compilation]


@pytest.fixture(scope="module", params=[1, 4])
def dump(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    directory = tmp_path_factory.mktemp("dump") / "made" / "with parents"
    report, program = write_dump(directory, request.param)
    return directory, report, program.compilation


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_files(dump: Dump) -> None:
    directory, _, _ = dump
    stages = ["00_captured.txt"]
    for number, name in enumerate(PASSES, 1):
        stages += [f"{number:02}_{name}.txt", f"{number:02}_{name}.diff.txt"]
    pages = ["index.md", "pieces.md", "buffers.md", "buckets.md", "collectives.md", "program.py.txt"]
    expected = {*pages, "report.json", "timings.json", *(f"passes/{stage}" for stage in stages)}
    assert set(files_of(directory)) == expected
    for target in [t.split(")")[0] for t in (directory / "index.md").read_text().split("](")[1:]]:
        assert (directory / target).is_file(), target


def test_two_dumps_differ_in_timings_alone(dump: Dump, tmp_path: Path) -> None:
    directory, report, _ = dump
    write_dump(tmp_path / "again", report["ranks"])
    first, second = files_of(directory), files_of(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if name != "timings.json" and first[name] != second[name]] == []
    assert {f"pass {name}" for name in PASSES} | {"export"} == set(json.loads(first["timings.json"]))


def test_a_second_dump_replaces_the_first(tmp_path: Path) -> None:
    write_dump(tmp_path, 4, layers=2)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "passes" / "10_gone.txt").write_text("of a pass that there is no more")
    write_dump(tmp_path, 1, layers=2)
    write_dump(tmp_path / "fresh", 1, layers=2)
    replaced = files_of(tmp_path)
    for name, content in files_of(tmp_path / "fresh").items():
        assert name == "timings.json" or replaced[name] == content
    assert "passes/10_gone.txt" not in replaced and replaced["notes.txt"] == b"mine"


def test_bad_directories(tmp_path: Path) -> None:
    """Refused before anything is compiled, and nothing in them is touched."""
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_text('{"generator": "another tool"}')
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "report.json").write_text(json.dumps({"generator": "octavo graphs dump"}))
    (tmp_path / "older" / "body").mkdir()
    (tmp_path / "older" / "body" / "letters.txt").write_text("mine")
    for bad, message in (
        (file, "cannot be written"),
        (file / "below", "cannot be written"),
        (tmp_path / "full", "holds no graph dump"),
        (tmp_path / "other", "holds no graph dump"),
        (tmp_path / "older", "holds no graph dump"),
        (Path("/proc/nowhere"), "cannot be written"),
    ):
        with pytest.raises(UsageError, match=message):
            DumpWriter(bad)
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work" and file.read_text() == "x"
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    assert [p.name for p in (tmp_path / "older" / "body").iterdir()] == ["letters.txt"]


def test_an_interrupted_dump_can_be_replaced(tmp_path: Path) -> None:
    claim(tmp_path / "dump")
    assert json.loads((tmp_path / "dump" / "report.json").read_text())["complete"] is False
    claim(tmp_path / "dump")


def test_report(dump: Dump) -> None:
    """The report agrees with the compilation that it describes, and with itself."""
    directory, returned, compilation = dump
    report = json.loads((directory / "report.json").read_text())
    assert report == json.loads(json.dumps(returned))
    assert report["schema"] == 2 and report["complete"] is True
    assert [entry["name"] for entry in report["passes"]] == ["captured", *PASSES]
    assert len(report["pieces"]) == len(compilation.instructions) and len(report["buffers"]) == len(compilation.buffers)
    assert sum(kind["count"] for kind in report["kinds"]) == len(report["pieces"])
    assert sorted(n for kind in report["kinds"] for n in kind["pieces"]) == [p["number"] for p in report["pieces"]]
    assert max(kind["count"] for kind in report["kinds"]) == 10, "ten equal layers"
    assert all(piece["why"] for piece in report["pieces"])
    sources = Counter(operand["from"] for piece in report["pieces"] for operand in piece["inputs"])
    assert set(sources) == {"buffer", "weight", "constant", "pool"}, "nothing live"
    row_bytes = sum(storage["bytes_per_row"] for storage in report["storages"])
    assert [b["buffer_bytes"] for b in report["buckets"]] == [b["rows"] * row_bytes for b in report["buckets"]]
    tenants = {name: s["storage"] for s in report["storages"] for name in s["buffers"]}
    for buffer in report["buffers"]:
        assert tenants[buffer["name"]] == buffer["storage"] and buffer["name"] not in buffer["aliases"]
    assert len(tenants) == len(report["buffers"]), "names are unique"
    writes = [name for piece in report["pieces"] for name in piece["writes"]]
    inputs = [b["name"] for b in report["buffers"] if b["writer"] == "step inputs"]
    assert sorted(writes + inputs) == sorted(b["name"] for b in report["buffers"])


def test_pages_agree_with_the_report(dump: Dump) -> None:
    directory, report, _ = dump
    pieces, buffers, index = ((directory / f"{n}.md").read_text() for n in ("pieces", "buffers", "index"))
    for kind in report["kinds"]:
        assert f"### {kind['of']}: {kind['kind']} x {kind['count']}" in pieces
        assert f"| {kind['of']} " in index
    ordered = pieces.split("## In order")[1].splitlines()[4:]
    assert [line.split("|")[2].strip() for line in ordered] == [piece["of"] for piece in report["pieces"]]
    listed = buffers.split("## All")[1].splitlines()[6:]
    assert [line.split("|")[1].strip() for line in listed] == [buffer["name"] for buffer in report["buffers"]]
    assert f"**{len(report['pieces'])} instructions of {len(report['kinds'])} kinds**" in index
    assert report["plan_hash"] in index
    collectives = (directory / "collectives.md").read_text()
    rows = [line for line in collectives.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(report["collectives"]) == (30 if report["ranks"] == 4 else 0)
    assert ("None: no rows move" in collectives) == (report["ranks"] == 1)


Measured = tuple[Path, Facts, Facts]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Of two layers by the backends of numerics ``fast``: directory, report and what was measured."""
    directory = tmp_path_factory.mktemp("started")
    report, program = write_dump(directory, 1, 2, "fast", fabricated)
    assert [region["text"] for region in report["regions"]] == [
        region.text for region in find_regions(program.compilation.instructions)
    ]
    return directory, report, json.loads((directory / "measured.json").read_text())


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first line has this heading."""
    lines = page.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("|") and f" {heading} " in line)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def test_what_a_start_measured(started: Measured) -> None:
    _, report, measured = started
    assert list(measured) == ["schema", "captures", "regions", "features"] and measured["schema"] == 2
    assert [capture["rows"] for capture in measured["captures"]] == [b["rows"] for b in report["buckets"]][::-1]
    assert measured["captures"][0] == {
        "rows": TOP,
        "segments": sum(piece["kind"] == "segment" for piece in report["pieces"]),
        "seconds": 0.15,
        "pool_bytes": 5_000_000,
        "graph_bytes": 70_000 * TOP,
    }
    kinds = [(kind["name"], kind["count"], kind["text"]) for kind in measured["regions"]["kinds"]]
    assert kinds == [(region["name"], region["count"], region["text"]) for region in report["regions"]]
    assert {"rms_norm.reference", "mhc_mix.torch", "linear_f8.torch"} < {name for name, _, _ in kinds}
    assert {feature["name"] for feature in measured["features"]} == {"check_input_liveness"}
    assert all(isinstance(feature["found"], bool) and feature["use"] for feature in measured["features"])


def test_pages_tell_what_was_measured(started: Measured) -> None:
    directory, report, measured = started
    index, buckets, regions = ((directory / f"{n}.md").read_text() for n in ("index", "buckets", "regions"))
    for target in [t.split(")")[0] for t in index.split("](")[1:]]:
        assert (directory / target).is_file(), target
    assert "[regions.md](regions.md)" in index and "they are compiled." in index
    assert [row[-3:] for row in table_rows(buckets, "pool grew by")][-2:] == [
        ["0.15 s", "0 B", "3.92 MB"],
        ["0.15 s", "5 MB", "4.48 MB"],
    ]
    assert "The largest bucket is captured first" in buckets
    rows = table_rows(regions, "cached")
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (region["of"], region["name"], f"x {region['count']}") for region in report["regions"]
    ]
    assert {tuple(row[-2:]) for row in rows} == {("1.50", "no")} and "round trips inside a region are kept" in regions
    assert all(kind["text"] in regions for kind in measured["regions"]["kinds"])
    told = {row[0]: row[1:] for row in table_rows(regions, "in this torch")}
    for feature in measured["features"]:
        assert told[feature["name"]] == ["found" if feature["found"] else "not there", feature["use"]]


def test_pages_of_other_starts(started: Measured) -> None:
    """Casts dropped and kinds in the cache; nothing compiled or captured; nothing that could be."""
    _, report, measured = started
    compiled = measured["regions"] | {"casts_survive": False}
    compiled["kinds"] = [kind | {"cached": True} for kind in compiled["kinds"]]
    dropped = "\n".join(pages.regions_page(report, measured | {"regions": compiled}))
    assert "round trips inside a region are dropped" in dropped
    assert f"{len(compiled['kinds'])} of the kinds came from Inductor's cache" in dropped
    plain = measured_of([], None)
    said = "\n".join(pages.regions_page(report, plain))
    assert "Nothing is compiled (`--compile none`)" in said and "What makes the kinds" not in said
    assert "none is compiled." in "\n".join(pages.index_page(report, plain))
    assert "Nothing is captured: without CUDA graphs" in "\n".join(pages.buckets_page(report, plain))
    bare = report | {"regions": []}
    assert "no operator here has a backend" in "\n".join(pages.regions_page(bare, plain))
    reference = bare | {"backends": dict.fromkeys(report["backends"], "reference")}
    for page in (pages.regions_page(reference, plain), pages.index_page(reference), pages.pieces_page(reference)):
        assert "No regions: all backends are reference" in "\n".join(page)


def test_a_dump_without_a_start_says_nothing_of_one(started: Measured, tmp_path: Path) -> None:
    """The report is the same, and what an earlier engine measured goes away."""
    shutil.copytree(started[0], tmp_path, dirs_exist_ok=True)
    report, _ = write_dump(tmp_path, 1, 2, "fast")
    assert report == started[1]
    assert not (tmp_path / "measured.json").exists() and not (tmp_path / "regions.md").exists()
    said = (tmp_path / "index.md").read_text() + (tmp_path / "buckets.md").read_text()
    assert "compiled" not in said and "captured in" not in said and "regions.md" not in said
    pieces = (tmp_path / "pieces.md").read_text()
    rows = table_rows(pieces, "operator and backend")
    assert [row[1] for row in rows] == [region["name"] for region in report["regions"]]
    assert "* regions: R1 x " in pieces


def test_collectives_and_their_bytes() -> None:
    """Of four ranks, each with BF16 latents of 64 channels and expert sums of 128 F64 channels for all rows."""
    program = prepared(4)
    moves = facts_of(program.compilation, program.context, program.buckets)["collectives"]
    latents = moves[0]
    assert latents["values"] == ["L0.window_latent"] and latents["operation"] == "gather in global order"
    sent = (latents["bytes_in_per_row"], latents["bytes_out_per_row"], latents["bytes_sent_per_row"])
    assert sent == (64 * 2, 4 * 64 * 2, 3 * 64 * 2)
    sums = [move for move in moves if move["operation"] == "reduce-scatter"]
    assert len(sums) == 10
    assert {(m["bytes_in_per_row"], m["bytes_out_per_row"], m["bytes_sent_per_row"]) for m in sums} == {
        (4 * 128 * 8, 128 * 8, 3 * 128 * 8)
    }
    replicated = prepared(4, sharded=False)
    moves = facts_of(replicated.compilation, replicated.context, replicated.buckets)["collectives"]
    assert {move["operation"] for move in moves} == {"all-reduce"} and len(moves) == 10
    assert {move["bytes_sent_per_row"] for move in moves} == {2 * 128 * 8 * 3 / 4}


def test_the_text_holds_no_name_of_torch() -> None:
    """Other names of values, and another symbol for the rows, leave the text as it is."""
    first, second = export(3), export(3)
    for place, node in enumerate(second.graph.nodes):
        if node.op == "call_function":
            node._rename(f"other_{place}")
    text = describe(first).canonical()
    assert text == describe(second).canonical()
    (symbol,) = {str(n.meta["val"].shape[0]) for n in first.graph.nodes if n.name == "rows_embeds"}
    joined = "\n".join(text)
    assert symbol not in joined.split() and f"[{symbol}" not in joined and "getitem" not in joined
    assert "bf16[r, 128]" in joined and "other_" not in "\n".join(describe(second).annotated())


def test_differences() -> None:
    """What ``place`` does for four ranks, by meaning; and a change that nobody asked for is seen."""
    stages = {}
    source = export(3)
    stages["captured"] = describe(source)
    compiled(4, True, lambda each, compilation: stages.__setitem__(each.name, describe(compilation)), source)
    placed = compare(stages["verify"], stages["place"])
    assert Counter(node.operation for node in placed.added) == {"gather_rows": 6, "reduce_rows": 3}
    assert not placed.removed and not placed.moved
    lines = placed.lines()
    assert any("- latents=L*.window_latent" in line for line in lines)
    assert any("+ latents=L*.gather_rows[0]" in line for line in lines)
    named = compare(stages["captured"], stages["normalise"])
    assert not named.text and {d[0] for change in named.changed for d in change.differences} == {"layer", "role"}
    shapes = compare(stages["place"], stages["propagate"])
    assert ("shapes", "i32[r]", "i32[4*r]") in {d for change in shapes.changed for d in change.differences}
    assert compare(stages["lower"], stages["prove"]).summary() == "nothing"
    broken = export(3)
    collapse = next(node for node in broken.graph.nodes if "mhc_collapse" in str(node.target))
    collapse.args = (*collapse.args[:-1], 0.5)
    changed = compare(stages["captured"], describe(broken))
    assert [change.node.name for change in changed.changed] == ["L0.mhc_collapse"]
    assert changed.changed[0].differences == (("arguments", "epsilon=1e-20", "epsilon=0.5"),)


@torch.no_grad()
def test_the_program_as_python_runs() -> None:
    """Its step computes what the model does, to the bit, hidden rows and state."""
    program = prepared(1)
    compilation = program.compilation
    facts = facts_of(compilation, program.context, program.buckets)
    source = "\n".join(program_text(compilation, facts, "a test"))
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert len(functions) == len(facts["kinds"]) + 1
    model = empty_model(preset("mini"), torch.device("cpu"))
    randomise(model.official_parameters(), seed=0)
    weights = dict(model.body.named_parameters()) | dict(model.body.named_buffers())
    rows, pools, values = 5, {}, {}
    torch.manual_seed(0)
    for name, entry in compilation.inputs.items():
        fake = next(node for node in compilation.graph.nodes if node.name == name).meta["val"]
        if entry.kind is InputKind.POOL:
            pools[entry.path] = torch.zeros(tuple(fake.shape), dtype=fake.dtype)
        elif entry.kind in (InputKind.ROWS, InputKind.WRITES):
            values[entry.path] = torch.zeros(rows, *fake.shape[1:], dtype=fake.dtype)
            if fake.dtype is torch.bfloat16:
                values[entry.path] = torch.randn(rows, *fake.shape[1:]).bfloat16()
    for path in ("rows.positions", "state.write_positions"):
        values[path] = torch.arange(rows, dtype=torch.int32)
    values["rows.live"] = torch.ones(rows, dtype=torch.bool)
    ours, theirs = copy.deepcopy(pools), copy.deepcopy(pools)
    scope: dict[str, object] = {}
    exec(source, scope)
    step = scope["step"]
    assert callable(step)
    actual = step(dict(values), weights, ours)
    feed = weights | values | theirs
    expected = compilation.module(*(feed[entry.path] for entry in compilation.inputs.values()))
    assert len(actual) == len(expected) == 4
    for mine, other in zip(actual, expected, strict=True):
        assert torch.equal(mine, other) and mine.float().abs().sum() > 0
    assert all(torch.equal(ours[path], theirs[path]) for path in pools)
    assert any(not torch.equal(ours[path], pools[path]) for path in pools)


def test_program_text_of_several_ranks() -> None:
    program = prepared(4)
    facts = facts_of(program.compilation, program.context, program.buckets)
    source = "\n".join(program_text(program.compilation, facts, "a test"))
    (step,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "step")
    calls = [node for node in ast.walk(step) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    names = Counter(node.func.attr for node in calls if isinstance(node.func, ast.Attribute))
    assert names == {"gather": 20, "reduce": 10}
    gather = next(s for s in step.body if isinstance(s, ast.Assign) and "ordered=False" in ast.unparse(s))
    assert ast.unparse(gather.targets[0]).count("b['") == 3, "three values travel together"


def test_tables() -> None:
    assert table(("name", "n"), [("a|b", 1), ("c", 20)], right="n") == [
        "| name |   n |",
        "| ---- | --: |",
        "| a\\|b |   1 |",
        "| c    |  20 |",
    ]
    assert table(("name",), []) == ["(none)"]
    assert [size(n) for n in (0, 999, 1000, 123_456, 999_999, 5e9)] == [
        "0 B",
        "999 B",
        "1 KB",
        "123 KB",
        "1 MB",
        "5 GB",
    ]
    assert ranges([7, 1, 0, 2, 2]) == "0-2, 7" and ranges([]) == "-"
