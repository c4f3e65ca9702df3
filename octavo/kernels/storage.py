"""Entries and index keys in their pools: packed codes with scales, or plain values. Both hold the same numbers.

A pool's dtype says which: uint8 is packed, BF16 and F32 are plain. A packed entry is its E2M1 codes, two a byte, then
its scales: an entry in Q4nv has an E4M3 scale for each 16 channels, a key in Q4mx a power of two for each 32
(spec/model.md 4). Dequantised values have at most six significant bits, so BF16 holds them exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quantise import (
    GROUP_Q4MX,
    GROUP_Q4NV,
    dequantise_q4mx,
    dequantise_q4nv,
    pack_codes,
    quantise_q4mx,
    quantise_q4nv,
    round_q4mx,
    round_q4nv,
    unpack_codes,
)


def packed_entry_bytes(channels: int) -> int:
    return channels // 2 + channels // GROUP_Q4NV


def packed_key_bytes(channels: int) -> int:
    return channels // 2 + channels // GROUP_Q4MX


def store_entries(pool: Tensor, page: Tensor, place: Tensor, entries: Tensor) -> None:
    """Quantise entries [n, C] to Q4nv and write them to places of the pool; an F32 pool takes them as they are."""
    if pool.dtype == torch.uint8:
        codes, scale = quantise_q4nv(entries)
        pool[page, place] = torch.cat((pack_codes(codes), scale.view(torch.uint8)), dim=-1)
    else:
        pool[page, place] = round_q4nv(entries)


def load_entries(pool: Tensor, page: Tensor, place: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Entries at places of the pool, of the index tensors' shape with C channels behind, in ``dtype``."""
    stored = pool[page, place]
    if pool.dtype != torch.uint8:
        return stored
    codes, scale = stored.split((channels // 2, channels // GROUP_Q4NV), dim=-1)
    return dequantise_q4nv(unpack_codes(codes), scale.contiguous().view(torch.float8_e4m3fn)).to(dtype)


def store_keys(pool: Tensor, page: Tensor, place: Tensor, keys: Tensor) -> None:
    """As :func:`store_entries`, in Q4mx."""
    if pool.dtype == torch.uint8:
        codes, scale = quantise_q4mx(keys)
        pool[page, place] = torch.cat((pack_codes(codes), scale), dim=-1)
    else:
        pool[page, place] = round_q4mx(keys)


def load_keys(pool: Tensor, page: Tensor, place: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """As :func:`load_entries`, from Q4mx."""
    stored = pool[page, place]
    if pool.dtype != torch.uint8:
        return stored
    codes, scale = stored.split((channels // 2, channels // GROUP_Q4MX), dim=-1)
    return dequantise_q4mx(unpack_codes(codes), scale.contiguous()).to(dtype)
