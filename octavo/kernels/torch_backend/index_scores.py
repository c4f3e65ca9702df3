"""Scores of the indexer, in pieces as large as memory allows and after one wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.paging import entry_address, ratio_of
from octavo.kernels.select import visible_entries
from octavo.kernels.torch_backend.storage import load_keys

PIECE = 1 << 28
"""Products, and keys where each row has its own, that a piece may hold: 512 MiB in BF16."""
SHARED_FROM = 16
"""Rows of a request from which on its keys are gathered once for all of them, instead of once for each."""


def scored_rows(
    query: Tensor, weights: Tensor, keys: Tensor, page_table: Tensor, slots: Tensor, positions: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every row that sees an entry, once: (rows [r] int64, scores [r, n] BF16, -inf where invisible).

    Arguments as in :func:`octavo.kernels.select.entry_scores`; query and weights are BF16. Entry j is column j, and n
    covers the rows of the piece. Sums over channels and heads are F32 and round to BF16 once.
    """
    heads = query.shape[1]
    visible = visible_entries(positions, ratio_of(keys))
    none = torch.iinfo(torch.int32).max
    by_slot, order = torch.where(visible > 0, slots, none).sort(stable=True)
    layout = torch.stack((by_slot, visible[order])).cpu()  # the only wait
    host_slots, counts = layout[:, layout[0] != none]

    single = []
    begin = 0
    for rows_of_slot in host_slots.unique_consecutive(return_counts=True)[1].tolist():
        end = begin + rows_of_slot
        if rows_of_slot < SHARED_FROM:
            single.append(slice(begin, end))
        else:
            most = int(counts[begin:end].max())
            found = _keys(keys, slots[order[begin : begin + 1]], most, page_table, query.shape[2])[0]
            step = max(1, PIECE // (heads * most))
            for low in range(begin, end, step):
                rows = order[low : min(low + step, end)]
                part = found[: int(counts[low : low + rows.shape[0]].max())]
                yield rows, _scores(query[rows], weights[rows], part, visible[rows])
        begin = end
    if single:
        counts = torch.cat([counts[part] for part in single]).sort().values
        few = torch.cat([order[part] for part in single])
        few = few[visible[few].argsort()]
        for low, high in _cut(counts.tolist(), PIECE // (heads + query.shape[2])):
            rows = few[low:high]
            found = _keys(keys, slots[rows], int(counts[high - 1]), page_table, query.shape[2])
            yield rows, _scores(query[rows], weights[rows], found, visible[rows])


def _cut(counts: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of ascending counts such that length times largest count is at most ``most``, or the length is one."""
    low = 0
    for high in range(1, len(counts) + 1):
        if high == len(counts) or (high + 1 - low) * counts[high] > most:
            yield low, high
            low = high


def _keys(keys: Tensor, slots: Tensor, count: int, page_table: Tensor, channels: int) -> Tensor:
    """The first ``count`` index keys of each slot: slots [s] -> [s, count, C] BF16."""
    entries = torch.arange(count, device=slots.device)
    page, place = entry_address(entries, slots.unsqueeze(1), page_table, keys.shape[1])
    return load_keys(keys, page, place, channels)


def _scores(query: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """query [r, heads, C], weights [r, heads], keys [n, C] of all rows or [r, n, C], visible [r] -> [r, n] BF16."""
    weighted = torch.matmul(query, keys.transpose(-1, -2)).relu_().mul_(weights.unsqueeze(2))
    scores = weighted.sum(1, dtype=torch.float32).to(query.dtype)
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible.unsqueeze(1)
    return scores.masked_fill_(hidden, -torch.inf)
