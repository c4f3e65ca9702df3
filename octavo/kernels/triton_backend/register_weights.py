"""What products share whose weights are decoded in registers and go to the tensor cores from there: of F4 and of F8."""

from __future__ import annotations

import triton
import triton.language as tl

WARP_ROWS = tl.constexpr(16)
"""Rows of an accumulator that a warp holds: 8 in its lanes, twice."""


@triton.jit
def two_values(pair: tl.tensor) -> tl.tensor:
    """Both BF16 of an int32: [...] -> [..., 2]."""
    low, high = tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )
    return tl.join(low, high)


@triton.jit
def weight_rows(OUTPUTS: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """Which row of a tile is read in which place, so that ``fragments`` moves nothing between threads: [OUTPUTS]."""
    place = tl.arange(0, OUTPUTS)
    half = place // (8 * WARPS)
    return half // 2 * (WARP_ROWS * WARPS) + place // 8 % WARPS * WARP_ROWS + half % 2 * 8 + place % 8


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, limit: tl.float32) -> tl.tensor:
    """silu(gate) x up, clamped as ``experts.gated`` does it; NaN stays."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up
