"""``attend`` as batched products over gathered keys, and one softmax over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.attend import attend
from octavo.kernels.paging import entry_address, step_layout
from octavo.kernels.torch_backend.rope import turn
from octavo.kernels.torch_backend.storage import load_entries

_ROW_CHUNK = 1024
"""Rows whose keys are gathered at once: 0.7 GB at 640 keys of 512 channels, and half of that for F32 scores."""


@attend.implement("torch")
def attend_torch(
    query: Tensor,
    latents: Tensor,
    ring: Tensor,
    sink: Tensor,
    frequencies: Tensor,
    slots: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    write_positions: Tensor,
    write_starts: Tensor,
    page_table: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
) -> Tensor:
    """See the reference; query is BF16 and pools are packed or BF16.

    Scores, their softmax and sums are F32. Probabilities round to BF16 against the maximum over all keys of the row,
    not over those of the blocks so far.
    """
    live = positions >= 0
    slots = torch.where(live, slots, 0).long()
    start, offset = step_layout(write_slots, write_positions, write_starts, ring.shape[0])
    attended = query.new_empty(query.shape)
    for low in range(0, query.shape[0], _ROW_CHUNK):
        part = slice(low, low + _ROW_CHUNK)
        found = [_window(latents, ring, slots[part], positions[part], start, offset)]
        if entries is not None and selected is not None:
            found.append(_chosen(entries, selected[part], live[part], slots[part], page_table, query.shape[2]))
        turned = turn(query[part], positions[part], frequencies)
        result = _softmax_attention(turned, found, sink)
        attended[part] = turn(result, positions[part], frequencies, inverse=True)
    return attended


def _window(
    latents: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, start: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """The W window places of each row, [R, W, C], and which of them hold a key, [R, W]."""
    window, slots = ring.shape[1], slots.unsqueeze(1)
    first = (positions.long() - window + 1).clamp_min(0).unsqueeze(1)
    wanted = first + torch.arange(window, device=positions.device)
    valid = wanted <= positions.unsqueeze(1)
    here = valid & (wanted >= start[slots])
    keys = torch.where(
        here.unsqueeze(2), latents[torch.where(here, wanted + offset[slots], 0)], ring[slots, wanted % window]
    )
    return keys, valid


def _chosen(
    entries: Tensor, selected: Tensor, live: Tensor, slots: Tensor, page_table: Tensor, channels: int
) -> tuple[Tensor, Tensor]:
    """The selected entries of each row, [R, top_k, C], and which of the places hold one, [R, top_k]."""
    valid = (selected >= 0) & live.unsqueeze(1)
    chosen = torch.where(valid, selected, 0)
    page, place = entry_address(chosen, slots.unsqueeze(1), page_table, entries.shape[1])
    return load_entries(entries, page, place, channels), valid


def _softmax_attention(query: Tensor, found: list[tuple[Tensor, Tensor]], sink: Tensor) -> Tensor:
    """Attention of every row over its own keys with one softmax and a sink.

    query [R, H, C], found: keys [R, K, C] (also the values; overwritten) and valid [R, K] bool, sink [H] -> [R, H, C].
    """
    for keys, usable in found:
        keys.masked_fill_(~usable.unsqueeze(2), 0.0)
    valid = torch.cat([usable for _, usable in found], dim=1)
    scores = torch.cat([_product(query, keys.transpose(1, 2)) for keys, _ in found], dim=2)
    scores = scores.mul_(query.shape[2] ** -0.5).masked_fill_(~valid.unsqueeze(1), -torch.inf)
    maximum = scores.amax(2, keepdim=True).clamp_min(-1e30)
    probabilities = scores.sub_(maximum).exp_()
    denominator = probabilities.sum(2, keepdim=True) + torch.exp(sink.float().view(1, -1, 1) - maximum)
    shares = probabilities.to(query.dtype).split([keys.shape[1] for keys, _ in found], dim=2)
    numerator = _product(shares[0], found[0][0])
    for share, (keys, _) in zip(shares[1:], found[1:], strict=True):
        numerator += _product(share, keys)
    return (numerator / denominator).masked_fill(~valid.any(1).view(-1, 1, 1), 0.0).to(query.dtype)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """[R, M, K] @ [R, K, N], both BF16, accumulated and returned in F32: scores of BF16 would be off by whole units."""
    if x.is_cuda:
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())  # the CPU has no product of two dtypes
