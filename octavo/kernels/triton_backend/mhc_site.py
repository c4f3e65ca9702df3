"""What stands between two sublayers: few rows pass through the device once, many rows are mixed in a second pass."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.kernels.mhc import mhc_site
from octavo.kernels.operator import ModelWidths
from octavo.kernels.triton_backend import mhc
from octavo.kernels.triton_backend.mhc_site_kernels import expand_and_collapse, expand_and_multiply, finish_site
from octavo.kernels.triton_backend.mhc_tuning import MixForm, choose_site_form, steps_of_part, warps_of_row

_STREAMS = 4
_NORMED = 512
"""Channels of a program that norms."""
_EXPANDED = 1024
"""Channels that a program expands at once where it has a row of its own."""
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""New streams, the next input, and pre, post and comb of the next site."""


def _refuses(widths: ModelWidths) -> str | None:
    if widths.hc_mult != _STREAMS:
        return f"hc_mult {widths.hc_mult}: allowed is {_STREAMS}"
    return None


@mhc_site.implement("triton", devices=frozenset({"cuda"}), refuses=_refuses)
def mhc_site_triton(
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
    """See the reference; streams are BF16, four of them. New streams are the reference's to the bit.

    The matrix counts with all its bits: only sums are rounded.
    """
    if streams.dtype != torch.bfloat16 or streams.shape[1] != _STREAMS:
        raise TypeError(
            f"mhc_site, backend triton: {streams.shape[1]} streams of {streams.dtype}; allowed: {_STREAMS} of "
            "torch.bfloat16. Use numerics reference."
        )
    return run(
        streams, y, post, comb, pre, weight, collapse_epsilon, fn, scale, base, iterations, epsilon, norm_epsilon
    )


def run(
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
) -> Results:
    """The same, whatever the dtype: Triton's interpreter has no products of BF16."""
    given = [value.contiguous() for value in (streams, y, post, comb, pre)]
    form = choose_site_form(streams.shape[0])
    settings = iterations, epsilon, norm_epsilon
    if form is None:
        expanded, x = _expand_and_collapse(given, weight, collapse_epsilon)
        return expanded, x, *mhc.run(expanded, fn, scale, base, *settings)
    return _in_one_pass(form, given, weight, collapse_epsilon, fn, scale, base, *settings)


def _expand_and_collapse(given: list[Tensor], weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """given: streams, y, post, comb and pre, contiguous -> new streams, and the input of the next sublayer."""
    streams, y = given[:2]
    rows, width = y.shape
    expanded, x = torch.empty_like(streams), streams.new_empty(rows, width)
    expand_and_collapse[(rows,)](
        *given,
        weight.contiguous(),
        expanded,
        x,
        epsilon,
        width=width,
        STEPS=triton.cdiv(width, _EXPANDED),
        CHANNELS=_EXPANDED,
        num_warps=warps_of_row(rows),
        enable_fp_fusion=False,
    )
    return expanded, x


def _in_one_pass(
    form: MixForm,
    given: list[Tensor],
    weight: Tensor,
    collapse_epsilon: float,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
) -> Results:
    """``given`` as in :func:`_expand_and_collapse`."""
    streams, y = given[:2]
    rows, width = y.shape
    expanded, x = torch.empty_like(streams), streams.new_empty(rows, width)
    pre, post = (torch.empty(rows, _STREAMS, dtype=torch.float32, device=y.device) for _ in range(2))
    comb = torch.empty(rows, _STREAMS, _STREAMS, dtype=torch.float32, device=y.device)
    if rows == 0:
        return expanded, x, pre, post, comb
    mixes = (2 + _STREAMS) * _STREAMS
    padded = triton.next_power_of_2(mixes)
    steps = steps_of_part(form, rows, width)
    parts = triton.cdiv(width, steps * form.channels)
    sums = torch.empty(parts, rows, padded, dtype=torch.float32, device=y.device)
    squares, collapsed_squares = torch.empty(2, parts, rows, dtype=torch.float32, device=y.device)
    expand_and_multiply[(parts, triton.cdiv(rows, form.rows))](
        *given,
        fn.contiguous(),
        expanded,
        x,
        sums,
        squares,
        collapsed_squares,
        rows,
        steps,
        width=width,
        mixes=mixes,
        ROWS=form.rows,
        MIXES=padded,
        CHANNELS=form.channels,
        STAGES=form.stages,
        num_warps=form.warps,
        enable_fp_fusion=False,
        launch_pdl=True,
    )
    together, parts_at_once, warps = mhc.cut_sums(parts, _STREAMS)
    finishing = triton.cdiv(rows, together)
    finish_site[(finishing + rows * triton.cdiv(width, _NORMED),)](
        sums,
        squares,
        collapsed_squares,
        scale.contiguous(),
        base.contiguous(),
        x,
        weight.contiguous(),
        pre,
        post,
        comb,
        rows,
        parts,
        finishing,
        epsilon,
        norm_epsilon,
        collapse_epsilon,
        width=width,
        iterations=iterations,
        ROWS=together,
        PARTS=parts_at_once,
        MIXES=padded,
        CHANNELS=_NORMED,
        num_warps=warps,
        launch_pdl=True,
    )
    return expanded, x, pre, post, comb
