"""``octavo bench graphs`` on a CUDA device: every figure is there, in a process of its own, since a profiler stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest


def figures(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list):
        for key, member in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from figures(member, f"{path}/{key}")
    else:
        yield path, value


@pytest.mark.timeout(500)
def test_every_figure_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "graphs.json"
    code = "import sys; from octavo.runtime.cli import main; sys.argv[0] = 'octavo'; main()"
    command = ["bench", "graphs", "--weights", "random", "--preset", "tiny", "--device", "cuda", "--rows", "1,16"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--repeat", "3", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    measured = {key: value for key, value in report.items() if key != "environment"}
    assert not [path for path, value in figures(measured) if value is None], done.stdout
    assert [entry["rows"] for entry in report["rows"]] == [1, 16]
    segments = report["program"]["segments"]
    for entry in report["rows"]:
        for name in ("plain", "inductor"):
            for what in ("segments_seconds", "step_seconds"):
                assert all(seconds > 0 for seconds in entry[what][name].values())
            assert 0 <= entry["segments_idle_share"][name] <= 1
            launches = entry["launches"]["segments"][name]
            assert launches["graphs"] == segments < launches["eager"]
        assert entry["launches"]["inputs"] > 0
        assert (entry["launches"]["breaks"] > 0) == (report["program"]["breaks"] > 0)
        compiled = entry["launches"]["segments"]
        assert compiled["inductor"]["eager"] < compiled["plain"]["eager"]
    for capture in report["capture"].values():
        assert [bucket["rows"] for bucket in capture["buckets"]] == [16, 1], "the largest first"
        assert capture["seconds"] > 0 and capture["eager_peak_bytes"] > 0 and capture["pool_bytes"] > 0
    assert report["compile"]["kinds"]
