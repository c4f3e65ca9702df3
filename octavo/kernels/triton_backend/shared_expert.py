"""The shared expert with weights that stay F8: gate and up in one product, then down."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from octavo.kernels.experts import shared_expert
from octavo.kernels.operator import ModelWidths
from octavo.kernels.triton_backend.linear_products import (
    COLUMNS,
    bf16_weight,
    dequantise_into,
    most_parts,
    multiply_both,
    multiply_prepared,
    padded_width,
    prepare,
    prepared_rows,
    refuse_large_scales,
    refuse_rows,
)
from octavo.kernels.triton_backend.linear_steps import gate_parts
from octavo.kernels.triton_backend.linear_tiles import choose_launch, choose_launch_of_two

_FEW_COLUMNS = 256
"""Of a program where there are few rows, so that many programs share the work."""


def _refuses(widths: ModelWidths) -> str | None:
    for name, width in (
        ("hidden_size", widths.hidden_size),
        ("moe_intermediate_size", widths.moe_intermediate_size),
    ):
        if width % 32:
            return f"{name} {width}: allowed are multiples of 32, the channels of one scale"
    return None


def _refuses_weights(weights: Mapping[str, Tensor]) -> str | None:
    return refuse_large_scales(weights, lambda name: ".ffn.shared_experts." in name)


@shared_expert.implement("triton", devices=frozenset({"cuda"}), refuses=_refuses, refuses_weights=_refuses_weights)
def shared_expert_triton(
    x: Tensor,
    w1: Tensor,
    s1: Tensor,
    w2: Tensor,
    s2: Tensor,
    w3: Tensor,
    s3: Tensor,
    limit: float,
    both_bf16: Tensor | None = None,
    w2_bf16: Tensor | None = None,
) -> Tensor:
    """As the reference on BF16 rows, with F32 sums, but codes of NaN in weights count as 480.

    Scales that weights may have: ``linear_kernels``.
    """
    refuse_rows("shared_expert", x)
    rows, inner = x.shape[0], w1.shape[0]
    if rows == 0:
        return x.new_empty(x.shape)
    both, down = choose_launch_of_two(rows, both_bf16 is not None), choose_launch(rows, x.shape[1], w2_bf16 is not None)
    if both is None or down is None:
        if both_bf16 is None:
            both_bf16 = x.new_empty(2 * inner, x.shape[1])
            dequantise_into(both_bf16[:inner], w1, s1)
            dequantise_into(both_bf16[inner:], w3, s3)
        products = torch.mm(prepared_rows(x, quantised=True, fragments=False), both_bf16.t())
        return torch.mm(_hidden(products.view(1, rows, 2, inner), limit, False), bf16_weight(w2, s2, w2_bf16).t())
    source, kind = prepare(both, x.contiguous(), quantised=True)
    parts = multiply_both(both, source, kind, w1, s1, w3, s3)
    return multiply_prepared(down, _hidden(parts, limit, True), "prepared", w2, s2, groups=1)


def _hidden(parts: Tensor, limit: float, fragments: bool) -> Tensor:
    """parts [splits, R, 2, I] F32 or BF16 -> rounded hidden rows [R, I] BF16, or [R, I up to 128] in fragment order."""
    splits, rows, _, inner = parts.shape
    padded = padded_width(inner) if fragments else inner
    hidden = parts.new_empty(rows, padded, dtype=torch.bfloat16)
    columns = min(_FEW_COLUMNS if fragments else COLUMNS, triton.next_power_of_2(padded))
    gate_parts[(rows, triton.cdiv(padded, columns))](
        parts,
        hidden,
        limit,
        splits,
        rows,
        inner,
        padded,
        MOST=most_parts(splits),
        FRAGMENTS=fragments,
        COLUMNS=columns,
        launch_pdl=True,
    )
    return hidden
