"""Scales that are powers of two, as Q8 and Q4mx have them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_and_inverse(quotient: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(the least power of two that is not below a positive F32 number, its bits int32; the reciprocal F32).

    A reciprocal that is no normal number is zero.
    """
    exponent = (quotient.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return exponent, tl.maximum(0x7F000000 - exponent, 0).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_to_float(byte: tl.tensor) -> tl.tensor:
    """As ``quantise.e8m0_to_float``: 2^(byte - 127), F32, NaN for 255. ``byte`` is an integer of any type."""
    byte = byte.to(tl.int32)
    exponent = (byte << 23) | ((byte == 0).to(tl.int32) << 22) | (byte == 255).to(tl.int32)
    return exponent.to(tl.float32, bitcast=True)
