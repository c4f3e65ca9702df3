"""Launches of the products of ``experts`` for few rows: ``expert_few_kernels``, cut as ``expert_tiles`` says."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.kernels.triton_backend.expert_few_kernels import down_and_sum, gate_and_up_few
from octavo.kernels.triton_backend.expert_launches import padded_width, programs, scale_words, words
from octavo.kernels.triton_backend.expert_tiles import FEW, PLACES, FewRows


def multiply_gate_and_up_few(
    form: FewRows,
    rounded: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w1: Tensor,
    s1: Tensor,
    w3: Tensor,
    s3: Tensor,
    limit: float,
) -> Tensor:
    """Hidden rows of the pairs, weighted: [R top_k, I up to 128] BF16 by number of pair; nothing for other ranks'.

    rounded as ``experts.round_inputs`` gives it, chosen [R, top_k] int32 and weights F32 as ``experts.choose`` does;
    matrices [n, I, D/2] packed, scales [n, I, D/32]. Not rounded: ``down_and_sum`` does that.
    """
    rows, top_k = chosen.shape
    resident, inner, channels = w1.shape[0], w1.shape[1], 2 * w1.shape[2]
    padded = padded_width(inner)
    hidden = rounded.new_empty(rows * top_k, padded)
    tasks = min(rows * top_k, resident) * (padded // (PLACES // form.gate_and_up))
    gate_and_up_few[programs(FEW.programs, tasks, hidden.device)](
        rounded,
        words(w1),
        scale_words(s1),
        words(w3),
        scale_words(s3),
        chosen,
        weights,
        hidden,
        limit,
        rows,
        **_cut(form.gate_and_up, top_k, channels, inner),
    )
    return hidden


def multiply_down_and_sum(form: FewRows, hidden: Tensor, chosen: Tensor, w2: Tensor, s2: Tensor) -> Tensor:
    """What the experts give, summed over a row's resident pairs in their order: [R, D] F32.

    hidden as :func:`multiply_gate_and_up_few` gives it; w2 [n, D, I/2] packed, scales [n, D, I/32].
    """
    rows, top_k = chosen.shape
    channels, inner = w2.shape[1], 2 * w2.shape[2]
    sums = torch.empty(rows, channels, dtype=torch.float32, device=hidden.device)
    down_and_sum[(triton.cdiv(channels, PLACES // form.down), rows)](
        hidden,
        words(w2),
        scale_words(s2),
        chosen,
        sums,
        **_cut(form.down, top_k, inner, channels),
    )
    return sums


def _cut(split: int, top_k: int, inputs: int, outputs: int) -> dict[str, int]:
    """What all of these launches are told."""
    return {
        "top_k": top_k,
        "inputs": inputs,
        "outputs": outputs,
        "CHOICES": triton.next_power_of_2(top_k),
        "SPLIT": split,
        "PLACES": PLACES,
        "WARPS": FEW.warps,
        "STAGES": FEW.stages,
        "num_warps": FEW.warps,
        "launch_pdl": True,
    }
