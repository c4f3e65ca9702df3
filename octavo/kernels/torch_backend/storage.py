"""Entries and index keys to and from their pools, packed uint8 or BF16.

The numbers are those of ``octavo.kernels.storage``. What is to be stored is returned, for a caller that writes some
rows only; what is loaded becomes BF16 without F32 in between, half the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quantise import (
    GROUP_Q4MX,
    GROUP_Q4NV,
    e8m0_to_float,
    pack_codes,
    quantise_q4mx,
    quantise_q4nv,
    round_q4mx,
    round_q4nv,
    unpack_codes,
)


def stored_entries(pool: Tensor, entries: Tensor) -> Tensor:
    """What the pool holds of entries [n, C] BF16 in Q4nv: bytes [n, C/2 + C/16], or values [n, C] BF16."""
    if pool.dtype != torch.uint8:
        return round_q4nv(entries)
    codes, scale = quantise_q4nv(entries)
    return torch.cat((pack_codes(codes), scale.view(torch.uint8)), dim=-1)


def stored_keys(pool: Tensor, keys: Tensor) -> Tensor:
    """As :func:`stored_entries`, in Q4mx: bytes [n, C/2 + C/32], or values."""
    if pool.dtype != torch.uint8:
        return round_q4mx(keys)
    codes, scale = quantise_q4mx(keys)
    return torch.cat((pack_codes(codes), scale), dim=-1)


def load_entries(pool: Tensor, page: Tensor, place: Tensor, channels: int) -> Tensor:
    """Entries at places of the pool, [*page.shape, C] BF16, in memory of their own."""
    stored = pool[page, place]
    if pool.dtype != torch.uint8:
        return stored
    codes, scale = stored.split((channels // 2, channels // GROUP_Q4NV), dim=-1)
    return _values(codes, scale.view(torch.float8_e4m3fn), GROUP_Q4NV)


def load_keys(pool: Tensor, page: Tensor, place: Tensor, channels: int) -> Tensor:
    """As :func:`load_entries`, from Q4mx."""
    stored = pool[page, place]
    if pool.dtype != torch.uint8:
        return stored
    codes, scale = stored.split((channels // 2, channels // GROUP_Q4MX), dim=-1)
    return _values(codes, e8m0_to_float(scale), GROUP_Q4MX)


def _values(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """E2M1 codes [..., C / 2] two a byte and scales [..., C / group] -> values [..., C] BF16, exact.

    The two exponent bits and the mantissa bit of E2M1, put on the lowest exponent bits of E4M3, mean 64 times less.
    """
    codes = unpack_codes(packed)
    values = ((codes & 7) << 2 | (codes & 8) << 4).view(torch.float8_e4m3fn).to(torch.bfloat16).mul_(64.0)
    values.unflatten(-1, (-1, group)).mul_(scale.to(torch.bfloat16).unsqueeze(-1))
    return values
