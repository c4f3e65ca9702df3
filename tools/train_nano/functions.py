"""Differentiable functions of tensors alone, in few launches: norms, streams, the Engram gate, rotation.

Streams are the widest tensors of the model, so passes over them are what a step waits for. Shapes as in
``octavo.kernels``: R rows, S streams, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As ``octavo.kernels.norm.rms``: F32 inside, x's dtype outside."""
    return functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), epsilon)


class _LookUp(torch.autograd.Function):
    """Rows of a table. Their gradients are summed in F32 and without waiting for the device."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return functional.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2).float()
        total = torch.zeros(ctx.shape, device=gradient.device)
        return total.index_add_(0, index.flatten(), gradient).to(ctx.dtype), None


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """table [n, C], index [...] int64 -> [..., C]."""
    result: Tensor = _LookUp.apply(table, index)  # type: ignore[no-untyped-call]
    return result


class _Sinkhorn(torch.autograd.Function):
    """Sinkhorn rounds as in ``octavo.kernels.mhc.split_mixes``, with the gradient of their limit.

    The limit P of logits L obeys dP = P (dL - a - b) with row and column terms that keep all sums; the reverse solves
    the same small system. It costs a few launches instead of those of twenty rounds and their reverse.
    """

    SQUARINGS = 5

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, epsilon: float) -> Tensor:
        comb = torch.softmax(logits, -1) + epsilon
        comb = comb / (comb.sum(1, keepdim=True) + epsilon)
        for _ in range(iterations - 1):  # without epsilon, which matters to none of these sums, in half the launches
            comb /= comb.sum(2, keepdim=True)
            comb /= comb.sum(1, keepdim=True)
        ctx.save_for_backward(comb)
        return comb

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (comb,) = ctx.saved_tensors
        gradient = gradients[0]
        if comb.shape[1] == 2:
            # P = ((p, 1-p), (1-p, p)) with logit of p = (l00 + l11 - l01 - l10) / 2.
            across = gradient[:, 0] - gradient[:, 1]
            slope = 0.5 * comb[:, 0, 0] * comb[:, 0, 1] * (across[:, 0] - across[:, 1])
            return torch.stack((slope, -slope, -slope, slope), 1).view_as(comb), None, None
        weighted = comb * gradient
        u, v = weighted.sum(2, keepdim=True), weighted.sum(1).unsqueeze(2)
        transposed = comb.transpose(1, 2)
        right = u - comb @ v
        # (1 - P P^T) a = u - P v, by (1 + M)(1 + M^2)(1 + M^4)...; the mean drops out, it changes nothing.
        step = comb @ transposed - 1.0 / comb.shape[1]
        solution = right - right.mean(1, keepdim=True)
        for _ in range(_Sinkhorn.SQUARINGS):
            solution = solution + step @ solution
            step = step @ step
        columns = v - transposed @ solution
        return comb * (gradient - solution - columns.transpose(1, 2)), None, None


def mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``octavo.kernels.mhc_mix``."""
    flat, s = streams.flatten(1), streams.shape[1]
    normed = functional.rms_norm(flat, flat.shape[-1:], None, norm_epsilon)
    mixes = functional.linear(normed, fn.to(normed.dtype)).float()
    pre = torch.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + epsilon
    post = 2.0 * torch.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    logits = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s))
    comb: Tensor = _Sinkhorn.apply(logits, iterations, epsilon)  # type: ignore[no-untyped-call]
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As ``octavo.kernels.mhc_collapse``. Sums of products, since a library is slow at many tiny matrices."""
    pre = pre.to(streams.dtype).unsqueeze(2)
    collapsed = pre[:, 0] * streams[:, 0]
    for stream in range(1, streams.shape[1]):
        collapsed = torch.addcmul(collapsed, pre[:, stream], streams[:, stream])
    return rms(collapsed, weight, epsilon)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As ``octavo.kernels.mhc_expand``."""
    dtype = streams.dtype
    post, comb = post.to(dtype).unsqueeze(2), comb.to(dtype).unsqueeze(3)
    total = post * y.unsqueeze(1)
    for source in range(streams.shape[1]):
        total = torch.addcmul(total, comb[:, source], streams[:, source].unsqueeze(1))
    return total


def gate(streams: Tensor, projected: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As ``octavo.kernels.engram_gate`` of rows outside images; ``weight`` [S, D] is that of query times key."""
    count, width = streams.shape[1:]
    keys, value = projected.unflatten(1, (-1, width)).split((count, 1), dim=1)
    query = functional.rms_norm(streams, (width,), None, epsilon)
    key = functional.rms_norm(keys, (width,), None, epsilon)
    agreement = (query * key * weight).float().sum(-1) / width**0.5
    opened = torch.sigmoid(agreement.sign() * agreement.abs().clamp_min(1e-6).sqrt())
    result: Tensor = streams + opened.unsqueeze(-1).to(streams.dtype) * value
    return result


def turn(x: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> Tensor:
    """As ``octavo.kernels.rope.turn``: x [R, ..., C] by angles [R, c] given as cosine and sine."""
    shape = (cosine.shape[0], *(1,) * (x.dim() - 2), cosine.shape[1])
    cosine, sine = cosine.view(shape), (-sine if inverse else sine).view(shape)
    kept, last = x.split((x.shape[-1] - 2 * shape[-1], 2 * shape[-1]), -1)
    real, imaginary = last.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)
