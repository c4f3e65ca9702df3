"""What can be known of the Triton kernels of ``experts`` without a GPU: their indices, orders and sums, and how they
decode weights.

Products on tensor cores, rounding to BF16 by the hardware and the router's logarithms are judged on the device
(``tests/gpu/test_triton_experts.py``).
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from octavo.errors import OctavoError
from octavo.kernels.operator import OPERATORS
from octavo.model.model import empty_model
from octavo.model.presets import preset
from octavo.model.random_weights import randomise
from octavo.runtime.assemble import check_weights
from tests.conftest import ReportCount
from tests.kernels.carried_out_ptx import bf16_values, carried_out, decoded
from tests.kernels.run_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import expert_products
    from octavo.kernels.triton_backend.expert_few_kernels import COLUMNS
    from octavo.kernels.triton_backend.expert_tiles import (
        FEW_ROWS,
        NARROW,
        TILES,
        WIDE_TILES,
        Wide,
        choose_few,
        choose_tiles,
    )


@pytest.mark.timeout(300)
def test_kernels_agree_with_the_reference_in_the_interpreter(report_count: ReportCount, long_form: bool) -> None:
    """Rounding, routing and order to the bit, results as near as truncation lets them be."""
    printed = run_interpreted("interpreted_experts", long_form)
    assert printed.endswith("ties: lower numbers first\n")
    report_count("steps of experts in the interpreter", printed.count("\n"))


def test_every_code_is_exact_at_every_scale_from_59_to_192(report_count: ReportCount) -> None:
    """The PTX itself, carried out in torch: each of the 16 codes in each of the 8 places of a word."""
    words = torch.tensor([code << (4 * place) for code in range(16) for place in range(8)])
    words = words.repeat(256, 1) ^ 0x5A5A5A5A
    scales = torch.arange(256).unsqueeze(1)
    factors = ((scales + 62).clamp_max(255) << 7) * 0x00010001
    parts = carried_out(expert_products.DECODE.value, r4=words, r5=factors.expand_as(words))
    found = torch.empty(256, 128, 8)
    for n in range(4):
        found[..., n], found[..., n + 4] = bf16_values(parts[f"r{n}"] & 0xFFFF), bf16_values(parts[f"r{n}"] >> 16)
    expected = decoded(words, scales)
    largest = expert_products.LARGEST_SCALE
    exact = slice(59, largest + 1)
    assert torch.equal(found[exact] * 2.0**64, expected[exact])
    assert not found[largest + 1 :].isfinite().all(-1).any(), "larger scales give no finite number"
    small = slice(0, 59)
    assert ((found[small] * 2.0**64 - expected[small]).abs() <= 2.0**-68).all()
    report_count("weights decoded by PTX", found.numel())


def test_tiles_follow_the_rows_of_an_expert() -> None:
    """Few rows: one small tile an expert; many: large ones. Where a kernel takes no such width or device: another."""
    steps = (1, 128, 512, 1024, 2048, 4096, 8192, 16384)
    narrow_alone = (8, 8, 16, 32, 64, 64, 128, 128)
    for widths, hopper, expected in (
        ((5120, 2304), True, (8, 8, 16, 64, 64, 64, 128, 128)),
        ((5120, 2304), False, narrow_alone),
        ((5120, 2176), True, narrow_alone),
        ((5248, 2304), True, narrow_alone),
        ((5120, 2272), True, (16, 16, 16, 32, 64, 64, 128, 128)),
    ):
        tiles = [choose_tiles(rows, 6, 384, widths, hopper) for rows in steps]
        assert tuple(tile.rows for tile in tiles) == expected
        assert any(isinstance(tile, Wide) for tile in tiles) == (widths == (5120, 2304) and hopper)
    assert all(tile.rows == rows for rows, tile in TILES.items())
    assert [most for most, _ in NARROW] == sorted(most for most, _ in NARROW)
    assert [most for most, _ in WIDE_TILES] == sorted(most for most, _ in WIDE_TILES)


def test_few_rows_fit_the_columns_of_their_tiles() -> None:
    """The fewer rows, the more parts."""
    assert [form.rows for form in FEW_ROWS] == sorted(form.rows for form in FEW_ROWS)
    for form in FEW_ROWS:
        assert form.rows * form.gate_and_up <= COLUMNS.value
        assert choose_few(form.rows) is form
    assert choose_few(FEW_ROWS[-1].rows + 1) is None


def test_scales_that_would_give_infinities_are_refused_after_loading() -> None:
    """By name and byte, of the backend that cannot bear them alone."""
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    model = empty_model(preset("mini"), torch.device("cpu"))
    weights = model.official_parameters()
    randomise(weights, 0, experts=model.experts)
    check_weights(model, {"experts": "triton"})
    name = "layers.3.ffn.experts.w2.scale"
    weights[name][1, 5, 0] = expert_products.LARGEST_SCALE
    check_weights(model, {"experts": "triton"})
    weights[name][1, 5, 0] = expert_products.LARGEST_SCALE + 1
    with pytest.raises(OctavoError, match=rf"{name} has the scale byte 193: .* up to 192.*--numerics reference"):
        check_weights(model, {"experts": "triton"})
    check_weights(model, dict.fromkeys(OPERATORS, "reference"))
