"""What the launches of the kernels of ``experts`` share: widths, views of packed weights, numbers of programs,
and the gates."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.kernels.triton_backend.device import multiprocessors
from octavo.kernels.triton_backend.expert_products import gate_pairs
from octavo.kernels.triton_backend.expert_routing import BLOCK

COLUMNS = 1024
"""Channels of a row that a program of elementwise kernels takes."""
_BY_ROWS = 8
"""Programs on a multiprocessor for each of a row's parts, of kernels that take some rows after the others."""


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


def by_rows(results: Tensor, rows: int, columns: int) -> tuple[int, int]:
    """Programs of a kernel that makes results [P, C], ``rows`` rows at a time and so many columns each."""
    pairs, channels = results.shape
    return min(triton.cdiv(pairs, rows), _BY_ROWS * multiprocessors(results.device)), triton.cdiv(channels, columns)


def hidden_of_parts(
    parts: Tensor, weights: Tensor, order: Tensor, totals: Tensor, limit: float, rows: int, columns: int
) -> Tensor:
    """parts [P, 2, I] BF16, gate and up of each place of ``order`` -> hidden [P, I], as ``gate_pairs`` makes it with
    so many ``rows`` and ``columns`` at a time."""
    hidden = parts.new_empty(parts.shape[0], parts.shape[2])
    gate_pairs[by_rows(hidden, rows, columns)](
        parts,
        weights,
        order,
        totals,
        hidden,
        limit,
        channels=parts.shape[2],
        ROWS=rows,
        COLUMNS=columns,
        launch_pdl=True,
    )
    return hidden
