"""The indexer: scores of compressed entries, the best of them, and candidate blocks (spec/model.md 3.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.numerics import exact_matmul, largest
from octavo.kernels.operator import DeadRows, Gives, Need, Returns, operator
from octavo.kernels.paging import entry_address, ratio_of
from octavo.kernels.storage import load_keys

_ROW_CHUNK = 64
"""Rows that are scored at once: products are F64 and as many as heads times entries."""
_CHOICES = Returns(Gives.ROWS, DeadRows.MINUS_ONE)
_NEEDS = {
    "query": Need.ROWS,
    "weights": Need.ROWS,
    "keys": Need.ANY,
    "page_table": Need.ANY,
    "slots": Need.ROWS,
    "positions": Need.ROWS,
}


@operator(
    arguments=_NEEDS | {"candidates": Need.ROWS}, results=(_CHOICES,), source="spec/model.md 3.7", capturable=False
)
def select(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    candidates: Tensor | None,
    scale: float,
    top_k: int,
    block_size: int,
) -> Tensor:
    """The ``top_k`` best visible entries of every row, ascending, -1 padded: [R, top_k] int32.

    query [R, heads, C], weights [R, heads] (multiplied by ``scale``), keys [pages, 64 / ratio, C], all BF16 or F32,
    keys also packed (``octavo.kernels.storage``);
    page_table [slots, max_pages], slots [R], positions [R] int32. Entry j is visible to position p when its group is
    complete: j < (p + 1) // ratio. With candidates [R, blocks] int32 (-1 padded) only entries of those blocks of
    ``block_size`` count. Score: sum over heads of weight x relu(q k), BF16 after each of product, weighting and sum.
    Ties go to the lower entry.
    """
    scores = entry_scores(query, weights * scale, keys, page_table, slots, positions)
    if candidates is not None:
        scores = scores.masked_fill(~candidate_mask(candidates, block_size, scores.shape[1]), -torch.inf)
    return _best_ascending(scores, top_k)


@select.fake
def _select(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    candidates: Tensor | None,
    scale: float,
    top_k: int,
    block_size: int,
) -> Tensor:
    return query.new_empty(query.shape[0], top_k, dtype=torch.int32)


@operator(arguments=_NEEDS, results=(_CHOICES, _CHOICES), source="spec/model.md 3.7", capturable=False)
def select_candidates(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """As :func:`select`, unrestricted, and the ``top_blocks`` best blocks of ``block_size`` entries.

    Returns (selected [R, top_k], candidates [R, top_blocks]), int32, ascending, -1 padded. A block scores as its best
    entry; the block of the newest visible entry always counts.
    """
    scores = entry_scores(query, weights * scale, keys, page_table, slots, positions)
    visible = visible_entries(positions, ratio_of(keys))
    return _best_ascending(scores, top_k), best_blocks(scores, visible, top_blocks, block_size)


@select_candidates.fake
def _select_candidates(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    rows = query.shape[0]
    return (
        query.new_empty(rows, top_k, dtype=torch.int32),
        query.new_empty(rows, top_blocks, dtype=torch.int32),
    )


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """Complete groups at each position: [R] int32 -> [R]; none at dead rows."""
    return (positions + 1) // ratio


def entry_scores(
    query: Tensor, weights: Tensor, keys: Tensor, page_table: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Scores [R, n] F32 of the entries 0..n-1 of each row's request, -inf where invisible; n covers every row."""
    visible = visible_entries(positions, ratio_of(keys))
    count = int(visible.max()) if visible.numel() else 0
    scores = torch.full((query.shape[0], count), -torch.inf, device=query.device)
    entries = torch.arange(count, device=query.device)
    for slot in slots[positions >= 0].unique():
        rows = ((slots == slot) & (positions >= 0)).nonzero().squeeze(1)
        page, place = entry_address(entries, slot.expand(count), page_table, keys.shape[1])
        found = load_keys(keys, page, place, query.shape[-1], query.dtype)
        for part in rows.split(_ROW_CHUNK):
            products = exact_matmul(query[part], found).to(query.dtype)
            weighted = products.relu() * weights[part].unsqueeze(-1)
            scores[part] = weighted.double().sum(1).to(query.dtype).float()
    return scores.masked_fill(entries >= visible.unsqueeze(1), -torch.inf)


def best_blocks(scores: Tensor, visible: Tensor, count: int, block_size: int) -> Tensor:
    """The best blocks of each row [R, count] int32 ascending, -1 padded; scores [R, n] with -inf where invisible."""
    blocks = -(-scores.shape[1] // block_size)
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - scores.shape[1]), value=-torch.inf)
    block_scores = padded.unflatten(1, (blocks, block_size)).amax(2) if blocks else padded
    newest = (visible - 1) // block_size
    forced = torch.arange(blocks, device=scores.device) == newest.unsqueeze(1)
    return _best_ascending(block_scores.masked_fill(forced, torch.inf), count)


def candidate_mask(candidates: Tensor, block_size: int, count: int) -> Tensor:
    """Candidate blocks [R, blocks] -> mask over entries [R, count] bool."""
    blocks = -(-count // block_size)
    chosen = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    chosen.scatter_(1, torch.where(candidates < 0, blocks, candidates).long(), True)
    return chosen[:, :blocks].repeat_interleave(block_size, 1)[:, :count]


def _best_ascending(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` best finite-or-forced scores, ascending, padded with -1: [R, count] int32."""
    best = largest(scores, count)
    none = torch.iinfo(torch.int32).max
    chosen = best.masked_fill(scores.gather(1, best) == -torch.inf, none).sort(dim=1).values
    chosen = torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=none)
    return chosen.masked_fill(chosen == none, -1).int()
