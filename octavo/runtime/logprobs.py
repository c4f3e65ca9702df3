"""Log probabilities of tokens under the model, and the likeliest tokens in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.numerics import largest
from octavo.runtime.upload import upload


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability under the model, natural logarithm, and the likeliest tokens at its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log probability) of the K likeliest, best first."""


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int | Sequence[int]) -> list[TokenLogprob]:
    """Log probabilities of one token in each row of logits [n, V] F32, and of the ``top`` likeliest, of all or each."""
    tops = [top] * len(tokens) if isinstance(top, int) else top
    if not tokens:
        return []
    every = torch.log_softmax(logits.float(), dim=-1)
    chosen = every.gather(1, upload(torch.tensor(tokens), logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = largest(logits, max(tops))  # not of the logarithms, whose rounding makes ties
    ids, values = best.tolist(), every.gather(1, best).tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, logprob, row_ids, row_values, count in zip(tokens, chosen, ids, values, tops, strict=True)
    ]
