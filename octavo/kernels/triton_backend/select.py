"""``select`` and ``select_candidates`` as a stream: no score is stored, and what is not a candidate is not scored.

Buffers are lists of a few times ``top_k`` entries, and of ``top_blocks`` blocks, for each row and split of its keys,
whatever the context. Scores are computed once, since computing them is nearly all of the work: two histograms of the
16-bit scores would need three passes. A library's ``topk`` reads logits that somebody writes first, and takes twice the
time of computing them (spec/performance.md 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels.operator import ModelWidths
from octavo.kernels.paging import ratio_of
from octavo.kernels.select import select, select_candidates
from octavo.kernels.triton_backend import select_tuning as tuning
from octavo.kernels.triton_backend.refusals import refuse_index_head_dim
from octavo.kernels.triton_backend.select_kernels import GROUP, score_rows, unite_lists

_GROUP = GROUP.value


def _refuses(widths: ModelWidths) -> str | None:
    size = widths.candidate_block_size
    if not 1 <= widths.index_n_heads <= 32:
        return f"index_n_heads {widths.index_n_heads}: allowed are up to 32"
    if size > tuning.KEYS or size != triton.next_power_of_2(size):
        return f"candidate_block_size {size}: allowed are powers of two up to {tuning.KEYS}"
    if widths.index_topk > tuning.MOST_ENTRIES:
        return f"index_topk {widths.index_topk}: allowed are up to {tuning.MOST_ENTRIES}"
    if widths.candidate_topk_blocks > tuning.MOST_BLOCKS:
        return f"candidate_topk_blocks {widths.candidate_topk_blocks}: allowed are up to {tuning.MOST_BLOCKS}"
    return refuse_index_head_dim(widths)


@select.implement("triton", devices=frozenset({"cuda"}), refuses=_refuses)
def select_triton(
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
    """See the reference; query and weights are BF16, keys packed or BF16 and contiguous. Scores are finite.

    Candidates are distinct and ascending, as :func:`select_candidates` gives them.
    """
    _check_dtypes("select", query, weights)
    return run(query, weights, keys, page_table, slots, positions, candidates, scale, top_k, 0, block_size)[0]


@select_candidates.implement("triton", devices=frozenset({"cuda"}), refuses=_refuses)
def select_candidates_triton(
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
    """See the reference and :func:`select_triton`."""
    _check_dtypes("select_candidates", query, weights)
    return run(query, weights, keys, page_table, slots, positions, None, scale, top_k, top_blocks, block_size)


def _check_dtypes(operator: str, query: Tensor, weights: Tensor) -> None:
    for name, tensor in (("query", query), ("weights", weights)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{operator}, backend triton: {name} of {tensor.dtype}; allowed: torch.bfloat16. Use numerics "
                "reference."
            )


def run(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    candidates: Tensor | None,
    scale: float,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Both operators: choices [R, top_k], within candidates if there are any, and blocks [R, top_blocks]."""
    rows = query.shape[0]
    selected = query.new_empty((rows, top_k), dtype=torch.int32)
    chosen = query.new_empty((rows, top_blocks), dtype=torch.int32)
    for low in range(0, rows, tuning.ROWS_AT_ONCE):
        part = slice(low, low + tuning.ROWS_AT_ONCE)
        row_arguments = query[part], weights[part], keys, page_table, slots[part], positions[part]
        listed = None if candidates is None else candidates[part].contiguous()
        entries, blocks = _score(*row_arguments, listed, scale, top_k, top_blocks, block_size)
        _unite(entries, selected[part])
        if top_blocks:
            _unite(blocks, chosen[part])
    return selected, chosen


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of each row and split: codes [R, splits, capacity] uint16, numbers int32, counts [R, splits] int32."""

    codes: Tensor
    numbers: Tensor
    counts: Tensor

    @property
    def capacity(self) -> int:
        return self.codes.shape[2]


def _lists(like: Tensor, splits: int, capacity: int) -> _Lists:
    shape = (like.shape[0], splits, capacity)
    codes, numbers = like.new_empty(shape, dtype=torch.uint16), like.new_empty(shape, dtype=torch.int32)
    return _Lists(codes, numbers, like.new_empty(shape[:2], dtype=torch.int32))


def _score(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    candidates: Tensor | None,
    scale: float,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[_Lists, _Lists]:
    """Lists of entries of up to 4096 rows, and of blocks if ``top_blocks`` > 0."""
    rows, heads, channels = query.shape
    packed = keys.dtype == torch.uint8
    if not keys.is_contiguous():
        raise ValueError(
            f"select, backend triton: keys have strides {keys.stride()}; allowed are contiguous pools. Use one "
            "tensor a pool."
        )
    if tuning.KEYS % keys.shape[1]:
        raise ValueError(
            f"select, backend triton: pages of {keys.shape[1]} entries; allowed are divisors of {tuning.KEYS}, the "
            "keys of a tile. Use numerics reference."
        )
    most = page_table.shape[1] * keys.shape[1]
    splits = tuning.splits_for(rows, -(-most // tuning.KEYS))
    entries = _lists(query, splits, max(triton.next_power_of_2(tuning.LIST_LENGTHS * top_k), 4 * tuning.KEYS))
    blocks = entries
    if top_blocks:
        blocks = _lists(
            query, splits, max(triton.next_power_of_2(tuning.BLOCK_LIST_LENGTHS * top_blocks), 4 * tuning.KEYS)
        )
    listed = 0 if candidates is None else candidates.shape[1]
    page_table = page_table.contiguous()
    tensors = (
        query.contiguous(),
        weights.contiguous(),
        keys,
        page_table,
        slots.contiguous(),
        positions.contiguous(),
        positions if candidates is None else candidates,
        entries.codes,
        entries.numbers,
        entries.counts,
        blocks.codes,
        blocks.numbers,
        blocks.counts,
    )
    for together, registers in ((_GROUP, None), (1, None if top_blocks else tuning.ROW_REGISTERS)):
        score_rows[(-(-rows // together), splits)](
            *tensors,
            rows,
            page_table.shape[1],
            splits,
            scale,
            heads=heads,
            channels=channels,
            page_entries=keys.shape[1],
            ratio=ratio_of(keys),
            top_k=top_k,
            top_blocks=top_blocks,
            block_size=block_size,
            listed=listed,
            packed=packed,
            aligned=packed and channels == 128 and keys.data_ptr() % 4 == 0,
            least_tiles=tuning.LEAST_TILES,
            ROWS=together,
            KEYS=tuning.KEYS,
            HEADS=max(triton.next_power_of_2(heads), 8),
            CHANNELS=128 if packed else max(triton.next_power_of_2(channels), 16),
            CAPACITY=entries.capacity,
            BLOCK_CAPACITY=blocks.capacity,
            LISTED=triton.next_power_of_2(max(listed, 1)),
            num_warps=tuning.WARPS,
            maxnreg=registers,
        )
    return entries, blocks


def _unite(lists: _Lists, result: Tensor) -> None:
    """The best of all lists of a row, ascending, -1 padded, to result [R, keep] int32; the lists are used up."""
    rows, splits = lists.counts.shape
    keep = result.shape[1]
    most = max(2, min(tuning.FAN, tuning.UNITED // triton.next_power_of_2(keep)))
    step = 1
    while True:
        fan = min(most, triton.next_power_of_2(-(-splits // step)))
        final = fan * step >= splits
        unite_lists[(rows, -(-splits // (fan * step)))](
            lists.codes,
            lists.numbers,
            lists.counts,
            result,
            splits,
            step,
            keep=keep,
            final=final,
            CAPACITY=lists.capacity,
            FAN=fan,
            KEEP=triton.next_power_of_2(keep),
            num_warps=max(4, min(16, fan * triton.next_power_of_2(keep) // 1024)),
        )
        if final:
            return
        step *= fan
