"""Before the body, on all tokens in global order: token embedding and Engram hash (design section 2).

The hash depends on token ids alone, so it sees the whole prompt before rows are dealt to ranks, and the table rows
it names are on their way before the first layer starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.kernels.engram import DEAD_CLASS
from octavo.model.config import TextConfig
from octavo.model.engram_hash import engram_hashes
from octavo.model.token_classes import pad_class
from octavo.model.weights import Weight


class Embedding(Weight):
    """Token embedding: ids [T] int64 -> [T, D] in ``dtype``; ids below zero (dead rows) give zero."""

    def __init__(self, text: TextConfig) -> None:
        super().__init__(text.vocab_size, text.hidden_size)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        rows = nn.functional.embedding(ids.clamp_min(0), self.weight).to(dtype)
        return rows.masked_fill((ids < 0).unsqueeze(1), 0.0)


@dataclass
class EngramTable:
    """One layer's table: weight [rows, width] E4M3, scale [rows, width / 32] uint8; host memory or the device."""

    weight: Tensor
    scale: Tensor


class EngramTables(nn.Module):
    """Token classes, hashes and tables of all Engram layers. It works on the device where the tables lie."""

    classes: Tensor
    """[V] int64: the class of every token id."""
    primes: Tensor
    """[layers, columns] int64."""
    offsets: Tensor
    """[layers, columns] int64: first table row of each column."""
    multipliers: Tensor
    """[layers, n] int64."""

    def __init__(self, text: TextConfig, classes: npt.NDArray[np.int64], tables: list[EngramTable]) -> None:
        super().__init__()
        self.tables = tables
        self.pad = pad_class(classes, text)
        self.depth = text.engram_max_ngram_size - 1
        self.register_buffer("classes", torch.from_numpy(classes), persistent=False)
        hashes = engram_hashes(text)
        assert len(hashes) == len(tables)
        for name, values in (
            ("primes", [np.concatenate(h.primes) for h in hashes]),
            ("offsets", [h.offsets for h in hashes]),
            ("multipliers", [h.multipliers for h in hashes]),
        ):
            self.register_buffer(name, torch.from_numpy(np.array(values, dtype=np.int64)), persistent=False)

    def token_classes(self, ids: Tensor, image: Tensor) -> Tensor:
        """Classes [T] int64 of ids [T]; image rows and dead rows take part in no n-gram."""
        return self.classes[ids.clamp_min(0)].masked_fill(image | (ids < 0), DEAD_CLASS)

    def rows(self, classes: Tensor, history: Tensor, slots: Tensor, positions: Tensor, starts: Tensor) -> list[Tensor]:
        """Table rows [T, columns] int64 of every Engram layer; history [slots, n - 1] int64 is not changed."""
        return [
            kernels.engram_hash(
                classes,
                history,
                self.primes[index],
                self.offsets[index],
                self.multipliers[index],
                slots,
                positions,
                starts,
                self.pad,
            )
            for index in range(len(self.tables))
        ]

    def look_up(self, rows: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The rows of each table side by side, [R, columns * width] in ``dtype``, for local rows."""
        return [
            kernels.engram_lookup(table.weight, table.scale, index, dtype)
            for table, index in zip(self.tables, rows, strict=True)
        ]
