"""The helpers that operators are invariant by: an element's or a row's bits do not depend on what surrounds it.

Operators round most of their results to BF16, which hides a differing last bit of F32; here nothing hides it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import numerics
from tests.conftest import ReportCount
from tests.kernels.calls import same_bits

ELEMENTWISE = (numerics.sigmoid, numerics.silu, numerics.softplus)
CHUNKS = (1, 3, 7, 17, 33)
"""Widths of tails: below, at and beyond a vector register of 4, 8 or 16 F32 values."""


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda function: function.__name__)
def test_an_element_does_not_depend_on_its_place(
    function: Callable[[Tensor], Tensor], report_count: ReportCount
) -> None:
    """Vector body and tail give the same bits; so does a tensor long enough for a second thread."""
    x = 20 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x = torch.cat((x, torch.tensor([0.0, -0.0, 20.0, 88.0, -88.0, 104.0, -104.0, 1e38, -1e38, torch.inf, -torch.inf])))
    torch.set_num_threads(2)
    whole, count = function(x), 0
    torch.set_num_threads(1)
    for width in CHUNKS:
        part = x[-width * 200 :]
        assert same_bits(torch.cat([function(chunk) for chunk in part.split(width)]), whole[-width * 200 :])
        assert same_bits(function(x[width:]), whole[width:])
        count += part.shape[0] + x.shape[0]
    report_count("elements at other places", count, function.__name__)


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda function: function.__name__)
def test_values_of_the_functions(function: Callable[[Tensor], Tensor]) -> None:
    """Against F64. Tolerance 1e-6 relative: three F32 operations; below -80 results are denormal or zero."""
    x = torch.linspace(-80, 100, 1801)
    wide = x.double()
    expected = {
        "sigmoid": torch.sigmoid(wide),
        "silu": torch.nn.functional.silu(wide),
        "softplus": torch.where(wide > 40, wide, torch.log1p(torch.exp(wide))),
    }[function.__name__]
    torch.testing.assert_close(function(x).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", (96, 5120 + 32))
@pytest.mark.parametrize("helper", ("blocked_matmul", "exact_matmul", "mean_of_squares"))
def test_a_row_does_not_depend_on_its_company(helper: str, width: int, report_count: ReportCount) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(61, width, generator=random), torch.randn(24, width, generator=random)

    def apply(rows: Tensor) -> Tensor:
        if helper == "mean_of_squares":
            return numerics.mean_of_squares(rows)
        if helper == "exact_matmul":
            return numerics.exact_matmul(rows.bfloat16(), weight.bfloat16())
        return numerics.blocked_matmul(rows, weight)

    whole, count = apply(x), 0
    for rows in (1, 2, 3, 7, 16, 17, 61):
        for low in (0, 61 - rows):
            assert same_bits(apply(x[low : low + rows]), whole[low : low + rows]), (rows, low)
            assert same_bits(apply(x.t().contiguous().t()[low : low + rows]), whole[low : low + rows]), (rows, low)
            count += 2
    report_count("helpers on chosen rows", count, helper)


def test_exact_products_do_not_depend_on_the_order_of_terms() -> None:
    """Products of E4M3 codes and BF16 values have few enough bits that their F64 sums are exact."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5120, generator=random).to(torch.float8_e4m3fn).float()
    weight = torch.randn(11, 5120, generator=random).bfloat16()
    order = torch.randperm(5120, generator=random)
    assert same_bits(numerics.exact_matmul(x, weight), numerics.exact_matmul(x[:, order], weight[:, order]))


def test_choice_does_not_depend_on_masked_columns() -> None:
    """More entries, all of them invisible, must not change how ties fall: to the lower index."""
    scores = torch.randint(0, 4, (50, 37), generator=torch.Generator().manual_seed(0)).float()
    chosen = numerics.largest(scores, 8)
    masked = torch.cat((scores, torch.full((50, 900), -torch.inf)), dim=1)
    assert torch.equal(numerics.largest(masked, 8), chosen)
    for row, picked in zip(scores.tolist(), chosen.tolist(), strict=True):
        assert picked == sorted(range(37), key=lambda place: (-row[place], place))[:8]
    assert numerics.largest(scores[:, :5], 8).shape == (50, 5)


def test_sums_go_from_left_to_right() -> None:
    """2^24 + 1 + 1 is 2^24 from the left and 2^24 + 2 from the right."""
    terms = [torch.tensor(v) for v in (2.0**24, 1.0, 1.0)]
    assert numerics.sum_in_order(terms).item() == 2.0**24
    assert numerics.sum_in_order(terms[::-1]).item() == 2.0**24 + 2
