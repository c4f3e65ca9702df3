"""The quantised formats against the golden bytes, and against their definition over every BF16 value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import quantise
from tests.conftest import ReportCount
from tests.kernels.calls import bits, same_bits
from tests.kernels.goldens import description, tensors

GOLDEN = tensors("quantisers")
LABELS = description("quantisers")["row_labels"]
E4M3 = torch.float8_e4m3fn
Pair = tuple[Tensor, Tensor]
FORMATS = {
    "q8": (quantise.quantise_q8, quantise.dequantise_q8, quantise.round_q8, "q8.codes"),
    "q4mx": (quantise.quantise_q4mx, quantise.dequantise_q4mx, quantise.round_q4mx, "q4mx.packed"),
    "q4nv": (quantise.quantise_q4nv, quantise.dequantise_q4nv, quantise.round_q4nv, "q4nv.packed"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_golden_codes_scales_and_values(name: str, report_count: ReportCount) -> None:
    """55 rows of ties, floors, saturation and extremes, to the bit. The row "bf16 max" is infinite in BF16."""
    quantiser, dequantiser, through, codes_name = FORMATS[name]
    x = GOLDEN["input"]
    codes, scale = quantiser(x)
    stored = quantise.pack_codes(codes) if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    assert wrong_rows(stored, GOLDEN[codes_name]) == []
    assert wrong_rows(scale.view(torch.uint8), GOLDEN[f"{name}.scales"]) == []
    assert wrong_rows(dequantiser(codes, scale).bfloat16(), GOLDEN[f"{name}.dequant"]) == []
    assert wrong_rows(through(x), GOLDEN[f"{name}.dequant"]) == []
    report_count("golden quantised values", x.numel(), name)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_leaves_f32_alone(name: str) -> None:
    """F32 activations are mode ``plain``: nothing is quantised there."""
    x = GOLDEN["input"].float() * 1.001
    assert same_bits(FORMATS[name][2](x), x)


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_are_free(name: str) -> None:
    x = GOLDEN["input"][:54]
    assert same_bits(FORMATS[name][2](x.view(6, 9, 64)), FORMATS[name][2](x).view(6, 9, 64))
    assert FORMATS[name][2](x[:0]).shape == (0, 64)


def test_golden_tables() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    one = torch.full((256, 1), 127, dtype=torch.uint8)
    assert same_bits(quantise.dequantise_tiles(every_byte.view(E4M3).view(256, 1), one[:8]).squeeze(1), table("e4m3"))
    assert same_bits(quantise.e2m1_to_float(every_byte[:16]), table("e2m1"))
    assert same_bits(quantise.e8m0_to_float(every_byte), table("e8m0"))


def test_golden_dequantised_weights() -> None:
    """A ragged matrix of tiles, a row-scaled matrix (Engram tables) and all 256 bytes of packed codes."""
    tiles = quantise.dequantise_tiles(GOLDEN["dequant_tile.codes"].view(E4M3), GOLDEN["dequant_tile.scales"])
    assert same_bits(tiles, GOLDEN["dequant_tile.expected"])
    rows = quantise.dequantise_q8(GOLDEN["dequant_row.codes"].view(E4M3), GOLDEN["dequant_row.scales"])
    assert same_bits(rows, GOLDEN["dequant_row.expected"])
    packed = quantise.dequantise_f4_rows(GOLDEN["dequant_fp4.packed"], GOLDEN["dequant_fp4.scales"])
    assert same_bits(packed, GOLDEN["dequant_fp4.expected"])
    assert GOLDEN["dequant_fp4.packed"].unique().numel() == 256


@pytest.mark.parametrize(
    "probe", description("quantisers")["real_checkpoint_probes"], ids=lambda probe: probe["tensor"]
)
def test_bytes_of_the_released_checkpoint(probe: dict[str, str]) -> None:
    """Bytes of the released files mean the values that its publishers name: the byte order is the right one."""
    expected = torch.tensor(probe["values"])
    scale = torch.tensor([[int(probe["scale_byte"], 16)]], dtype=torch.uint8)
    if "codes_hex" in probe:
        codes = torch.frombuffer(bytearray.fromhex(probe["codes_hex"]), dtype=torch.uint8)
        values = quantise.dequantise_tiles(codes.view(1, 32).view(E4M3), scale)
    else:
        packed = torch.frombuffer(bytearray.fromhex(probe["packed_hex"]), dtype=torch.uint8)
        values = quantise.e2m1_to_float(quantise.unpack_codes(packed)) * quantise.e8m0_to_float(scale)
    assert same_bits(values.view(-1), expected)


def test_packing_is_invertible() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert same_bits(quantise.pack_codes(quantise.unpack_codes(every_byte)), every_byte)
    assert quantise.unpack_codes(torch.tensor([0xA3], dtype=torch.uint8)).tolist() == [0x3, 0xA]


@pytest.mark.parametrize(
    ("quantiser", "group", "largest"),
    [(quantise.quantise_q8, 32, 448.0), (quantise.quantise_q4mx, 32, 6.0), (quantise.quantise_q4nv, 16, 6.0)],
    ids=FORMATS,
)
def test_codes_are_the_nearest_ones(
    quantiser: Callable[[Tensor], Pair], group: int, largest: float, report_count: ReportCount
) -> None:
    """Every BF16 value up to the largest code, in groups whose scale is one: nearest code, ties to the even one."""
    x = every_finite_bf16()
    x = x[x.abs() <= largest]
    x = torch.nn.functional.pad(x, (0, -x.shape[0] % (group - 1))).view(-1, group - 1)
    x = torch.cat((torch.full_like(x[:, :1], largest), x), dim=1)
    codes, scale = quantiser(x)
    if scale.dtype == torch.uint8:
        assert set(scale.flatten().tolist()) == {127}
    else:
        assert set(scale.float().flatten().tolist()) == {1.0}
    values = table("e4m3")[:127] if codes.dtype == E4M3 else table("e2m1")[:8]
    magnitudes, sign = bits_of_codes(codes)
    assert torch.equal(magnitudes, nearest(x.abs(), values))
    assert torch.equal(sign, torch.signbit(x))
    report_count("values against the nearest code", x.numel(), "every BF16 value in range")


@pytest.mark.parametrize(("name", "limit"), [("q8", 448.0), ("q4mx", 6.0)])
def test_scale_is_the_next_power_of_two(name: str, limit: float, report_count: ReportCount) -> None:
    """Every positive BF16 amax: 2^ceil(log2(amax x F32(1 / limit))), from the exponent and mantissa of the product."""
    amax = every_finite_bf16()
    amax = amax[amax > 0]
    x = torch.zeros(amax.shape[0], 32, dtype=torch.bfloat16)
    x[:, 7] = -amax
    _, scale = FORMATS[name][0](x)
    floor = 1e-4 if name == "q8" else 6.0 * 2.0**-126
    product = amax.float().clamp_min(floor) * torch.tensor(1.0 / limit)
    mantissa, exponent = torch.frexp(product.double())
    assert torch.equal(scale[:, 0].int() - 127, torch.where(mantissa == 0.5, exponent - 1, exponent))
    report_count("scales against the definition", amax.numel(), f"{name}, every positive BF16 value")


def test_a_group_with_nan_or_infinity_stays_in_its_group() -> None:
    """Dead rows may hold anything; neighbours in the same row keep their values."""
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    clean = {name: through(x) for name, (_, _, through, _) in FORMATS.items()}
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    for name, (_, _, through, _) in FORMATS.items():
        assert same_bits(through(x)[:, 32:], clean[name][:, 32:]), name


def table(name: str) -> Tensor:
    return GOLDEN[f"table.{name}"]


def wrong_rows(actual: Tensor, expected: Tensor) -> list[str]:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return [label for label, wrong in zip(LABELS, (bits(actual) != bits(expected)).any(1), strict=True) if wrong]


def every_finite_bf16() -> Tensor:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def bits_of_codes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """(magnitude code, sign)."""
    if codes.dtype == E4M3:
        codes = codes.view(torch.uint8)
        return (codes & 127).long(), codes >= 128
    return (codes & 7).long(), codes >= 8


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Place of the value nearest to each x, both exact in F64; halfway between two, the even place."""
    values = values.double()
    above = torch.searchsorted(values, x.double()).clamp_max(values.shape[0] - 1)
    below = (above - 1).clamp_min(0)
    up, down = values[above] - x.double(), x.double() - values[below]
    tie = torch.where(above % 2 == 0, above, below)
    return torch.where(up == down, tie, torch.where(up < down, above, below))
