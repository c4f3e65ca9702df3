"""``window_latent``: norm, rotary embedding and Q8 of a row in one kernel, by the threads of one warp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.rope import window_latent
from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead
from octavo.kernels.triton_backend.expert_routing import round_q8_groups
from octavo.kernels.triton_backend.paired_channels import normed, turned_pairs

_ROWS, _WARPS = 1, 1
"""Of a program."""


@window_latent.implement("triton", devices=frozenset({"cuda"}))
def window_latent_triton(x: Tensor, weight: Tensor, positions: Tensor, frequencies: Tensor, epsilon: float) -> Tensor:
    """See the reference; x is BF16. Squares are added in another order, and cosines and sines may differ from the
    reference's in the last bit."""
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"window_latent, backend triton: x is {x.dtype}; allowed: torch.bfloat16. Use numerics reference."
        )
    rows, channels = x.shape
    latents = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0:
        return latents
    turning = frequencies.shape[0]
    make_latents[(triton.cdiv(rows, _ROWS),)](
        *(x.contiguous(), weight.contiguous(), positions.contiguous(), frequencies.contiguous(), latents),
        *(rows, epsilon),
        channels=channels,
        turning=turning,
        ROWS=_ROWS,
        CHANNELS=max(32, triton.next_power_of_2(channels)),
        TURNING=triton.next_power_of_2(turning),
        num_warps=_WARPS,
        launch_pdl=True,
    )
    return latents


@triton.jit(do_not_specialize=["rows"])
def make_latents(
    x: tl.tensor,
    weight: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    latents: tl.tensor,
    rows: tl.int32,
    epsilon: tl.float32,
    channels: tl.constexpr,
    turning: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TURNING: tl.constexpr,
) -> None:
    """ROWS rows of x [R, channels] to ``latents``, rounded to BF16 behind the norm, the turn and Q8.

    ``turning`` pairs of channels turn, the last ones; CHANNELS and TURNING pad to powers of two.
    """
    let_next_start()
    wait_for_ahead()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < rows, other=0)
    channel = tl.arange(0, CHANNELS)
    place = row.to(tl.int64)[:, None] * channels + channel[None, :]
    known = (row < rows)[:, None] & (channel < channels)[None, :]
    given = tl.load(x + place, mask=known, other=0.0)
    weights = tl.load(weight + channel, mask=channel < channels, other=0.0)
    even, odd = tl.split(tl.reshape(given, [ROWS, CHANNELS // 2, 2]))
    even_weight, odd_weight = tl.split(tl.reshape(weights, [CHANNELS // 2, 2]))
    even, odd = normed(even, odd, even_weight, odd_weight, epsilon, channels)
    pair = tl.arange(0, CHANNELS // 2)
    even, odd = turned_pairs(even, odd, position, frequencies, channels // 2 - turning, turning, pair, TURNING)
    turned = tl.join(even, odd).to(tl.float32)
    groups = round_q8_groups(tl.reshape(turned, [ROWS * CHANNELS // 32, 32, 1]))
    tl.store(latents + place, tl.reshape(groups, [ROWS, CHANNELS]).to(latents.dtype.element_ty), mask=known)
