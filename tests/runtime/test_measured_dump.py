"""The dump of an engine tells what its start measured, and two starts differ in nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from octavo import Engine, EngineConfig
from octavo.graphs.dump_diff import compare_dumps
from octavo.graphs.inductor import CompiledKind, CompiledRegions
from octavo.graphs.regions import find_regions
from octavo.passes.lower import Instruction
from octavo.runtime import program_start
from tests.model.mini_run import MINI

PARTS = ("prelude", "body", "epilogue")


def start(dump: Path, compiler: str) -> dict[str, Any]:
    """Start and close an engine of one layer -> what it measured, by part."""
    settings = {"numerics": "fast", "compile": compiler, "layers": 1, "buckets": "1,8", "chunk": 8}
    sizes = {"device": "cpu", "kv_tokens": 256, "max_requests": 2}
    with Engine(EngineConfig(model=MINI, dump_dir=dump, **settings, **sizes)):  # type: ignore[arg-type]
        pass
    return {part: json.loads((dump / part / "measured.json").read_text()) for part in PARTS}


def read_reports(dump: Path) -> dict[str, Any]:
    return {part: json.loads((dump / part / "report.json").read_text()) for part in PARTS}


def slower_each_time() -> Callable[..., CompiledRegions]:
    """In the place of compiling, which takes seconds a kind: each call takes other seconds, later ones find a cache."""
    counter = itertools.count(1)

    def compile_nothing(instructions: Iterable[Instruction], **_: object) -> CompiledRegions:
        seconds = next(counter)
        kinds = [
            CompiledKind(region.name, region.text, len(region.nodes), seconds, cached=seconds > len(PARTS))
            for region in find_regions(instructions)
        ]
        return CompiledRegions({}, tuple(kinds), seconds, casts_survive=True)

    return compile_nothing


def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_start, "compile_regions", slower_each_time())
    dumps = tmp_path / "first", tmp_path / "second"
    first, second = (start(dump, "inductor") for dump in dumps)
    reports = read_reports(dumps[0])
    assert reports == read_reports(dumps[1]) and compare_dumps(*dumps) == []
    for place, part in enumerate(PARTS):
        title, regions = reports[part]["title"], reports[part]["regions"]
        assert len(title) == 2 and title[1].startswith("compile inductor, torch ")
        for seconds, measured in ((1 + place, first[part]), (4 + place, second[part])):
            assert measured["captures"] == [] and measured["regions"]["seconds"] == seconds
            assert measured["regions"]["kinds"] == [
                {"name": r["name"], "count": r["count"], "seconds": seconds, "cached": seconds > 3, "text": r["text"]}
                for r in regions
            ]
    assert len(reports["body"]["regions"]) > 10 and not reports["prelude"]["regions"]
    timings = json.loads((dumps[0] / "body" / "timings.json").read_text())
    assert {"export", "passes and proof", "compilation"} <= timings.keys() and timings["compilation"] == 2
    page = (dumps[1] / "body" / "regions.md").read_text()
    count = len(reports["body"]["regions"])
    assert f"compiled in 5.0 s; {count} of the kinds came from Inductor's cache" in page
    assert "no operator here has a backend" in (dumps[1] / "prelude" / "regions.md").read_text()


def test_not_compiled(tmp_path: Path) -> None:
    measured = start(tmp_path, "none")
    assert [measured[part]["regions"] for part in PARTS] == [None] * 3
    assert "Nothing is compiled" in (tmp_path / "body" / "regions.md").read_text()
    assert "Nothing is captured" in (tmp_path / "body" / "buckets.md").read_text()
    assert "compile none, torch " in (tmp_path / "index.md").read_text()
    assert read_reports(tmp_path)["body"]["regions"]


def test_regions_serve_steps_beyond_the_largest_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed by the same kernels, which hold for so many rows only."""
    asked: list[object] = []
    compile_nothing = slower_each_time()

    def remember(instructions: Iterable[Instruction], *, device: str, largest_rows: int) -> CompiledRegions:
        asked.append(largest_rows)
        return compile_nothing(instructions)

    monkeypatch.setattr(program_start, "compile_regions", remember)
    sizes = {"device": "cpu", "kv_tokens": 256, "max_requests": 2, "chunk": 64}
    with Engine(EngineConfig(model=MINI, numerics="fast", compile="inductor", layers=1, buckets="1,8", **sizes)):  # type: ignore[arg-type]
        pass
    assert asked == [64, 64, 128], "prelude, body, and the head's rows"
