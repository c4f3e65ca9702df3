"""Every line of the documentation that begins with ``curl`` does what it promises, against a real server."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ReportCount
from tests.server.real_server import QUICK, real_server

PROJECT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/serving.md")
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl_lines(report_count: ReportCount) -> None:
    lines = [
        line
        for document in DOCUMENTS
        for line in (PROJECT / document).read_text(encoding="utf-8").splitlines()
        if line.startswith("curl ")
    ]
    with real_server(*QUICK, "--layers", "2") as server:  # its first layers say nonsense, in the right form
        server.wait_until_ready()
        commands = [ADDRESS.sub(server.url, line) for line in lines]
        with ThreadPoolExecutor(len(commands)) as pool:
            for command, told in zip(commands, pool.map(run, commands), strict=True):
                assert told.returncode == 0 and told.stdout, f"{command}\n{told.returncode} {told.stdout} {told.stderr}"
                assert '"error"' not in told.stdout, told.stdout
    report_count("curl lines of the documentation", len(lines))


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
