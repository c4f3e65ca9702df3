"""``octavo bench decode`` on a CUDA device: every figure is there, in a process of its own, since a profiler stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.runtime.bench_steps.components import NORMS, OTHER


@pytest.mark.timeout(500)
def test_every_figure_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    code = "import sys; from octavo.runtime.cli import main; sys.argv[0] = 'octavo'; main()"
    command = ["bench", "decode", "--weights", "random", "--preset", "tiny", "--device", "cuda", "--batch", "1,16"]
    options = ["--context", "100", "--ways", "all", "--baselines", "eager", "--repeat", "3", "--json", str(file)]
    done = subprocess.run([sys.executable, "-c", code, *command, *options], capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    assert set(report["capture"]) == {"plain", "inductor"}
    for capture in report["capture"].values():
        assert [bucket["rows"] for bucket in capture["buckets"]] == [16, 1], "the largest first"
        assert capture["seconds"] > 0 and capture["pool_bytes"] > 0
    assert [entry["rows"] for entry in report["steps"]] == [1, 16]
    for entry in report["steps"]:
        ways = {name: way["seconds"] for name, way in entry["ways"].items()}
        assert list(ways) == ["eager", "graphs", "inductor", "both"] and ways["both"] < ways["eager"]
        assert entry["baselines"]["eager"]["times_ours"] > 1, "launches of small operators"
        assert 0 <= entry["segments_idle_share"] <= 1 and entry["kernels"] > entry["launches"] > 0
        assert entry["busy_seconds"] > 0
        for each in entry["components"]:
            assert each["seconds"] > 0 and each["kernels"] > 0, each["component"]
        assert {each["component"] for each in entry["components"] if not each["floor_seconds"]} == {NORMS, OTHER}
        operators = [operator for each in entry["components"] for operator in each["operators"]]
        assert any(operator["compiled"] for operator in operators)
        measured = sum(each["seconds"] for each in entry["components"])
        assert measured == pytest.approx(entry["busy_seconds"], rel=0.5), "the same kernels, called one by one"
