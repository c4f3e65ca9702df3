"""``commit_window``: the last rows of each request, without the host learning which (spec/model.md 3.5)."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.attend import commit_window
from octavo.kernels.torch_backend.writes import write_rows


@commit_window.implement("torch")
def commit_window_torch(ring: Tensor, latents: Tensor, write_slots: Tensor, write_positions: Tensor) -> None:
    """See the reference. A request's rows are contiguous: another row of it W rows later takes a row's place."""
    if latents.shape[0] == 0:
        return
    window = ring.shape[1]
    live = write_positions >= 0
    kept = live.clone()
    if latents.shape[0] > window:
        kept[:-window] &= ~(live[window:] & (write_slots[window:] == write_slots[:-window]))
    write_rows(kept, (write_slots.long().clamp_min(0), write_positions.long() % window), (ring, latents))
