"""What can be known of the Triton kernels of F8 products without a GPU: their indices and sums, how they decode weights
and round rows, and what they refuse. The rest is judged on the device (``tests/gpu/test_triton_linear.py``).
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from octavo.errors import OctavoError
from octavo.kernels.operator import OPERATORS
from octavo.kernels.quantise import e8m0_to_float
from octavo.model.model import empty_model
from octavo.model.presets import preset
from octavo.model.random_weights import randomise
from octavo.runtime.assemble import check_weights
from tests.conftest import ReportCount
from tests.kernels.carried_out_ptx import bf16_values, carried_out
from tests.kernels.run_interpreted import run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import linear_kernels
    from octavo.kernels.triton_backend.linear_tiles import choose_launch, choose_share

MINE = ("linear_f8", "linear_f8_pair", "grouped_linear", "shared_expert")


@pytest.mark.timeout(300)
def test_kernels_agree_with_the_reference_in_the_interpreter(report_count: ReportCount, long_form: bool) -> None:
    printed = run_interpreted("interpreted_linear", long_form)
    assert printed.endswith("weights and rows: as the torch backend's\n")
    report_count("products with F8 weights in the interpreter", printed.count("\n") - 1)


def test_every_code_is_exact_at_every_scale_from_3_to_134(report_count: ReportCount) -> None:
    """The PTX itself, carried out in torch: each code in each place of a word; the code of NaN counts as 480."""
    codes = torch.arange(256)
    words = torch.stack([codes << (8 * place) | 0x5A5A5A5A & ~(255 << (8 * place)) for place in range(4)])
    scales = torch.arange(3, linear_kernels.LARGEST_SCALE + 1)[:, None, None]
    factors = (((scales + 120) << 7) * 0x00010001).expand(-1, 4, 256)
    parts = carried_out(linear_kernels._DECODE.value, r2=words.expand_as(factors), r3=factors)
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    values[127], values[255] = 480.0, -480.0
    for place in range(4):
        half = parts["r0" if place % 2 == 0 else "r1"][:, place] >> (16 * (place // 2))
        expected = values * e8m0_to_float(scales[:, :, 0].to(torch.uint8))
        assert torch.equal(bf16_values(half & 0xFFFF), expected), f"byte {place}"
    report_count("weights decoded by PTX", factors.numel())


def test_inputs_are_split_until_the_device_is_full() -> None:
    for outputs, inputs in ((1280, 5120), (512, 5120), (32768, 1280), (5120, 8192), (33, 160)):
        launch = choose_launch(1, outputs)
        assert launch is not None
        tiles, blocks = -(-outputs // launch.outputs), -(-inputs // 128)
        share = choose_share(launch, tiles, blocks, 132)
        splits = -(-blocks // share)
        assert splits == 1 or tiles * splits <= launch.programs * 132, (outputs, inputs)
        assert splits * share >= blocks > (splits - 1) * share, (outputs, inputs)
        assert share % launch.blocks == 0


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("linear_f8", "layers.2.attn.wq_b.scale"),
        ("linear_f8", "layers.1.engram.wkv.scale"),
        ("linear_f8", "layers.3.attn.wkv.scale"),
        ("linear_f8_pair", "layers.3.attn.wkv.scale"),
        ("linear_f8_pair", "layers.0.attn.wq_a.scale"),
        ("grouped_linear", "layers.3.attn.wo_a.scale"),
        ("shared_expert", "layers.0.ffn.shared_experts.w3.scale"),
    ],
)
def test_scales_without_a_factor_are_refused_after_loading(operator: str, name: str) -> None:
    """By name and byte, of backends that cannot bear them: one, or that of single products and that of pairs."""
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    model = empty_model(preset("mini"), torch.device("cpu"))
    weights = model.official_parameters()
    randomise(weights, 0, experts=model.experts)
    weights[name][1, 1] = linear_kernels.LARGEST_SCALE
    check_weights(model, dict.fromkeys(MINE, "triton"))
    weights[name][1, 1] = linear_kernels.LARGEST_SCALE + 1
    with pytest.raises(OctavoError, match=rf"{operator}, .*{name} has the scale byte 135: .* up to 134.*--numerics"):
        check_weights(model, {operator: "triton"})
    others = {other: "triton" for other in MINE if not {operator, other} <= {"linear_f8", "linear_f8_pair"}}
    check_weights(model, {other: backend for other, backend in others.items() if other != operator})
    check_weights(model, dict.fromkeys(OPERATORS, "reference"))


def test_large_scales_of_each_f8_weight_are_refused_by_its_operators() -> None:
    """One, and of ``wq_a`` and ``wkv``, which may be fused, two. Of Engram tables by none: nothing multiplies by them.
    Routed experts are F4."""
    from octavo.kernels import triton_backend

    assert triton_backend.__all__
    weights = empty_model(preset("mini"), torch.device("meta")).official_parameters()
    f8 = [name.removesuffix(".weight") for name, weight in weights.items() if weight.dtype == torch.float8_e4m3fn]
    table = "layers.1.engram.embed"
    weights[f"{table}.weight"] = torch.empty(1, 32, dtype=torch.float8_e4m3fn)
    good = dict.fromkeys((f"{name}.scale" for name in (*f8, table)), torch.tensor([linear_kernels.LARGEST_SCALE]))
    large = torch.tensor([linear_kernels.LARGEST_SCALE + 1])
    for name in (*f8, table):
        given = weights | good | {f"{name}.scale": large}
        refused = [one for one in MINE if OPERATORS[one].backends["triton"].refuses_weights(given) is not None]
        paired = name.endswith((".attn.wq_a", ".attn.wkv"))
        assert len(refused) == (name != table) + paired, (name, refused)
        assert ("linear_f8_pair" in refused) == paired, (name, refused)
    assert f8 and not any(".ffn.experts." in name for name in f8)
