"""Engram: hashed n-grams of token classes look up table rows that gate into the streams (spec/model.md 3.11)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.kernels.numerics import mean_of_squares, sigmoid
from octavo.kernels.operator import CARRIED, DeadRows, Gives, Need, Returns, operator
from octavo.kernels.paging import step_layout
from octavo.kernels.quantise import dequantise_q8

DEAD_CLASS = -1
"""Class of a token that takes part in no n-gram (image spans, padding)."""


@operator(
    # Row by row, but its reader needs all rows in global order: computed there, nothing has to be gathered.
    arguments={"ids": Need.ORDERED, "image": Need.ORDERED, "classes": Need.ANY},
    results=(Returns(Gives.EVERY, DeadRows.MINUS_ONE),),
    source="spec/model.md 3.11",
)
def token_classes(ids: Tensor, image: Tensor, classes: Tensor) -> Tensor:
    """Classes [T] int64 of ids [T] int64; DEAD_CLASS where image [T] bool is set and for ids below zero.

    classes [V] int64 holds the class of every id.
    """
    return classes[ids.clamp_min(0)].masked_fill(image | (ids < 0), DEAD_CLASS)


@token_classes.fake
def _token_classes(ids: Tensor, image: Tensor, classes: Tensor) -> Tensor:
    return ids.new_empty(ids.shape)


@operator(
    arguments={
        "classes": Need.ORDERED,
        "history": Need.ANY,
        "primes": Need.ANY,
        "offsets": Need.ANY,
        "multipliers": Need.ANY,
        "write_slots": Need.ORDERED,
        "write_positions": Need.ORDERED,
        "write_starts": Need.ORDERED,
    },
    results=(Returns(Gives.EVERY, DeadRows.CARRIED),),
    source="spec/model.md 3.11",
    before_write=("history",),
)
def engram_hash(
    classes: Tensor,
    history: Tensor,
    primes: Tensor,
    offsets: Tensor,
    multipliers: Tensor,
    write_slots: Tensor,
    write_positions: Tensor,
    write_starts: Tensor,
    pad_class: int,
) -> Tensor:
    """Table rows of every token's n-grams, [T, (n - 1) heads] int64, order-major.

    classes [T] int64 (DEAD_CLASS inside image spans), history [slots, n - 1] int64 (class at position mod n - 1,
    before this step), primes and offsets [(n - 1) heads] int64, multipliers [n] int64, write_* [T] int32. A look-back
    that crosses the start of the sequence or a dead token pads, and so do all deeper ones.
    """
    slots, depth = history.shape
    start, offset = step_layout(write_slots, write_positions, write_starts, slots)
    slot = write_slots.long().clamp_min(0)
    terms = []
    unbroken = torch.ones_like(classes, dtype=torch.bool)
    for back in range(depth + 1):
        wanted = write_positions.long() - back
        here = wanted >= start[slot]
        rows = torch.where(here, wanted + offset[slot], 0)
        found = torch.where(here, classes[rows], history[slot, wanted % depth])
        unbroken = unbroken & (wanted >= 0) & (found != DEAD_CLASS)
        terms.append(torch.where(unbroken, found, pad_class) * multipliers[back])
    mixed, hashes = terms[0], []
    heads = primes.shape[0] // depth
    for order, term in enumerate(terms[1:]):
        mixed = mixed ^ term
        part = slice(order * heads, (order + 1) * heads)
        hashes.append(mixed.unsqueeze(1) % primes[part] + offsets[part])
    return torch.cat(hashes, dim=1)


@engram_hash.fake
def _engram_hash(
    classes: Tensor,
    history: Tensor,
    primes: Tensor,
    offsets: Tensor,
    multipliers: Tensor,
    write_slots: Tensor,
    write_positions: Tensor,
    write_starts: Tensor,
    pad_class: int,
) -> Tensor:
    return classes.new_empty(classes.shape[0], primes.shape[0])


@operator(
    arguments={"table": Need.ANY, "scale": Need.ANY, "rows": Need.ROWS}, results=(CARRIED,), source="spec/model.md 3.11"
)
def engram_lookup(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantised table rows side by side: rows [R, columns] int64 -> [R, columns * width] in ``dtype``.

    table [entries, width] E4M3, scale [entries, width / 32] uint8; they may lie in host memory while rows lie on a
    device: then the device waits for the host.
    """
    index = rows.to(table.device)
    return dequantise_q8(table[index], scale[index]).flatten(1).to(dtype).to(rows.device)


@engram_lookup.fake
def _engram_lookup(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows.shape[0], rows.shape[1] * table.shape[1], dtype=dtype, device=rows.device)


@operator(
    arguments={
        "streams": Need.ROWS,
        "projected": Need.ROWS,
        "image": Need.ROWS,
        "q_weight": Need.ANY,
        "k_weight": Need.ANY,
    },
    results=(CARRIED,),
    source="spec/model.md 3.11",
    compilable=True,
)
def engram_gate(
    streams: Tensor, projected: Tensor, image: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float
) -> Tensor:
    """Add the looked-up value to every stream as far as its key agrees: [R, S, D] in streams' dtype.

    streams [R, S, D], projected [R, (S + 1) D] (S keys, one value), image [R] bool (those rows stay), q_weight and
    k_weight [S, D] BF16. F32 maths.
    """
    keys, value = projected.unflatten(1, (-1, streams.shape[2])).split((streams.shape[1], 1), dim=1)
    gate = gates(streams, keys, q_weight, k_weight, epsilon)
    added = (streams.float() + gate.unsqueeze(-1) * value.float()).to(streams.dtype)
    return torch.where(image[:, None, None], streams, added).contiguous()


@engram_gate.fake
def _engram_gate(
    streams: Tensor, projected: Tensor, image: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float
) -> Tensor:
    return streams.new_empty(streams.shape)


def gates(streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float) -> Tensor:
    """Agreement of streams and keys, both [R, S, D]: sigmoid of the signed root of a normed dot, [R, S] F32."""
    x, key = streams.float(), keys.float()
    dot = (x * key * q_weight.float() * k_weight.float()).contiguous().sum(-1)
    x_scale = torch.rsqrt(mean_of_squares(x) + epsilon).squeeze(-1)
    key_scale = torch.rsqrt(mean_of_squares(key) + epsilon).squeeze(-1)
    agreement = dot * x_scale * key_scale / math.sqrt(x.shape[-1])
    return sigmoid(agreement.sign() * agreement.abs().clamp_min(1e-6).sqrt())
