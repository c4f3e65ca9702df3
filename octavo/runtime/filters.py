"""Top-k, top-p and min-p: which tokens may be drawn at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.numerics import largest
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.upload import upload

Rule = Callable[[Tensor, Sequence[SamplingParams]], Tensor]


def filtered(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [n, V] F64 at temperature: -inf for what falls out of each row. The likeliest token always stays."""
    size = scaled.shape[1]
    ranked = [row for row, own in enumerate(params) if 0 < own.top_k < size or own.top_p < 1.0]
    if ranked:
        scaled = _on_rows(_likeliest, scaled, ranked, params)
    bounded = [row for row, own in enumerate(params) if own.min_p > 0.0]
    if bounded:
        scaled = _on_rows(_likely_enough, scaled, bounded, params)
    return scaled


def running_sum(values: Tensor) -> Tensor:
    """Sums of the last axis up to each element, in a fixed order: torch's own on a GPU changes from run to run."""
    step = 1
    while step < values.shape[-1]:
        values = torch.cat([values[..., :step], values[..., step:] + values[..., :-step]], dim=-1)
        step *= 2
    return values


def _likeliest(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The ``top_k`` best; of these as many as it takes to hold ``top_p`` of the probability."""
    device, size = scaled.device, scaled.shape[1]
    top_k = upload(torch.tensor([own.top_k or size for own in params]), device).unsqueeze(1)
    # Rounded sums may pass 1, so a bound of 1 is none.
    bounds = [own.top_p if own.top_p < 1.0 else torch.inf for own in params]
    top_p = upload(torch.tensor(bounds, dtype=torch.float64), device).unsqueeze(1)
    order = largest(scaled, size)
    kept = torch.arange(size, device=device) < top_k
    probabilities = torch.softmax(scaled.gather(1, order).masked_fill(~kept, -torch.inf), dim=-1)
    kept &= running_sum(probabilities) - probabilities < top_p
    return scaled.masked_fill(~torch.empty_like(kept).scatter_(1, order, kept), -torch.inf)


def _likely_enough(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What has at least ``min_p`` times the best's probability."""
    min_p = upload(torch.tensor([own.min_p for own in params], dtype=torch.float64), scaled.device).unsqueeze(1)
    probabilities = torch.softmax(scaled, dim=-1)
    return scaled.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def _on_rows(rule: Rule, scaled: Tensor, rows: list[int], params: Sequence[SamplingParams]) -> Tensor:
    """A rule applied to some of the rows."""
    if len(rows) == len(params):
        return rule(scaled, params)
    index = upload(torch.tensor(rows), scaled.device)
    return scaled.index_copy(0, index, rule(scaled.index_select(0, index), [params[row] for row in rows]))
