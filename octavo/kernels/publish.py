"""Compressed entries and index keys of a KV source: pairing, norm, key projection, quantisation, writing."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.norm import rms
from octavo.kernels.numerics import exact_matmul
from octavo.kernels.operator import Need, operator
from octavo.kernels.paging import entry_address, ratio_of
from octavo.kernels.rope import turn
from octavo.kernels.storage import store_entries, store_keys


@operator(
    arguments={
        "values": Need.ORDERED,
        "gates": Need.ORDERED,
        "norm": Need.ANY,
        "wk": Need.ANY,
        "k_norm": Need.ANY,
        "frequencies": Need.ANY,
        "write_slots": Need.ORDERED,
        "write_positions": Need.ORDERED,
        "write_starts": Need.ORDERED,
        "page_table": Need.ANY,
        "entries": Need.ANY,
        "keys": Need.ANY,
        "pending": Need.ANY,
    },
    results=(),
    mutates=("entries", "keys", "pending"),
    source="spec/model.md 3.6, 3.7",
    capturable=False,
)
def publish(
    values: Tensor,
    gates: Tensor | None,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    write_slots: Tensor,
    write_positions: Tensor,
    write_starts: Tensor,
    page_table: Tensor,
    entries: Tensor,
    keys: Tensor,
    pending: Tensor | None,
    epsilon: float,
) -> None:
    """Append this step's entries and index keys. Dead rows write nothing.

    Ratio 1: values [T, head_dim] BF16 are one entry each; gates and pending are None. Ratio 2: values and gates
    [T, head_dim] F32; the two tokens of a pair are weighted by a softmax of their gates per channel, and a first
    half without its partner waits in pending [slots, 2, head_dim] F32 (value, gate).

    norm [head_dim], wk [index_head_dim, head_dim], k_norm [index_head_dim] BF16; write_* [T] int32;
    page_table [slots, max_pages] int32; entries [pages, 64 / ratio, head_dim] and keys [pages, 64 / ratio,
    index_head_dim] BF16, packed uint8 (``octavo.kernels.storage``), or F32 in mode ``plain``.
    """
    ratio = ratio_of(entries)
    live = write_positions >= 0
    if gates is not None and pending is not None:
        compressed, rows = _pair(values, gates, write_slots, write_positions, write_starts, pending)
        compressed = compressed.to(torch.float32 if entries.dtype == torch.float32 else torch.bfloat16)
    else:
        rows = live.nonzero().squeeze(1)
        compressed = values[rows]
    compressed = rms(compressed, norm, epsilon)
    entry = write_positions[rows] // ratio
    key = rms(exact_matmul(compressed, wk).to(compressed.dtype), k_norm, epsilon)
    page, place = entry_address(entry, write_slots[rows], page_table, entries.shape[1])
    store_entries(entries, page, place, turn(compressed, entry * ratio, frequencies))
    store_keys(keys, page, place, turn(key, entry * ratio, frequencies))


@publish.fake
def _publish(
    values: Tensor,
    gates: Tensor | None,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    write_slots: Tensor,
    write_positions: Tensor,
    write_starts: Tensor,
    page_table: Tensor,
    entries: Tensor,
    keys: Tensor,
    pending: Tensor | None,
    epsilon: float,
) -> None:
    return None


def _pair(
    values: Tensor, gates: Tensor, slots: Tensor, positions: Tensor, starts: Tensor, pending: Tensor
) -> tuple[Tensor, Tensor]:
    """Completed pairs of this step, F32, and the rows of their second halves; unpaired first halves go to pending."""
    halves = torch.stack((values, gates), dim=1)
    odd = positions % 2 == 1  # a dead row's -1 counts as odd in torch, hence the test for life below
    second = (odd & (positions >= 0)).nonzero().squeeze(1)
    slot = slots[second].long()
    first_is_here = (positions[second] > starts[second])[:, None, None]
    first = torch.where(first_is_here, halves[(second - 1).clamp_min(0)], pending[slot])
    (a0, g0), (a1, g1) = first.unbind(1), halves[second].unbind(1)
    top = torch.maximum(g0, g1)
    e0, e1 = torch.exp(g0 - top), torch.exp(g1 - top)
    total = e0 + e1
    compressed = e0 / total * a0 + e1 / total * a1

    followed = torch.zeros_like(odd)
    followed[:-1] = (slots[1:] == slots[:-1]) & (positions[1:] >= 0)
    waiting = (~odd & ~followed).nonzero().squeeze(1)
    pending[slots[waiting].long()] = halves[waiting]
    return compressed, second
