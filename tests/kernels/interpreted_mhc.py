"""Triton's interpreter runs ``mhc_mix``: python -m tests.kernels.interpreted_mhc, with TRITON_INTERPRET=1.

It has no PTX and no products of BF16: streams stay F32 here, and two functions are replaced by what they mean. Parts,
masks and sums are those of the kernels. Prints the largest error of every shape against sums in F64, or raises.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octavo.kernels.mhc import split_mixes
from octavo.kernels.triton_backend import mhc, mhc_kernels

LARGEST = 1e-6
"""Of coefficients of about one: a few F32 steps of 20 Sinkhorn rounds. One channel left out gives 5e-3."""
_SETTINGS = 20, 1e-6, 1e-6


def main(long_form: bool) -> None:
    vars(mhc_kernels).update(split_bf16=split_bf16, reciprocal=lambda value: 1.0 / value)
    torch.manual_seed(0)
    for rows, streams, width in (
        (3, 4, 5120),
        (17, 2, 40),
        (65, 3, 37),
        *(((1, 4, 128), (5, 1, 96), (18, 4, 1000), (130, 4, 256), (515, 4, 40)) if long_form else ()),
    ):
        error = compare(rows, streams, width)
        print(f"{rows} rows of {streams} streams of {width}: {error:.1e}", flush=True)
    print("coefficients agree")


def compare(rows: int, streams: int, width: int) -> float:
    """The largest error; raises where it is too large, or where anything of a dead row reaches another."""
    mixes, channels = (2 + streams) * streams, streams * width
    x = torch.randn(rows, streams, width).bfloat16().float()
    weights = torch.randn(mixes, channels) * channels**-0.5, torch.randn(3), torch.randn(mixes)
    found = mhc.run(x, *weights, *_SETTINGS)
    errors = [(a - b).abs().max() for a, b in zip(found, exact(x, *weights), strict=True)]
    assert all(error <= LARGEST for error in errors), (rows, streams, width, errors)

    dead = torch.arange(rows) % 3 == 1
    soiled = mhc.run(x.masked_fill(dead[:, None, None], torch.nan), *weights, *_SETTINGS)
    assert all(torch.equal(a[~dead], b[~dead]) for a, b in zip(found, soiled, strict=True)), (rows, streams, width)
    return float(max(errors))


def exact(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients in F64."""
    iterations, epsilon, norm_epsilon = _SETTINGS
    flat = x.flatten(1).double()
    mixes = flat @ fn.double().t() * torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_epsilon)
    return split_mixes(mixes, scale.double(), base.double(), x.shape[1], iterations, epsilon)


def split_bf16(value: Any) -> Any:
    """The upper eight bits, in F32, and what is left."""
    upper = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return upper, value - upper


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
