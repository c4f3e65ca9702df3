"""Backend ``triton`` of ``attend`` and ``commit_window`` in Triton's interpreter: what a CPU can tell of it.

The interpreter is chosen before Triton is imported, hence a process of its own. Rounding, products of BF16 and the
kernel for Hopper need the GPU: ``tests/gpu/test_triton_attend.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.kernels.choice import choose_backends
from octavo.kernels.operator import OPERATORS
from octavo.model.presets import preset

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


def test_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_attend"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "rows of ranks, far positions and windows agree" in done.stdout


def test_triton_computes_what_it_can_on_cuda() -> None:
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    real = preset("released").text_config
    chosen = choose_backends("fast", "cuda", real)
    assert chosen["attend"] == chosen["commit_window"] == "triton"
    assert choose_backends("fast", "cpu", real)["attend"] == "torch"
    assert choose_backends("reference", "cuda", real)["attend"] == "reference"


@pytest.mark.parametrize("head_dim", (8, 40, 528))
def test_a_model_that_it_refuses_goes_to_another_backend(head_dim: int, caplog: pytest.LogCaptureFixture) -> None:
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    text = preset("released").text_config
    widths: Any = SimpleNamespace(**{name: getattr(text, name) for name in text.__dataclass_fields__})
    widths.head_dim = head_dim
    reason = OPERATORS["attend"].backends["triton"].refuses(widths)
    assert reason is not None and str(head_dim) in reason and "allowed" in reason
    assert choose_backends("fast", "cuda", widths)["attend"] == "torch"
    assert f"attend: backend triton refuses this model: {reason}" in caplog.text
