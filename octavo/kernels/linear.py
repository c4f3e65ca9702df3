"""Linear layers by weight class (spec/model.md 3.0): F8 tiles, BF16, F32 and the grouped output projection.

In BF16 numerics an F8 weight takes a Q8-quantised input; the other classes take the input as it is. In F32
numerics (mode ``plain``) nothing is quantised and weights are dequantised exactly.

A weight may be given once more in BF16, which is exact: a backend that multiplies in BF16 then need not convert it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.numerics import blocked_matmul, exact_matmul
from octavo.kernels.operator import CARRIED, Need, operator
from octavo.kernels.quantise import dequantise_tiles, round_q8


@operator(
    arguments={"x": Need.ROWS, "weight": Need.ANY, "scale": Need.ANY, "weight_bf16": Need.ANY},
    results=(CARRIED,),
    source="spec/model.md 3.0",
)
def linear_f8(x: Tensor, weight: Tensor, scale: Tensor, weight_bf16: Tensor | None = None) -> Tensor:
    """y = Q8(x) W: x [R, in] BF16 or F32, weight [out, in] E4M3, scale [ceil(out/32), ceil(in/32)] uint8 -> [R, out].

    ``weight_bf16`` is the scaled weight, [out, in] BF16. The result has x's dtype. The input is quantised per 32
    channels, unless it is F32.
    """
    return exact_matmul(round_q8(x), dequantise_tiles(weight, scale)).to(x.dtype)


@linear_f8.fake
def _linear_f8(x: Tensor, weight: Tensor, scale: Tensor, weight_bf16: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator(
    arguments={
        "x": Need.ROWS,
        "weight_a": Need.ANY,
        "scale_a": Need.ANY,
        "weight_b": Need.ANY,
        "scale_b": Need.ANY,
        "weight_a_bf16": Need.ANY,
        "weight_b_bf16": Need.ANY,
    },
    results=(CARRIED, CARRIED),
    source="spec/model.md 3.0, 3.3",
)
def linear_f8_pair(
    x: Tensor,
    weight_a: Tensor,
    scale_a: Tensor,
    weight_b: Tensor,
    scale_b: Tensor,
    weight_a_bf16: Tensor | None = None,
    weight_b_bf16: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Two F8 linears of the same rows: ``linear_f8`` of x [R, in] by weights [out_a, in] and [out_b, in] with their
    scales -> [R, out_a] and [R, out_b], both in x's dtype."""
    return linear_f8.reference(x, weight_a, scale_a), linear_f8.reference(x, weight_b, scale_b)


@linear_f8_pair.fake
def _linear_f8_pair(
    x: Tensor,
    weight_a: Tensor,
    scale_a: Tensor,
    weight_b: Tensor,
    scale_b: Tensor,
    weight_a_bf16: Tensor | None = None,
    weight_b_bf16: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _linear_f8(x, weight_a, scale_a), _linear_f8(x, weight_b, scale_b)


@operator(arguments={"x": Need.ROWS, "weight": Need.ANY}, results=(CARRIED,), source="spec/model.md 3.0")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W without quantisation: x [R, in] BF16 or F32, weight [out, in] BF16 -> [R, out] in x's dtype."""
    return exact_matmul(x, weight).to(x.dtype)


@linear.fake
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator(arguments={"x": Need.ROWS, "weight": Need.ANY}, results=(CARRIED,), source="spec/model.md 3.1, 3.6")
def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W in F32: x [R, in] BF16 or F32, weight [out, in] BF16 or F32 -> [R, out] F32.

    For the products that the model does in F32: head and ratio-2 compressor, both stored BF16.
    """
    return blocked_matmul(x.float(), weight.float())


@linear_f32.fake
def _linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@operator(
    arguments={"x": Need.ROWS, "weight": Need.ANY, "scale": Need.ANY, "weight_bf16": Need.ANY},
    results=(CARRIED,),
    source="spec/model.md 3.9",
)
def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor, groups: int, weight_bf16: Tensor | None = None) -> Tensor:
    """First half of the output projection: group g of heads through its own matrix, unquantised input.

    x [R, H, head_dim], weight [groups * rank, H / groups * head_dim] E4M3, scale per 32 x 32 tile uint8;
    ``weight_bf16`` the scaled weight -> [R, groups * rank] in x's dtype.
    """
    grouped = x.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
    matrices = dequantise_tiles(weight, scale).unflatten(0, (groups, -1))
    return exact_matmul(grouped, matrices).transpose(0, 1).flatten(1).to(x.dtype)


@grouped_linear.fake
def _grouped_linear(x: Tensor, weight: Tensor, scale: Tensor, groups: int, weight_bf16: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
