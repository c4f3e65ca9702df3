"""NVIDIA's memory checker on a small capture and its replays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.timeout(400)
def test_memcheck() -> None:
    """No access out of bounds, in what is captured and in what is called between."""
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    command = [
        SANITIZER,
        "--tool",
        "memcheck",
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
    assert "replayed" in done.stdout and "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
