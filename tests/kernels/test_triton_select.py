"""Backend ``triton`` of ``select``, ``select_candidates`` and ``publish`` in Triton's interpreter.

Two of its three pieces of assembly are carried out in torch. Rounding by the hardware needs the GPU:
``tests/gpu/test_triton_select.py``.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.kernels.choice import choose_backends
from octavo.kernels.operator import OPERATORS
from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from octavo.model.presets import preset
from tests.conftest import ReportCount
from tests.kernels.carried_out_ptx import bf16_bits, bf16_values, carried_out, decoded, f32_values
from tests.kernels.run_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter(long_form: bool) -> None:
    assert "publish agrees" in run_interpreted("interpreted_select", long_form)


def test_keys_are_unpacked_exactly_at_every_scale_from_59_to_192(report_count: ReportCount) -> None:
    """The PTX itself: each of the 16 codes in each of the 8 places of a word, the scale an operand of its own."""
    from octavo.kernels.triton_backend import index_products

    words = torch.tensor([code << (4 * place) for code in range(16) for place in range(8)])
    words = words.repeat(256, 1) ^ 0x5A5A5A5A
    scales = torch.arange(256).unsqueeze(1)
    exponent = (scales + 126 - index_products.SHIFT.value).expand_as(words)
    found = carried_out(index_products.UNPACK.value, r8=words, r9=exponent)
    values = torch.stack([bf16_values(found[f"r{n}"]) for n in range(8)], dim=-1)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    exact = slice(59, 193)
    expected = decoded(words, scales)[..., order]
    assert torch.equal(values[exact] * 2.0**index_products.SHIFT.value, expected[exact])
    report_count("keys unpacked by PTX", values.numel())


def test_products_are_weighted_in_bf16() -> None:
    """The PTX itself: clamped at zero, rounded before and after weighting, ties to even."""
    from octavo.kernels.triton_backend import index_products

    random = torch.Generator().manual_seed(0)
    products = torch.randn(2, 4096, generator=random) * 100
    products[:, :3] = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -0.0])
    weights = torch.randn(2, 4096, generator=random).bfloat16()
    found = carried_out(
        index_products.WEIGH.value,
        r2=products[0].view(torch.int32).long() & 0xFFFFFFFF,
        r3=products[1].view(torch.int32).long() & 0xFFFFFFFF,
        r4=bf16_bits(weights[0].float()) | bf16_bits(weights[1].float()) << 16,
    )
    weighted = torch.stack([f32_values(found[name]) for name in ("r0", "r1")])
    assert torch.equal(weighted, (products.clamp_min(0.0).bfloat16() * weights).float())


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
        ("select", "index_topk", 4097),
        ("select_candidates", "candidate_topk_blocks", 8193),
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
