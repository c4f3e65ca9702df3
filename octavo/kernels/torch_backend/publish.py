"""``publish`` on static shapes: every row makes an entry, and those that complete a group write theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.norm import rms
from octavo.kernels.paging import entry_address, ratio_of
from octavo.kernels.publish import publish
from octavo.kernels.rope import turn
from octavo.kernels.torch_backend.storage import stored_entries, stored_keys
from octavo.kernels.torch_backend.writes import write_rows


@publish.implement("torch")
def publish_torch(
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
    """See the reference; the pools are packed or BF16. The product with ``wk`` accumulates in F32."""
    if values.shape[0] == 0:
        return
    ratio = ratio_of(entries)
    completes = write_positions >= 0
    slots = torch.where(completes, write_slots, 0).long()
    compressed = values
    if gates is not None and pending is not None:
        compressed = _pairs(values, gates, slots, write_positions, write_starts, pending).to(torch.bfloat16)
        _keep_waiting(values, gates, slots, write_positions, pending)
        completes = completes & (write_positions % 2 == 1)
    compressed = rms(compressed, norm, epsilon)
    key = rms(torch.matmul(compressed, wk.t()), k_norm, epsilon)
    entry = write_positions // ratio
    page, place = entry_address(entry, slots, page_table, entries.shape[1])
    write_rows(
        completes,
        (page, place),
        (entries, stored_entries(entries, turn(compressed, entry * ratio, frequencies))),
        (keys, stored_keys(keys, turn(key, entry * ratio, frequencies))),
    )


def _pairs(values: Tensor, gates: Tensor, slots: Tensor, positions: Tensor, starts: Tensor, pending: Tensor) -> Tensor:
    """Each row as the second half of a pair, [T, head_dim] F32; it has a meaning at odd positions."""
    row_before = torch.arange(-1, values.shape[0] - 1, device=values.device).clamp_min(0)
    first_is_here = (positions > starts).unsqueeze(1)
    waiting, waiting_gates = pending[slots].unbind(1)
    first = torch.where(first_is_here, values[row_before], waiting)
    first_gates = torch.where(first_is_here, gates[row_before], waiting_gates)
    top = torch.maximum(first_gates, gates)
    first_part, second_part = torch.exp(first_gates - top), torch.exp(gates - top)
    total = first_part + second_part
    return first_part / total * first + second_part / total * values


def _keep_waiting(values: Tensor, gates: Tensor, slots: Tensor, positions: Tensor, pending: Tensor) -> None:
    """First halves whose request goes no further in this step: value and gate to pending."""
    live = positions >= 0
    waits = live & (positions % 2 == 0)
    waits[:-1] &= ~(live[1:] & (slots[1:] == slots[:-1]))
    write_rows(waits, (slots,), (pending, torch.stack((values, gates), dim=1)))
