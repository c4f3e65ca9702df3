"""Linear layers: BF16 products, their sums kept F32 where the model computes in F32."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.linear import grouped_linear, linear, linear_f8, linear_f32
from octavo.kernels.quantise import round_q8
from octavo.kernels.torch_backend.dequantise import in_bf16
from octavo.kernels.torch_backend.f32_product import f32_product


@linear_f8.implement("torch", compilable=True)
def _linear_f8(x: Tensor, weight: Tensor, scale: Tensor, weight_bf16: Tensor | None = None) -> Tensor:
    return torch.mm(round_q8(x), in_bf16(weight, scale, weight_bf16).t())


@linear.implement("torch", compilable=True)
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t())


@linear_f32.implement("torch", compilable=True)
def _linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    return f32_product(x, weight)


@grouped_linear.implement("torch", compilable=True)
def _grouped_linear(x: Tensor, weight: Tensor, scale: Tensor, groups: int, weight_bf16: Tensor | None = None) -> Tensor:
    grouped = x.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
    matrices = in_bf16(weight, scale, weight_bf16).unflatten(0, (groups, -1))
    return torch.bmm(grouped, matrices.transpose(1, 2)).transpose(0, 1).flatten(1).contiguous()
