"""What Gluon kernels share whose F4 weights are decoded in registers: see ``expert_products`` for how codes become
values. Gluon cannot call functions of Triton, so that module and ``register_weights`` have some of it once more.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.kernels.triton_backend.expert_products import DECODE


@gluon.jit
def group_factors(scales, group):
    """Byte ``group`` of words of four scales -> two equal BF16 factors, 2^-64 of what a code is worth: int32."""
    byte = (scales >> (group * 8)) & 255
    return (gl.minimum(byte + 62, 255) << 7) * 0x00010001


@gluon.jit
def decoded_words(codes, factors):
    """[...] int32 of eight codes, and of factors -> weights x 2^-64, [..., 2, 2, 2] BF16.

    Code n of a word, n = 4 p + 2 a + b, stands at [..., p, a, b].
    """
    first, second, third, fourth = gl.inline_asm_elementwise(
        DECODE, "=r,=r,=r,=r,r,r", [codes, factors], (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    even = gl.join(_two_values(first), _two_values(third))
    odd = gl.join(_two_values(second), _two_values(fourth))
    return gl.join(even, odd)


@gluon.jit
def _two_values(pair):
    """Both BF16 of an int32: [...] -> [..., 2]."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.join(low, high)
