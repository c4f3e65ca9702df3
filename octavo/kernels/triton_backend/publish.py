"""``publish`` in one kernel at ratio 1, and with a second one for the halves that wait at ratio 2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.operator import ModelWidths
from octavo.kernels.paging import ratio_of
from octavo.kernels.publish import publish
from octavo.kernels.triton_backend.publish_kernels import keep_waiting, publish_rows
from octavo.kernels.triton_backend.refusals import refuse_head_dim, refuse_index_head_dim

_ROWS = 16
"""Rows of a program: the least height of a product. A decode step of 16 rows is one program."""
_WARPS = 8


def _refuses(widths: ModelWidths) -> str | None:
    return refuse_head_dim(widths) or refuse_index_head_dim(widths)


@publish.implement("triton", devices=frozenset({"cuda"}), refuses=_refuses)
def publish_triton(
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
    """See the reference; pools are packed, BF16 or F32 and contiguous. The product with ``wk`` accumulates in F32."""
    rows, channels = values.shape
    key_channels = wk.shape[0]
    packed = entries.dtype == torch.uint8
    for pool in (entries, keys):
        if not pool.is_contiguous():
            raise ValueError(
                f"publish, backend triton: a pool has strides {pool.stride()}; allowed are contiguous pools. Use one "
                "tensor a pool."
            )
    if rows == 0:
        return
    values = values.contiguous()
    paired = values if gates is None else gates.contiguous()
    waiting = values if pending is None else pending
    write_slots, write_positions = write_slots.contiguous(), write_positions.contiguous()
    page_table = page_table.contiguous()
    plain = entries.dtype == torch.float32
    publish_rows[(-(-rows // _ROWS),)](
        values,
        paired,
        norm,
        wk.contiguous(),
        k_norm,
        frequencies,
        write_slots,
        write_positions,
        write_starts.contiguous(),
        page_table,
        entries,
        keys,
        waiting,
        rows,
        page_table.shape[1],
        epsilon,
        channels=channels,
        key_channels=key_channels,
        turning=frequencies.shape[0],
        page_entries=entries.shape[1],
        ratio=ratio_of(entries),
        storage="packed" if packed else "plain" if plain else "rounded",
        dtype=tl.float32 if plain or (gates is None and values.dtype == torch.float32) else tl.bfloat16,
        ROWS=_ROWS,
        PAIRS=max(triton.next_power_of_2(channels // 2), 16),
        KEY_PAIRS=max(triton.next_power_of_2(key_channels // 2), 16),
        TURNING=triton.next_power_of_2(frequencies.shape[0]),
        num_warps=_WARPS,
    )
    if gates is not None and pending is not None:
        keep_waiting[(rows,)](
            values,
            paired,
            write_slots,
            write_positions,
            pending,
            rows,
            channels=channels,
            CHANNELS=triton.next_power_of_2(channels),
            num_warps=4,
        )
