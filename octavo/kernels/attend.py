"""Attention over the window and the selected entries, and the ring that carries the window between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.numerics import exact_matmul
from octavo.kernels.operator import DeadRows, Gives, Need, Returns, operator
from octavo.kernels.paging import entry_address, step_layout
from octavo.kernels.rope import turn
from octavo.kernels.storage import load_entries

KEY_BLOCK = 64
"""Keys are taken in blocks of 64: probabilities round to BF16 against the running maximum of a block."""
_ROW_CHUNK = 64
"""Rows whose keys are gathered at once; it bounds memory and changes no bit."""


@operator(
    arguments={
        "query": Need.ROWS,
        "latents": Need.ORDERED,
        "ring": Need.ANY,
        "sink": Need.ANY,
        "frequencies": Need.ANY,
        "slots": Need.ROWS,
        "positions": Need.ROWS,
        "write_slots": Need.ORDERED,
        "write_positions": Need.ORDERED,
        "write_starts": Need.ORDERED,
        "page_table": Need.ANY,
        "entries": Need.ANY,
        "selected": Need.ROWS,
    },
    results=(Returns(Gives.ROWS, DeadRows.ZERO),),
    source="spec/model.md 3.4, 3.5",
    before_write=("ring",),
)
def attend(
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
    """One softmax over the window, the selected entries and the sink: [R, H, head_dim] in query's dtype.

    query [R, H, head_dim] before its rotary embedding, latents [T, head_dim] (this step's rows in global order), ring
    [slots, W, head_dim] (the window before this step), sink [H] F32, frequencies [rope_dim / 2] F32, entries [pages,
    64 / ratio, head_dim] or packed, selected [R, top_k] int32 logical entries, -1 padded; slots, positions [R] and
    write_* [T] int32, page_table [slots, max_pages] int32. entries and selected are None in layers that read the window
    alone.

    Queries are turned by their positions, outputs turned back by them (3.4): F32 maths on values in query's dtype,
    which it has again behind either turn.

    Window positions p-W+1..p from the request's step start on come from latents, older ones from the ring. Key
    order: window ascending in exactly W left-justified places, then selected; blocks of 64 depend on it. The sink
    is a logit without value. Dead rows and rows without a key give zero.
    """
    rows = query.shape[0]
    start, offset = step_layout(write_slots, write_positions, write_starts, ring.shape[0])
    attended = []
    for low in range(0, rows, _ROW_CHUNK):
        part = slice(low, low + _ROW_CHUNK)
        keys, valid = _window_keys(latents, ring, slots[part], positions[part], start, offset)
        if entries is not None and selected is not None:
            page, place = entry_address(selected[part], _safe(slots[part])[:, None], page_table, entries.shape[1])
            found = load_entries(entries, page, place, query.shape[-1], query.dtype)
            keys = torch.cat((keys, found), dim=1)
            valid = torch.cat((valid, (selected[part] >= 0) & (positions[part] >= 0)[:, None]), dim=1)
        turned = turn(query[part], positions[part], frequencies)
        result = sink_attention(turned, keys, valid, sink)
        attended.append(turn(result, positions[part], frequencies, inverse=True))
    return torch.cat(attended) if attended else query.new_empty(query.shape)


@attend.fake
def _attend(
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
    return query.new_empty(query.shape)


@operator(
    arguments={
        "ring": Need.ANY,
        "latents": Need.ORDERED,
        "write_slots": Need.ORDERED,
        "write_positions": Need.ORDERED,
    },
    results=(),
    mutates=("ring",),
    source="spec/model.md 3.5",
    capturable=False,
)
def commit_window(ring: Tensor, latents: Tensor, write_slots: Tensor, write_positions: Tensor) -> None:
    """After a step, keep the last W rows of each request: ring [slots, W, ...], latents [T, ...], write_* [T] int32.

    A row's place is its position mod W. Of more than W rows of a request only the last W are written; dead rows
    write nothing. The Engram history is such a ring too, of token classes.
    """
    window = ring.shape[1]
    rows = write_positions.shape[0]
    later = torch.full_like(write_slots, -1)
    if rows > window:
        later[:-window] = torch.where(write_positions[window:] >= 0, write_slots[window:], -1)
    kept = ((write_positions >= 0) & (later != write_slots)).nonzero().squeeze(1)
    ring[write_slots[kept].long(), write_positions[kept].long() % window] = latents[kept]


@commit_window.fake
def _commit_window(ring: Tensor, latents: Tensor, write_slots: Tensor, write_positions: Tensor) -> None:
    return None


def sink_attention(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """Attention of every row over its own keys with one softmax and a sink, keys in blocks of 64.

    query [R, H, C], keys [R, K, C] (also the values), valid [R, K] bool, sink [H] -> [R, H, C] in query's dtype.
    Scores and the running maximum are F32, probabilities have query's dtype in the numerator and F32 in the
    denominator. Invalid keys are replaced, scores and values: zero times NaN is NaN.
    """
    rows, heads, channels = query.shape
    scale = channels**-0.5
    missing = -keys.shape[1] % KEY_BLOCK
    keys = torch.nn.functional.pad(keys.masked_fill(~valid.unsqueeze(-1), 0.0), (0, 0, 0, missing))
    valid = torch.nn.functional.pad(valid, (0, missing))
    maximum = torch.full((rows, heads, 1), -1e30, device=query.device)
    denominator = torch.zeros_like(maximum)
    numerator = torch.zeros(rows, heads, channels, device=query.device)
    for block, valid_block in zip(keys.split(KEY_BLOCK, 1), valid.split(KEY_BLOCK, 1), strict=True):
        scores = exact_matmul(query, block).float() * scale
        scores = scores.masked_fill(~valid_block.unsqueeze(1), -torch.inf)
        previous = maximum
        maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        rescale = torch.exp(previous - maximum)
        probabilities = torch.exp(scores - maximum)
        denominator = denominator * rescale + probabilities.sum(-1, keepdim=True)
        weighted = exact_matmul(probabilities.to(query.dtype), block.transpose(-1, -2)).float()
        numerator = numerator * rescale + weighted
    denominator = denominator + torch.exp(sink.float().view(1, heads, 1) - maximum)
    attended = numerator / denominator
    return attended.masked_fill(~valid.any(1).view(rows, 1, 1), 0.0).to(query.dtype)


def _window_keys(
    latents: Tensor, ring: Tensor, slots: Tensor, positions: Tensor, start: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """The W window places of each row, [R, W, C], and which of them hold a key, [R, W]."""
    window = ring.shape[1]
    slot = _safe(slots)[:, None]
    first = (positions.long() - window + 1).clamp_min(0)[:, None]
    wanted = first + torch.arange(window, device=positions.device)
    valid = wanted <= positions[:, None]
    here = valid & (wanted >= start[slot])
    row = torch.where(here, wanted + offset[slot], 0)
    older = ring[slot, wanted % window]
    return torch.where(here.unsqueeze(-1), latents[row], older), valid


def _safe(slots: Tensor) -> Tensor:
    """Slots as indices; a dead row's slot may be anything below zero."""
    return slots.long().clamp_min(0)
