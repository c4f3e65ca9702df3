"""Before the body, on all tokens in global order: token embedding and Engram hash (design section 2).

The hash depends on token ids alone, so it sees the whole prompt before rows are dealt to ranks, and the table rows
it names are on their way before the first layer starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.model.config import SCALE_BLOCK, TextConfig
from octavo.model.engram_hash import EngramHash, engram_hashes
from octavo.model.inputs import Rows, Tokens
from octavo.model.weights import Weight


class Embedding(Weight):
    """Token embedding: ids [R] int64 -> [R, D] in ``dtype``; ids below zero (dead rows) give zero."""

    def __init__(self, text: TextConfig) -> None:
        super().__init__(text.vocab_size, text.hidden_size)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return kernels.embed_tokens(ids, self.weight, dtype)


class EngramTable(nn.Module):
    """One layer's table, in host memory or on the device, and the numbers of its hash on ``device``."""

    primes: Tensor
    """[columns] int64."""
    offsets: Tensor
    """[columns] int64: first table row of each column."""
    multipliers: Tensor
    """[n] int64."""

    def __init__(self, numbers: EngramHash, weight: Tensor, scale: Tensor, device: torch.device) -> None:
        """``weight`` [rows, width] E4M3, ``scale`` [rows, width / 32] uint8: held as they are, never copied."""
        super().__init__()
        self.weight, self.scale = (nn.Parameter(tensor, requires_grad=False) for tensor in (weight, scale))
        for name, values in (
            ("primes", tuple(itertools.chain.from_iterable(numbers.primes))),
            ("offsets", numbers.offsets),
            ("multipliers", numbers.multipliers),
        ):
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=device), persistent=False)

    def rows(self, classes: Tensor, history: Tensor, tokens: Tokens, pad: int) -> Tensor:
        """Table rows [T, columns] int64 of every token's n-grams; history is read and not changed."""
        return kernels.engram_hash(
            classes,
            history,
            self.primes,
            self.offsets,
            self.multipliers,
            tokens.slots,
            tokens.positions,
            tokens.starts,
            pad,
        )

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The named rows side by side: rows [R, columns] -> [R, columns * width] in ``dtype``."""
        return kernels.engram_lookup(self.weight, self.scale, rows, dtype)


def engram_tables(
    text: TextConfig, weights: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> list[EngramTable]:
    """A table for each Engram layer from its (weight, scale)."""
    return [EngramTable(n, *pair, device) for n, pair in zip(engram_hashes(text), weights, strict=True)]


def empty_tables(text: TextConfig, memory: torch.device, device: torch.device) -> list[EngramTable]:
    """Uninitialised tables in ``memory``, used from ``device``: for tracing under fake tensors, and random values."""
    width = text.engram_head_dim
    weights = [
        (
            torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=memory),
            torch.empty(rows, width // SCALE_BLOCK, dtype=torch.uint8, device=memory),
        )
        for rows in text.engram_num_embeddings
    ]
    return engram_tables(text, weights, device)


class Prelude(nn.Module):
    """From tokens to the rows that the body takes."""

    classes: Tensor
    """[V] int64: the Engram class of every token id."""

    def __init__(
        self, embed: Embedding, tables: Sequence[EngramTable], classes: Tensor, pad_class: int, dtype: torch.dtype
    ) -> None:
        """``dtype`` is that of activations. ``classes`` lies where ``embed`` does."""
        super().__init__()
        self.embed = embed
        self.tables = cast("Sequence[EngramTable]", nn.ModuleList(tables))
        self.pad_class, self.dtype = pad_class, dtype
        self.register_buffer("classes", classes, persistent=False)

    def forward(self, tokens: Tokens, history: Tensor) -> Rows:
        """Rows of this step; history [slots, n - 1] int64, the last classes of every request, moves on."""
        classes = kernels.token_classes(tokens.ids, tokens.image, self.classes)
        found = [table.rows(classes, history, tokens, self.pad_class) for table in self.tables]
        kernels.commit_window(history, classes, tokens.slots, tokens.positions)
        return Rows(
            self.embed(tokens.ids, self.dtype),
            tokens.slots,
            tokens.positions,
            tokens.live,
            tokens.image,
            [table(rows, self.dtype) for table, rows in zip(self.tables, found, strict=True)],
        )
