"""Load layers of a checkpoint in a process of its own and report what that took.

As a program it prints JSON: ``python -m tests.peak_memory CHECKPOINT FIRST_LAYER LAST_LAYER EXPERTS``. Memory is what
``/proc`` says, in bytes; ``maximum`` counts everything from the moment after the imports: config, index, headers,
parameters, copying.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from octavo.model.checkpoint import Checkpoint
from octavo.model.loading import load_parameters
from tests.checkpoint_files import parameter_tensors

PROJECT = Path(__file__).parents[1]


def load_in_subprocess(path: Path, first: int, last: int, experts: int) -> dict[str, Any]:
    """Run this file and return its report."""
    command = [sys.executable, "-m", "tests.peak_memory", str(path), str(first), str(last), str(experts)]
    finished = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


def status(key: str) -> int:
    """``VmRSS`` or its maximum so far, ``VmHWM``: unlike getrusage's, that one is not inherited from the parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main(path: Path, first: int, last: int, experts: int) -> None:
    before = status("VmRSS")
    started = time.monotonic()
    checkpoint = Checkpoint(path)
    layers = {str(layer) for layer in range(first, last + 1)}
    parameters = parameter_tensors(
        checkpoint.config,
        lambda name: (match := re.match(r"layers\.(\d+)\.", name)) is not None and match[1] in layers,
        experts=range(experts),
    )
    load_parameters(parameters, checkpoint, experts=range(experts))
    engram_rows = []
    for layer in range(first, last + 1):
        if layer in checkpoint.config.text_config.engram_layer_ids:
            weight, scale = checkpoint.engram_table(layer)
            engram_rows.append(len(weight))
            # Read rows all over the table, as a gather does.
            step = max(1, len(weight) // 1000)
            weight[::step].clone()
            scale[::step].clone()
    report = {
        "resident": sum(tensor.nbytes for tensor in parameters.values()),
        "maximum": status("VmHWM") - before,
        "files_opened": checkpoint.files_opened,
        "engram_rows": engram_rows,
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:]))
