"""Mixture of experts with one grouped product for each matrix: cost follows the pairs of row and chosen expert."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.experts import choose_experts, experts, gated, shared_expert
from octavo.kernels.quantise import round_q8
from octavo.kernels.torch_backend.dequantise import bf16_rows, in_bf16
from octavo.kernels.torch_backend.f32_product import f32_product


@experts.implement("torch", dtype=torch.float32)
def _experts(
    x: Tensor,
    live: Tensor,
    image: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    w1: Tensor,
    s1: Tensor,
    w2: Tensor,
    s2: Tensor,
    w3: Tensor,
    s3: Tensor,
    first_expert: int,
    top_k: int,
    route_scale: float,
    limit: float,
) -> Tensor:
    """As the reference, but the sum over experts is F32: [R, D] F32, a partial sum.

    The pairs of row and chosen expert are sorted by resident expert, those of other experts and of dead rows last;
    nothing is computed for the latter. One matrix of all resident experts is dequantised at a time. On CUDA
    ``grouped_mm`` waits for nothing on devices of compute capability 9 and 10 alone.
    """
    logits = f32_product(x, gate)
    chosen, weights = choose_experts(logits, live, image, bias, bias_vl, top_k, route_scale)
    resident = (chosen >= first_expert) & (chosen < first_expert + w1.shape[0])
    numbers = torch.where(resident, chosen - first_expert, w1.shape[0]).int().flatten()
    numbers, pairs = torch.sort(numbers, stable=True)
    every_expert = torch.arange(w1.shape[0], dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(numbers, every_expert, right=True, out_int32=True)

    rows = round_q8(x.contiguous())[pairs // top_k]
    gates = _grouped(rows, bf16_rows(w1, s1), ends)
    hidden = weights.flatten()[pairs].unsqueeze(1) * gated(gates, _grouped(rows, bf16_rows(w3, s3), ends), limit)
    outputs = _grouped(round_q8(hidden.to(x.dtype)), bf16_rows(w2, s2), ends)

    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(pairs.shape[0], device=x.device))
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for place, mine in zip(places.view_as(chosen).unbind(1), resident.unbind(1), strict=True):
        total = total + torch.where(mine.unsqueeze(1), outputs[place].float(), 0.0)
    return total


@shared_expert.implement("torch", compilable=True)
def _shared_expert(
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
    rounded = round_q8(x)
    w1_bf16, w3_bf16 = (None, None) if both_bf16 is None else both_bf16.chunk(2)
    gate, up = torch.mm(rounded, in_bf16(w1, s1, w1_bf16).t()), torch.mm(rounded, in_bf16(w3, s3, w3_bf16).t())
    return torch.mm(round_q8(gated(gate, up, limit).to(x.dtype)), in_bf16(w2, s2, w2_bf16).t())


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows ends[e - 1] .. ends[e] times matrix e: [P, in], [n, out, in], ends [n] int32 -> [P, out], all BF16.

    Rows from ends[n - 1] on hold whatever was in memory.
    """
    return torch.nn.functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
