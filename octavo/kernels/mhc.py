"""Single-pass mHC: how S residual streams feed a sublayer and take its output back (spec/model.md 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.norm import rms
from octavo.kernels.numerics import blocked_matmul, mean_of_squares, sigmoid, sum_in_order
from octavo.kernels.operator import CARRIED, Need, operator


def split_mixes(
    mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw mixes [R, (2 + S) S] F32 -> pre [R, S], post [R, S], comb [R, source, destination], all F32.

    ``comb`` is made doubly stochastic by ``iterations`` Sinkhorn rounds, the first being (softmax, columns).
    """
    s = streams
    pre = sigmoid(mixes[:, :s] * scale[0] + base[:s]) + epsilon
    post = 2.0 * sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s))
    comb = torch.exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / _row_sum(comb) + epsilon
    comb = comb / (_column_sum(comb) + epsilon)
    for _ in range(iterations - 1):
        comb = comb / (_row_sum(comb) + epsilon)
        comb = comb / (_column_sum(comb) + epsilon)
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams, F32 sum rounded once: [R, S, D], [R, S] F32 -> [R, D] in the streams' dtype."""
    weighted = [pre[:, k, None] * streams[:, k].float() for k in range(streams.shape[1])]
    return sum_in_order(weighted).to(streams.dtype)


@operator(
    arguments={"streams": Need.ROWS, "fn": Need.ANY, "scale": Need.ANY, "base": Need.ANY},
    results=(CARRIED, CARRIED, CARRIED),
    source="spec/model.md 3.2",
)
def mhc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of one sublayer.

    streams [R, S, D] BF16 or F32, fn [(2 + S) S, S D] F32, scale [3] F32, base [(2 + S) S] F32
    -> pre [R, S], post [R, S], comb [R, source, destination], all F32. ``pre`` serves the next sublayer.
    """
    flat = streams.flatten(1).float()
    mixes = blocked_matmul(flat, fn) * torch.rsqrt(mean_of_squares(flat) + norm_epsilon)
    return split_mixes(mixes, scale, base, streams.shape[1], iterations, epsilon)


@mhc_mix.fake
def _mhc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, count, _ = streams.shape
    return (
        streams.new_empty(rows, count, dtype=torch.float32),
        streams.new_empty(rows, count, dtype=torch.float32),
        streams.new_empty(rows, count, count, dtype=torch.float32),
    )


@operator(
    arguments={"streams": Need.ROWS, "pre": Need.ROWS, "weight": Need.ANY},
    results=(CARRIED,),
    source="spec/model.md 3.2",
    compilable=True,
)
def mhc_collapse(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Input of a sublayer: rms(sum_k pre_k X_k). streams [R, S, D], pre [R, S] F32, weight [D] -> [R, D]."""
    return rms(collapse(streams, pre), weight, epsilon)


@mhc_collapse.fake
def _mhc_collapse(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


@operator(
    arguments={"streams": Need.ROWS, "y": Need.ROWS, "post": Need.ROWS, "comb": Need.ROWS},
    results=(CARRIED,),
    source="spec/model.md 3.2",
    compilable=True,
)
def mhc_expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Output of a sublayer back into the streams: X'_k = post_k y + sum_j comb_jk X_j, F32 rounded once.

    streams [R, S, D], y [R, D], post [R, S] F32, comb [R, source, destination] F32 -> [R, S, D] in streams' dtype.
    """
    sources = [comb[:, j, :, None] * streams[:, j, None, :].float() for j in range(streams.shape[1])]
    return (post[:, :, None] * y.float()[:, None, :] + sum_in_order(sources)).to(streams.dtype).contiguous()


@mhc_expand.fake
def _mhc_expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)


@operator(
    arguments={
        "streams": Need.ROWS,
        "y": Need.ROWS,
        "post": Need.ROWS,
        "comb": Need.ROWS,
        "pre": Need.ROWS,
        "weight": Need.ANY,
        "fn": Need.ANY,
        "scale": Need.ANY,
        "base": Need.ANY,
    },
    results=(CARRIED, CARRIED, CARRIED, CARRIED, CARRIED),
    source="spec/model.md 3.2",
)
def mhc_site(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    collapse_epsilon: float,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What stands between two sublayers: the output y of one into the streams, the input of the next out of them.

    Arguments of ``mhc_expand`` (streams, y, post, comb), of ``mhc_collapse`` (pre, weight and its epsilon) and of
    ``mhc_mix`` (fn and what follows) -> new streams [R, S, D], the next input [R, D], and the coefficients of the next
    site: pre [R, S], post [R, S], comb [R, source, destination].
    """
    expanded = mhc_expand.reference(streams, y, post, comb)
    x = mhc_collapse.reference(expanded, pre, weight, collapse_epsilon)
    return expanded, x, *mhc_mix.reference(expanded, fn, scale, base, iterations, epsilon, norm_epsilon)


@mhc_site.fake
def _mhc_site(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    collapse_epsilon: float,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        _mhc_expand(streams, y, post, comb),
        _mhc_collapse(streams, pre, weight, collapse_epsilon),
        *_mhc_mix(streams, fn, scale, base, iterations, epsilon, norm_epsilon),
    )


@operator(arguments={"streams": Need.ROWS}, results=(CARRIED,), source="spec/model.md 3.13", compilable=True)
def stream_mean(streams: Tensor) -> Tensor:
    """Mean over the streams, what drafts read: [R, S, D] -> [R, D] in streams' dtype."""
    count = streams.shape[1]
    return (sum_in_order([streams[:, k].float() for k in range(count)]) / count).to(streams.dtype).contiguous()


@stream_mean.fake
def _stream_mean(streams: Tensor) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


def _row_sum(comb: Tensor) -> Tensor:
    return sum_in_order(list(comb.unbind(2))).unsqueeze(2)


def _column_sum(comb: Tensor) -> Tensor:
    return sum_in_order(list(comb.unbind(1))).unsqueeze(1)
