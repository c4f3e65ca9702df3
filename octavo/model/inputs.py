"""What prelude and body take and give: registered dataclasses of explicit tensors (design section 2).

Shape letters: R local rows, T global rows (equal to R on one rank), D hidden size, S streams, W window,
C head_dim. Row metadata and write metadata are two types on purpose: under context parallelism the first is
dealt over the ranks, the second stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tokens:
    """What the prelude is given: this step's tokens, all of them in global order."""

    ids: Tensor
    """[T] int64, -1 on dead rows."""
    slots: Tensor
    """[T] int32: the request's slot, -1 on dead rows."""
    positions: Tensor
    """[T] int32: the position in its request, -1 on dead rows."""
    starts: Tensor
    """[T] int32: the first position that the row's request computes in this step, -1 on dead rows."""
    live: Tensor
    """[T] bool."""
    image: Tensor
    """[T] bool: the token belongs to an image span."""


@dataclass
class Rows:
    """This step's rows; the first dimension of every tensor is rows."""

    embeds: Tensor
    """[R, D] BF16, or F32 in mode ``plain``: token embeddings, zero on dead rows."""
    slots: Tensor
    """[R] int32: the request's slot, -1 on dead rows."""
    positions: Tensor
    """[R] int32: the position in its request, -1 on dead rows."""
    live: Tensor
    """[R] bool."""
    image: Tensor
    """[R] bool: the row belongs to an image span."""
    engram: list[Tensor]
    """One [R, columns * width] for each Engram layer, in embeds' dtype: looked-up table rows."""


@dataclass
class State:
    """Write metadata of this step and the pools, with one tensor per owning layer."""

    write_slots: Tensor
    """[T] int32, rows in global order, -1 past the last live row."""
    write_positions: Tensor
    """[T] int32, -1 past the last live row."""
    write_starts: Tensor
    """[T] int32: the first position that the row's request computes in this step."""
    page_table: Tensor
    """[slots, max_pages] int32: the request's pages of 64 tokens; one id serves all sources."""
    rings: list[Tensor]
    """Per layer [slots, W, C]: the last W latents, place = position mod W."""
    entries: list[Tensor]
    """Per KV source [pages, 64 / ratio, C]."""
    keys: list[Tensor]
    """Per KV source [pages, 64 / ratio, index_head_dim]."""
    pending: list[Tensor]
    """Per KV source of ratio 2 [slots, 2, C] F32: value and gate of a token that waits for its partner."""


@dataclass
class Output:
    """What the body computes."""

    hidden: Tensor
    """[R, D]: collapsed and normed rows, ready for the head."""
    features: list[Tensor]
    """One [R, D] for each draft target layer: the stream mean of its input."""


for _dataclass in (Tokens, Rows, State, Output):
    torch.export.register_dataclass(_dataclass, serialized_type_name=f"octavo.{_dataclass.__name__}")
