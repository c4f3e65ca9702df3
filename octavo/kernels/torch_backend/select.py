"""``select`` and ``select_candidates``: scores in large pieces, and the best of them without sorting all."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.paging import ratio_of
from octavo.kernels.select import candidate_mask, select, select_candidates, visible_entries
from octavo.kernels.torch_backend.index_scores import scored_rows


@select.implement("torch", capturable=False)
def select_torch(
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
    """See the reference; query and weights are BF16, keys packed or BF16. Waits for the device once."""
    selected = query.new_full((query.shape[0], top_k), -1, dtype=torch.int32)
    for rows, scores in scored_rows(query, weights * scale, keys, page_table, slots, positions):
        if candidates is not None:
            scores.masked_fill_(~candidate_mask(candidates[rows], block_size, scores.shape[1]), -torch.inf)
        selected[rows] = _best_ascending(scores, top_k)
    return selected


@select_candidates.implement("torch", capturable=False)
def select_candidates_torch(
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
    """See the reference and :func:`select_torch`."""
    selected = query.new_full((query.shape[0], top_k), -1, dtype=torch.int32)
    candidates = query.new_full((query.shape[0], top_blocks), -1, dtype=torch.int32)
    visible = visible_entries(positions, ratio_of(keys))
    for rows, scores in scored_rows(query, weights * scale, keys, page_table, slots, positions):
        selected[rows] = _best_ascending(scores, top_k)
        candidates[rows] = _best_blocks(scores, visible[rows], top_blocks, block_size)
    return selected, candidates


def _best_blocks(scores: Tensor, visible: Tensor, count: int, block_size: int) -> Tensor:
    """The best blocks of each row [R, count] int32 ascending, -1 padded; scores [R, n] with -inf where invisible."""
    blocks = -(-scores.shape[1] // block_size)
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - scores.shape[1]), value=-torch.inf)
    best = padded.unflatten(1, (blocks, block_size)).amax(2)
    newest = (visible - 1) // block_size
    forced = torch.arange(blocks, device=scores.device) == newest.unsqueeze(1)
    return _best_ascending(best.masked_fill_(forced, torch.inf), count)


def _best_ascending(scores: Tensor, count: int) -> Tensor:
    """Columns of the ``count`` best scores above -inf, ascending, -1 padded: [R, n] BF16, n > 0 -> [R, count] int32.

    ``topk`` breaks ties as it likes, but the least score it takes is the same however it does: what is better is taken,
    and as many columns of just that score as there is room for, from the lowest on.
    """
    least = scores.topk(min(count, scores.shape[1]), sorted=False).values.amin(1, keepdim=True)
    better = scores > least
    level = (scores == least) & (scores > -torch.inf)
    room = count - better.sum(1, keepdim=True)
    taken = better | (level & (level.cumsum(1, dtype=torch.int32) <= room))
    places = torch.arange(1, count + 1, dtype=torch.int32, device=scores.device).repeat(scores.shape[0], 1)
    columns = torch.searchsorted(taken.cumsum(1, dtype=torch.int32), places, out_int32=True)
    return columns.masked_fill_(columns == scores.shape[1], -1)
