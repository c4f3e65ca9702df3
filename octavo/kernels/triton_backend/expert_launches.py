"""What the launches of the kernels of ``experts`` share: widths, views of packed weights, numbers of programs."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.triton_backend.device import multiprocessors
from octavo.kernels.triton_backend.expert_routing import BLOCK

COLUMNS = 1024
"""Channels of a row that a program of elementwise kernels takes."""


def padded_width(channels: int) -> int:
    """Of rows in fragment order, which permutes whole blocks."""
    block: int = BLOCK.value
    return -(-channels // block) * block


def programs(at_once: int, tasks: int, device: torch.device) -> tuple[int]:
    """Enough programs to fill the device; each takes one task after the other."""
    return (min(tasks, at_once * multiprocessors(device)),)


def words(packed: Tensor) -> Tensor:
    """Eight codes a word: [..., C/2] uint8 -> [..., C/8] int32, the same memory."""
    return packed.contiguous().view(torch.int32)


def scale_words(scales: Tensor) -> Tensor:
    """Four scales a word where rows have whole words: [..., C/32] uint8 -> [..., C/128] int32, the same memory."""
    return scales.contiguous().view(torch.int32) if scales.shape[-1] % 4 == 0 else scales.contiguous()
