"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.operator import DeadRows, Gives, Need, Returns, operator


@operator(
    arguments={"ids": Need.ROWS, "weight": Need.ANY},
    results=(Returns(Gives.ROWS, DeadRows.ZERO),),
    source="spec/model.md 3.1",
)
def embed_tokens(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding: ids [R] int64, weight [V, D] BF16 -> [R, D] in ``dtype``; ids below zero give zero."""
    rows = torch.nn.functional.embedding(ids.clamp_min(0), weight).to(dtype)
    return rows.masked_fill((ids < 0).unsqueeze(1), 0.0)


@embed_tokens.fake
def _embed_tokens(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1], dtype=dtype)
