"""The state of all requests: pools of fixed shape on the device (design section 7)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.engram import DEAD_CLASS
from octavo.kernels.paging import PAGE_TOKENS
from octavo.kernels.storage import packed_entry_bytes, packed_key_bytes
from octavo.model.config import TextConfig
from octavo.model.inputs import State


class Storage(enum.Enum):
    """How entries and index keys are stored. Packed and BF16 hold the same values."""

    PACKED = "packed"
    """Codes and scales of 4 bits and a bit a value: 288 and 68 bytes at the released sizes."""
    BF16 = "bf16"
    F32 = "f32"
    """Mode ``plain``, which quantises nothing."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How many requests and pages of 64 tokens there is room for, and how many pages one request may hold."""

    slots: int
    pages: int
    max_pages: int


class Pools:
    """All tensors that outlive a step. Contents of free pages and slots are never read."""

    def __init__(self, text: TextConfig, sizes: PoolSizes, storage: Storage, device: torch.device) -> None:
        self.sizes, self.storage = sizes, storage
        dtype = torch.float32 if storage is Storage.F32 else torch.bfloat16
        ratios = [text.compress_ratios[source] for source in text.kv_source_layer_ids]

        def pool(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def entry_pools(channels: int, packed_bytes: int) -> list[Tensor]:
            if storage is Storage.PACKED:
                return [pool(sizes.pages, PAGE_TOKENS // ratio, packed_bytes, dtype=torch.uint8) for ratio in ratios]
            return [pool(sizes.pages, PAGE_TOKENS // ratio, channels) for ratio in ratios]

        self.page_table = pool(sizes.slots, sizes.max_pages, dtype=torch.int32)
        self.rings = [pool(sizes.slots, text.sliding_window, text.head_dim) for _ in range(text.num_hidden_layers)]
        self.entries = entry_pools(text.head_dim, packed_entry_bytes(text.head_dim))
        self.keys = entry_pools(text.index_head_dim, packed_key_bytes(text.index_head_dim))
        pairs = sum(ratio == 2 for ratio in ratios)
        self.pending = [pool(sizes.slots, 2, text.head_dim, dtype=torch.float32) for _ in range(pairs)]
        depth = text.engram_max_ngram_size - 1
        self.history = torch.full((sizes.slots, depth), DEAD_CLASS, dtype=torch.int64, device=device)
        """[slots, n - 1]: the last Engram classes of a request, at position mod n - 1."""

    @property
    def bytes(self) -> int:
        tensors = [self.page_table, self.history, *self.rings, *self.entries, *self.keys, *self.pending]
        return sum(tensor.nbytes for tensor in tensors)

    def state(self, write_slots: Tensor, write_positions: Tensor, write_starts: Tensor) -> State:
        """The pools together with one step's write metadata, each [T] int32."""
        return State(
            write_slots,
            write_positions,
            write_starts,
            self.page_table,
            self.rings,
            self.entries,
            self.keys,
            self.pending,
        )


def pool_bytes(text: TextConfig, sizes: PoolSizes, storage: Storage) -> int:
    """Device bytes that :class:`Pools` of these sizes takes."""
    return Pools(text, sizes, storage, torch.device("meta")).bytes
