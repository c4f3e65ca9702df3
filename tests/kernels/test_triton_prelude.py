"""Backend ``triton`` of what stands before the body, and of ``window_latent``, in Triton's interpreter.

Rounding to BF16 and tables in host memory need the GPU: ``tests/gpu/test_triton_prelude.py``.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from octavo.kernels.choice import choose_backends
from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from octavo.model.presets import preset
from tests.kernels.run_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
OPERATORS = ("embed_tokens", "token_classes", "engram_hash", "engram_lookup", "window_latent")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter(long_form: bool) -> None:
    assert run_interpreted("interpreted_prelude", long_form).endswith("latents agree\n")


@pytest.mark.parametrize("config", (preset("released"), preset("mini"), ModelConfig.from_path(nano_path())))
def test_it_is_chosen_for_every_model(config: ModelConfig) -> None:
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    chosen = choose_backends("fast", "cuda", config.text_config)
    assert {chosen[operator] for operator in OPERATORS} == {"triton"}
    assert "triton" not in choose_backends("fast", "cpu", config.text_config).values()
