"""Rotary embedding within kernels: a table of each row's cosines and sines, and heads turned by it.

Angles are the F32 products of position and frequency. They reach a million, where cosine and sine take a slow way: so
they are computed once for each row, not once for each head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def angles(position: tl.tensor, frequencies: tl.tensor, turning: tl.constexpr, TURNING: tl.constexpr) -> tl.tensor:
    """[TURNING] F32, of which ``turning`` turn; a dead row does not."""
    pair = tl.arange(0, TURNING)
    return tl.maximum(position, 0).to(tl.float32) * tl.load(frequencies + pair, mask=pair < turning, other=0.0)


@triton.jit
def store_turns(turns: tl.tensor, row: tl.tensor, angle: tl.tensor, turning: tl.constexpr) -> None:
    """Cosines, then sines of one row's angles to turns [R, 2, turning] F32."""
    pair = tl.arange(0, angle.shape[0])
    at = turns + row.to(tl.int64) * (2 * turning) + pair
    tl.store(at, tl.cos(angle), mask=pair < turning)
    tl.store(at + turning, tl.sin(angle), mask=pair < turning)


@triton.jit
def turned(
    x: tl.tensor,
    turns: tl.tensor,
    channels: tl.constexpr,
    turning: tl.constexpr,
    inverse: tl.constexpr,
) -> tl.tensor:
    """x [HEADS, CHANNELS] of one row with the last 2 x ``turning`` of its ``channels`` turned; F32 maths, its dtype.

    ``turns`` points to the row's cosines. CHANNELS pads ``channels`` to a power of two.
    """
    heads: tl.constexpr = x.shape[0]
    padded: tl.constexpr = x.shape[1]
    pair = tl.arange(0, padded // 2) - (channels // 2 - turning)
    turns_here = (pair >= 0) & (pair < turning)
    cosine = tl.load(turns + pair, mask=turns_here, other=1.0)[None, :]
    sine = tl.load(turns + turning + pair, mask=turns_here, other=0.0)[None, :]
    if inverse:
        sine = -sine
    real, imaginary = tl.split(tl.reshape(x.to(tl.float32), (heads, padded // 2, 2)))
    both = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    # A choice comes last: Triton 3.6 cannot lower a reshape that feeds a dot.
    channel = tl.arange(0, padded)[None, :]
    return tl.where(channel >= channels - 2 * turning, tl.reshape(both, (heads, padded)).to(x.dtype), x)
