"""``commit_window``: the last rows of each request to its ring, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.attend import commit_window
from octavo.kernels.triton_backend.dependent_launch import let_next_start, wait_for_ahead

_ROWS = 8
_WIDTH = 512


@commit_window.implement("triton", devices=frozenset({"cuda"}))
def commit_window_triton(ring: Tensor, latents: Tensor, write_slots: Tensor, write_positions: Tensor) -> None:
    """See the reference. A request's rows are contiguous: another row of it W rows later takes a row's place."""
    rows = latents.shape[0]
    if rows == 0:
        return
    if not ring.is_contiguous():
        raise ValueError(
            f"commit_window, backend triton: ring has strides {ring.stride()}; allowed are contiguous rings. Use one "
            "tensor a ring."
        )
    latents = latents.contiguous()
    width = latents.numel() // rows
    commit_rows[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _WIDTH))](
        *(ring, latents, write_slots.contiguous(), write_positions.contiguous(), rows),
        width=width,
        window=ring.shape[1],
        ROWS=_ROWS,
        WIDTH=min(_WIDTH, triton.next_power_of_2(width)),
        num_warps=4,
        launch_pdl=True,
    )


@triton.jit(do_not_specialize=["rows"])
def commit_rows(
    ring: tl.tensor,
    latents: tl.tensor,
    write_slots: tl.tensor,
    write_positions: tl.tensor,
    rows: tl.int32,
    width: tl.constexpr,
    window: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """ROWS rows of ``width`` numbers each, WIDTH of them at a time."""
    let_next_start()
    wait_for_ahead()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    position = tl.load(write_positions + row, mask=row < rows, other=-1)
    slot = tl.load(write_slots + row, mask=row < rows, other=-1)
    later = row + window
    replaced = tl.load(write_positions + later, mask=later < rows, other=-1) >= 0
    replaced = replaced & (tl.load(write_slots + later, mask=later < rows, other=-1) == slot)
    kept = ((position >= 0) & (replaced == 0))[:, None] & (column < width)[None, :]
    source = row.to(tl.int64) * width
    target = (slot.to(tl.int64) * window + position % window) * width
    value = tl.load(latents + source[:, None] + column[None, :], mask=kept)
    tl.store(ring + target[:, None] + column[None, :], value, mask=kept)
