"""Mixing coefficients of the residual streams: one pass over the streams, and a small kernel that finishes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.kernels.mhc import mhc_mix
from octavo.kernels.triton_backend.mhc_kernels import finish_mix, multiply_streams
from octavo.kernels.triton_backend.mhc_tuning import choose_mix_form, steps_of_part

_SUMS_OF_A_PROGRAM = 32
"""Of each coefficient: the parts of a row, of as many rows as make up so many."""
_SUMS_OF_A_WARP = 128
"""More parts of one row are added by four warps. With fewer, Triton 3.6 would deal out a matrix of Sinkhorn's to four
warps as well, which is slow and was seen to go wrong."""
_STREAMS_OF_WARPS = (4, 8)
"""With which each of four warps holds such a matrix whole. Of others, five for instance, Triton deals it out however
many the parts are: one warp adds them all."""


@mhc_mix.implement("triton", devices=frozenset({"cuda"}))
def mhc_mix_triton(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference; streams are BF16. The matrix counts with all its bits: only sums are rounded."""
    if streams.dtype != torch.bfloat16:
        raise TypeError(
            f"mhc_mix, backend triton: streams are {streams.dtype}; allowed: torch.bfloat16. Use numerics reference."
        )
    return run(streams, fn, scale, base, iterations, epsilon, norm_epsilon)


def run(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, whatever the dtype: Triton's interpreter has no products of BF16."""
    rows, count, width = streams.shape
    pre, post = (torch.empty(rows, count, dtype=torch.float32, device=streams.device) for _ in range(2))
    comb = torch.empty(rows, count, count, dtype=torch.float32, device=streams.device)
    if rows == 0:
        return pre, post, comb
    channels, mixes = count * width, (2 + count) * count
    form = choose_mix_form(rows)
    steps = steps_of_part(form, rows, channels)
    parts = triton.cdiv(channels, steps * form.channels)
    padded = max(16, triton.next_power_of_2(mixes))
    sums = torch.empty(parts, rows, padded, dtype=torch.float32, device=streams.device)
    squares = torch.empty(parts, rows, dtype=torch.float32, device=streams.device)
    multiply_streams[(parts, triton.cdiv(rows, form.rows))](
        streams.contiguous(),
        fn.contiguous(),
        sums,
        squares,
        rows,
        steps,
        channels=channels,
        mixes=mixes,
        ROWS=form.rows,
        MIXES=padded,
        CHANNELS=form.channels,
        STAGES=form.stages,
        num_warps=form.warps,
    )
    together, parts_at_once, warps = cut_sums(parts, count)
    finish_mix[(triton.cdiv(rows, together),)](
        sums,
        squares,
        scale.contiguous(),
        base.contiguous(),
        pre,
        post,
        comb,
        rows,
        parts,
        epsilon,
        norm_epsilon,
        channels=channels,
        streams=count,
        iterations=iterations,
        ROWS=together,
        PARTS=parts_at_once,
        STREAMS=triton.next_power_of_2(count),
        MIXES=padded,
        num_warps=warps,
    )
    return pre, post, comb


def cut_sums(parts: int, streams: int) -> tuple[int, int, int]:
    """How sums of so many parts are added: rows of a program, parts that it takes at once, and its warps."""
    parts_at_once = triton.next_power_of_2(parts)
    warps = 4 if parts > _SUMS_OF_A_WARP and streams in _STREAMS_OF_WARPS else 1
    return max(1, _SUMS_OF_A_PROGRAM // parts_at_once), parts_at_once, warps
