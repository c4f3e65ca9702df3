"""RMS norm and rotary embedding within kernels, of rows whose even and odd channels are tensors of their own.

Channels 2 i and 2 i + 1 turn together: apart, no value has to move for it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed(even, odd, even_weight, odd_weight, epsilon, channels: tl.constexpr):
    """RMS norm (spec/model.md 3.0) of rows [ROWS, PAIRS], zero beyond ``channels``, in their dtype.

    Weights [PAIRS], of any dtype.
    """
    dtype: tl.constexpr = even.dtype
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    mean = tl.sum(even * even + odd * odd, axis=1) * (1.0 / channels)
    scale = tl.rsqrt(mean + epsilon)[:, None]
    even_weight = even_weight.to(tl.float32)[None, :]
    odd_weight = odd_weight.to(tl.float32)[None, :]
    return (even_weight * (even * scale)).to(dtype), (odd_weight * (odd * scale)).to(dtype)


@triton.jit
def turned_pairs(
    even, odd, position, frequencies, kept: tl.constexpr, turning: tl.constexpr, pair, TURNING: tl.constexpr
):
    """Rotary embedding of all pairs from ``kept`` on (spec/model.md 3.4), rounded to the dtype of the rows.

    Rows [ROWS, PAIRS], position [ROWS], ``pair`` numbers the pairs. TURNING pads ``turning`` to a power of two.
    """
    turns = ((pair >= kept) & (pair < kept + turning))[None, :]
    number = tl.arange(0, TURNING)
    frequency = tl.load(frequencies + number, mask=number < turning, other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    at = tl.broadcast_to(tl.minimum(tl.maximum(pair - kept, 0), turning - 1)[None, :], even.shape)
    cosine = tl.gather(tl.cos(angle), at, 1)
    sine = tl.gather(tl.sin(angle), at, 1)
    x = even.to(tl.float32)
    y = odd.to(tl.float32)
    turned_even = (x * cosine - y * sine).to(even.dtype)
    turned_odd = (x * sine + y * cosine).to(odd.dtype)
    return tl.where(turns, turned_even, even), tl.where(turns, turned_odd, odd)
