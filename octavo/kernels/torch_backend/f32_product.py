"""The product that the model does in F32 with weights stored BF16: head, router, ratio-2 compressor."""

from __future__ import annotations

import torch
from torch import Tensor


def f32_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` with F32 sums: x [R, K] BF16 or F32, weight [N, K] BF16 or F32 -> [R, N] F32.

    Products of two BF16 values are exact in F32, so on CUDA tensor cores multiply what is stored. They cut off what a
    sum cannot hold: sums of 5120 products were off by 6e-6 on an H200. The CPU has no such product with an F32 result.
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weight.float().t())
