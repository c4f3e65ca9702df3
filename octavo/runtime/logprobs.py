"""Log probabilities of tokens under the model, and the likeliest tokens in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.numerics import largest
from octavo.runtime.download import Download


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability under the model, natural logarithm, and the likeliest tokens at its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log probability) of the K likeliest, best first."""


class Logprobs:
    """Log probabilities of one token in each row of logits, and of the likeliest, on their way to the host."""

    def __init__(self, logits: Tensor, tokens: Tensor, top: Sequence[int]) -> None:
        """Logits [n, V] F32 of a device, which may be overwritten afterwards; tokens [n] int64 there, below zero where
        there is none; ``top``: how many of the likeliest each row reports."""
        every = torch.log_softmax(logits.float(), dim=-1)
        best = largest(logits, max(top))  # not of the logarithms, whose rounding makes ties
        chosen = every.gather(1, tokens.clamp_min(0).unsqueeze(1)).squeeze(1)
        self._top = top
        self._download = Download(tokens, chosen, best, every.gather(1, best))

    def read(self) -> list[TokenLogprob]:
        """Wait for them -> one a row; of a row without a token it means nothing."""
        rows = zip(*(values.tolist() for values in self._download.read()), self._top, strict=True)
        return [
            TokenLogprob(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, ids, values, count in rows
        ]
