"""Widths of models, and random tensors of these widths for the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.paging import PAGE_TOKENS
from octavo.kernels.rope import yarn_frequencies
from tests.kernels.batches import PAGES, Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Widths of a model. No number of rows stands here."""

    name: str
    hidden: int
    streams: int
    heads: int
    head_dim: int
    rotary: int
    groups: int
    rank: int
    window: int
    index_heads: int
    index_dim: int
    top_k: int
    top_blocks: int
    block_size: int
    experts: int
    chosen: int
    inner: int
    engram_heads: int
    engram_width: int


MINI = Size(
    name="mini",
    hidden=128,
    streams=4,
    heads=4,
    head_dim=64,
    rotary=32,
    groups=2,
    rank=32,
    window=16,
    index_heads=8,
    index_dim=64,
    top_k=8,
    top_blocks=3,
    block_size=4,
    experts=8,
    chosen=2,
    inner=64,
    engram_heads=2,
    engram_width=32,
)
"""The mini checkpoint's."""
WIDE = Size(
    name="wide",
    hidden=512,
    streams=4,
    heads=6,
    head_dim=128,
    rotary=64,
    groups=2,
    rank=40,
    window=40,
    index_heads=12,
    index_dim=96,
    top_k=70,
    top_blocks=7,
    block_size=8,
    experts=12,
    chosen=5,
    inner=160,
    engram_heads=3,
    engram_width=96,
)
"""Long enough for vector bodies and for a second thread, with tails, ragged tiles and two blocks of keys."""
TRUE = Size(
    name="true",
    hidden=5120,
    streams=4,
    heads=16,
    head_dim=512,
    rotary=64,
    groups=2,
    rank=1024,
    window=128,
    index_heads=32,
    index_dim=128,
    top_k=512,
    top_blocks=2048,
    block_size=8,
    experts=4,
    chosen=2,
    inner=2048,
    engram_heads=8,
    engram_width=256,
)
"""The released model's widths, with fewer heads and experts: those only repeat the same work."""


class Draw:
    """Random tensors of one case, reproducible by seed."""

    def __init__(self, batch: Batch, size: Size, dtype: torch.dtype, seed: int) -> None:
        self.batch, self.size, self.dtype = batch, size, dtype
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random) * gain).to(dtype)

    def rows(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Activations [R, ...] in the mode's dtype, zero on dead rows."""
        values = self.normal(self.batch.rows, *shape, dtype=dtype or self.dtype)
        return values.masked_fill(~self.batch.live.view(-1, *(1,) * len(shape)), 0.0)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random).to(dtype)

    def norm(self, *shape: int) -> Tensor:
        """Norm weights BF16, around one."""
        return (1.0 + 0.2 * self.normal(*shape)).to(torch.bfloat16)

    def matrix(self, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """A weight that keeps the size of its input."""
        return self.normal(outputs, inputs, dtype=dtype, gain=inputs**-0.5)

    def tiled(self, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """F8 weight and its tile scales."""
        codes = self.normal(outputs, inputs, gain=inputs**-0.5 * 64).to(torch.float8_e4m3fn)
        return codes, self.integers(119, 124, -(-outputs // 32), -(-inputs // 32), dtype=torch.uint8)

    def packed(self, count: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """F4 weights of ``count`` experts and their row scales."""
        codes = self.integers(0, 256, count, outputs, inputs // 2, dtype=torch.uint8)
        return codes, self.integers(121, 124, count, outputs, inputs // 32, dtype=torch.uint8)

    def frequencies(self) -> Tensor:
        return yarn_frequencies(self.size.rotary, 160000.0, 16.0, 32.0, 1.0, 4096)

    def pool(self, ratio: int, width: int) -> Tensor:
        return self.normal(PAGES, PAGE_TOKENS // ratio, width, dtype=self.dtype)

    def choices(self, places: int, visible: Tensor) -> Tensor:
        """[R, places] int32: distinct numbers below each row's ``visible``, ascending, -1 padded."""
        chosen = torch.full((self.batch.rows, places), -1, dtype=torch.int32)
        for row, count in enumerate(visible.tolist()):
            taken = torch.randperm(count, generator=self.random)[:places].sort().values
            chosen[row, : taken.shape[0]] = taken.int()
        return chosen
