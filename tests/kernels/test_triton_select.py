"""Backend ``triton`` of ``select``, ``select_candidates`` and ``publish`` in Triton's interpreter.

The interpreter is chosen before Triton is imported, hence a process of its own. Rounding and assembly need the GPU:
``tests/gpu/test_triton_select.py``.
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
from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from octavo.model.presets import preset

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_select"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "publish agrees" in done.stdout


@pytest.mark.parametrize("config", (preset("released"), preset("mini"), ModelConfig.from_path(nano_path())))
def test_models_that_it_computes(config: ModelConfig) -> None:
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    chosen = choose_backends("fast", "cuda", config.text_config)
    assert {chosen[operator] for operator in ("select", "select_candidates", "publish")} == {"triton"}


@pytest.mark.parametrize(
    ("operator", "width", "value"),
    (
        ("select", "index_n_heads", 48),
        ("select_candidates", "index_head_dim", 160),
        ("select_candidates", "index_head_dim", 48),
        ("select_candidates", "candidate_block_size", 12),
        ("publish", "head_dim", 1024),
        ("publish", "index_head_dim", 48),
    ),
)
def test_models_that_it_refuses(operator: str, width: str, value: int) -> None:
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    text = preset("released").text_config
    widths: Any = SimpleNamespace(**{name: getattr(text, name) for name in text.__dataclass_fields__})
    setattr(widths, width, value)
    reason = OPERATORS[operator].backends["triton"].refuses(widths)
    assert reason is not None and f"{width} {value}" in reason and "allowed" in reason
    assert choose_backends("fast", "cuda", widths)[operator] == "torch"
