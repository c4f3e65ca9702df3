"""NVIDIA's checkers on a small capture and its replays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str) -> None:
    """No access out of bounds and no race in shared memory, in what is captured and in what is called between."""
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "tests.gpu.small_capture",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=380, check=False
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this (virtual) device")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards displayed (0 errors"
    assert "replayed" in done.stdout and summary in done.stdout + done.stderr
