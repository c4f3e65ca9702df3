"""Linear layers with weights that stay F8: few rows read them once, many rows multiply by a library's BF16 products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.kernels.linear import grouped_linear, linear_f8, linear_f8_pair
from octavo.kernels.operator import ModelWidths
from octavo.kernels.triton_backend.linear_products import (
    bf16_weight,
    multiply_few,
    multiply_pair_few,
    prepared_rows,
    refuse_large_scales,
    refuse_rows,
)
from octavo.kernels.triton_backend.linear_tiles import choose_launch


def _refuses(widths: ModelWidths) -> str | None:
    if widths.hidden_size % 32:
        return f"hidden_size {widths.hidden_size}: allowed are multiples of 32, the channels of one scale"
    return None


def _refuses_grouped(widths: ModelWidths) -> str | None:
    if widths.head_dim % 4:
        return f"head_dim {widths.head_dim}: allowed are multiples of 4, the weights of a word"
    return None


def _refuses_weights(weights: Mapping[str, Tensor]) -> str | None:
    return refuse_large_scales(
        weights,
        lambda name: (
            not name.endswith((".attn.wo_a", ".engram.embed", ".w1", ".w2", ".w3")) and ".experts." not in name
        ),
    )


def _refuses_weights_of_pair(weights: Mapping[str, Tensor]) -> str | None:
    return refuse_large_scales(weights, lambda name: name.endswith((".attn.wq_a", ".attn.wkv")))


def _refuses_grouped_weights(weights: Mapping[str, Tensor]) -> str | None:
    return refuse_large_scales(weights, lambda name: name.endswith(".attn.wo_a"))


@linear_f8.implement("triton", devices=frozenset({"cuda"}), refuses=_refuses, refuses_weights=_refuses_weights)
def linear_f8_triton(x: Tensor, weight: Tensor, scale: Tensor, weight_bf16: Tensor | None = None) -> Tensor:
    """As the reference on BF16 rows, with F32 sums, but codes of NaN in weights count as 480.

    Scales that weights may have: ``linear_kernels``.
    """
    refuse_rows("linear_f8", x)
    rows, outputs = x.shape[0], weight.shape[0]
    if rows == 0:
        return x.new_empty(0, outputs)
    launch = choose_launch(rows, outputs, weight_bf16 is not None)
    if launch is None:
        rounded = prepared_rows(x, quantised=True, fragments=False)
        return torch.mm(rounded, bf16_weight(weight, scale, weight_bf16).t())
    return multiply_few(launch, x.contiguous(), weight, scale, groups=1, quantised=True)


@linear_f8_pair.implement(
    "triton", devices=frozenset({"cuda"}), refuses=_refuses, refuses_weights=_refuses_weights_of_pair
)
def linear_f8_pair_triton(
    x: Tensor,
    weight_a: Tensor,
    scale_a: Tensor,
    weight_b: Tensor,
    scale_b: Tensor,
    weight_a_bf16: Tensor | None = None,
    weight_b_bf16: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``linear_f8`` by this backend, twice: to the bit where the library multiplies both, or inputs are split alike.

    To 128 rows both weights are read in F8 in one product, held in BF16 or not: two of the library take longer.

    The library gets the rows rounded once and multiplies by one matrix after the other: one product of both would leave
    results whose rows are not contiguous, and each would have to be copied. Whether that would pay was not measured.
    """
    refuse_rows("linear_f8_pair", x)
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight_a.shape[0]), x.new_empty(0, weight_b.shape[0])
    launch = choose_launch(rows, weight_a.shape[0] + weight_b.shape[0])
    if launch is None:
        rounded = prepared_rows(x, quantised=True, fragments=False)
        first = torch.mm(rounded, bf16_weight(weight_a, scale_a, weight_a_bf16).t())
        return first, torch.mm(rounded, bf16_weight(weight_b, scale_b, weight_b_bf16).t())
    return multiply_pair_few(launch, x.contiguous(), weight_a, scale_a, weight_b, scale_b)


@grouped_linear.implement(
    "triton", devices=frozenset({"cuda"}), refuses=_refuses_grouped, refuses_weights=_refuses_grouped_weights
)
def grouped_linear_triton(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int, weight_bf16: Tensor | None = None
) -> Tensor:
    """As the reference on BF16 rows, with F32 sums, but codes of NaN in weights count as 480.

    Scales that weights may have: ``linear_kernels``.
    """
    refuse_rows("grouped_linear", x)
    rows, outputs = x.shape[0], weight.shape[0]
    if rows == 0:
        return x.new_empty(0, outputs)
    launch = choose_launch(rows, outputs, weight_bf16 is not None)
    if launch is not None:
        return multiply_few(launch, x.flatten(1).contiguous(), weight, scale, groups=groups, quantised=False)
    result = x.new_empty(rows, groups, outputs // groups)
    grouped = x.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
    matrices = bf16_weight(weight, scale, weight_bf16).unflatten(0, (groups, -1))
    torch.bmm(grouped, matrices.transpose(1, 2), out=result.transpose(0, 1))
    return result.flatten(1)
