"""Backend ``triton`` of ``attend`` and ``commit_window`` in Triton's interpreter: what a CPU can tell of it.

Rounding, products of BF16 and the kernel for Hopper need the GPU: ``tests/gpu/test_triton_attend.py``.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.kernels.choice import choose_backends
from octavo.kernels.operator import OPERATORS
from octavo.model.presets import preset
from tests.kernels.run_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter(long_form: bool) -> None:
    assert "rows of ranks, far positions and windows agree" in run_interpreted("interpreted_attend", long_form)


def test_triton_computes_what_it_can_on_cuda() -> None:
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    real = preset("released").text_config
    chosen = choose_backends("fast", "cuda", real)
    assert chosen["attend"] == chosen["commit_window"] == "triton"
    assert choose_backends("fast", "cpu", real)["attend"] == "torch"
    assert choose_backends("reference", "cuda", real)["attend"] == "reference"


def test_a_gpu_older_than_hopper_is_left_to_the_backend_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two by its own capability; the log says it once, not by operator."""
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    capabilities = {"cuda:0": (8, 6), "cuda:1": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    real = preset("released").text_config
    assert choose_backends("fast", "cuda:1", real)["attend"] == "triton"
    assert not caplog.records
    assert "triton" not in choose_backends("fast", "cuda:0", real).values()
    (record,) = caplog.records
    assert "cuda:0 has compute capability 8.6: the backend triton needs 9.0 or newer" in record.getMessage()
    assert choose_backends("fast", "cpu", real)["attend"] == "torch"
    assert len(caplog.records) == 1


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
