"""Linear layers against golden results and exact sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.numerics import blocked_matmul, exact_matmul
from octavo.kernels.quantise import dequantise_f4_rows, dequantise_tiles, round_q8
from tests.kernels.batches import random_batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import EPSILON
from tests.kernels.draw import MINI, WIDE, Draw
from tests.kernels.goldens import mini_weights, tensors

GOLDEN = tensors("kernels")


def test_golden_f8() -> None:
    y = kernels.linear_f8(GOLDEN["fp8_linear.x"], GOLDEN["fp8_linear.weight"], GOLDEN["fp8_linear.scale"])
    assert same_bits(y, GOLDEN["fp8_linear.y"])


def test_golden_f4() -> None:
    """No operator is one F4 product alone; these are the steps that experts take."""
    weight = dequantise_f4_rows(GOLDEN["fp4_linear.weight"], GOLDEN["fp4_linear.scale"])
    assert same_bits(exact_matmul(round_q8(GOLDEN["fp4_linear.x"]), weight).bfloat16(), GOLDEN["fp4_linear.y"])


def test_golden_head() -> None:
    """Logits of all 37 positions of the golden prompt, from the streams that leave the last layer.

    Tolerance 1e-5 at a standard deviation of 3: 128 products are summed in F32, in an order that the platform chooses.
    """
    stage, weights = tensors("prefill_ref"), mini_weights()
    hidden = kernels.mhc_collapse(stage["p37.X.9"], stage["p37.pre.9"], weights["norm.weight"], EPSILON)
    logits = kernels.linear_f32(hidden, weights["head.weight"])
    torch.testing.assert_close(logits, stage["p37.logits"], rtol=0, atol=1e-5)


def test_plain_mode_quantises_nothing() -> None:
    """F32 input: the product with the exactly dequantised weight, rounded once."""
    draw = drawing(torch.float32)
    x, (weight, scale) = draw.rows(WIDE.hidden), draw.tiled(83, WIDE.hidden)
    expected = (x.double() @ dequantise_tiles(weight, scale).double().t()).float()
    assert same_bits(kernels.linear_f8(x, weight, scale), expected)
    assert not torch.equal(kernels.linear_f8(x.bfloat16(), weight, scale).float(), expected.bfloat16().float())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
@pytest.mark.parametrize("rows", (0, 1, 19))
def test_a_pair_is_its_two_products(rows: int, dtype: torch.dtype) -> None:
    """To the bit, in the order of the weights."""
    draw = Draw(random_batch(rows, seed=4), MINI, dtype, seed=7)
    x, first, second = draw.rows(WIDE.hidden), draw.tiled(83, WIDE.hidden), draw.tiled(33, WIDE.hidden)
    results = kernels.linear_f8_pair(x, *first, *second)
    for found, (weight, scale) in zip(results, (first, second), strict=True):
        assert same_bits(found, kernels.linear_f8(x, weight, scale)) and found.is_contiguous()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
def test_unquantised_products_are_rounded_exact_sums(dtype: torch.dtype) -> None:
    """``math.fsum`` is exact; F64 products of BF16 values are too, so one rounding to BF16 has one answer.

    Products of F32 values and BF16 weights are exact in F64 as well, and their sums all but are: a relative error of
    2^-50 meets a rounding boundary of F32 about once in 2^26 values, and these few meet none.
    """
    draw = drawing(dtype)
    x, weight = draw.rows(WIDE.hidden), draw.matrix(7, WIDE.hidden)
    expected = exact(x, weight).to(dtype)
    assert same_bits(kernels.linear(x, weight), expected)


def test_f32_products_stay_near_the_exact_sum() -> None:
    """Error of an F32 dot product of n = 512 terms: at most n x 2^-24 of the sum of magnitudes; in fact far less."""
    draw = drawing(torch.bfloat16)
    x, weight = draw.rows(WIDE.hidden), draw.matrix(7, WIDE.hidden)
    result = kernels.linear_f32(x, weight)
    bound = exact(x.abs(), weight.abs()) * 512 * 2.0**-24
    assert result.dtype == torch.float32
    assert ((result.double() - exact(x, weight)).abs() <= bound).all()


def test_grouped_product_is_one_matrix_for_each_group_of_heads() -> None:
    """The input is not quantised, and group g of consecutive heads meets rows g x rank .. of the weight alone."""
    draw = drawing(torch.bfloat16)
    size = WIDE
    x = draw.rows(size.heads, size.head_dim)
    weight, scale = draw.tiled(size.groups * size.rank, size.heads // size.groups * size.head_dim)
    matrix = dequantise_tiles(weight, scale)
    per_group = size.heads // size.groups
    expected = [
        exact(x[:, g * per_group : (g + 1) * per_group].flatten(1), matrix[g * size.rank : (g + 1) * size.rank])
        for g in range(size.groups)
    ]
    assert same_bits(kernels.grouped_linear(x, weight, scale, size.groups), torch.cat(expected, 1).bfloat16())


def test_blocks_of_rows_do_not_show() -> None:
    """17 rows are two blocks; the second is padded with zeros that must not come back."""
    draw = drawing(torch.float32)
    x, weight = draw.normal(17, MINI.hidden), draw.matrix(5, MINI.hidden, torch.float32)
    result = blocked_matmul(x, weight)
    assert result.shape == (17, 5)
    assert same_bits(result[16:], blocked_matmul(x[16:], weight))


def drawing(dtype: torch.dtype) -> Draw:
    return Draw(random_batch(9, seed=4), MINI, dtype, seed=7)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """x W in F64, every sum rounded once from its exact value."""
    rows = x.double().unsqueeze(1) * weight.double()
    return torch.tensor([[math.fsum(terms) for terms in row] for row in rows.tolist()], dtype=torch.float64)
