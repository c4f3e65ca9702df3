"""``attend``: one kernel finds each row's keys and angles, one attends, and where rows are few, one unites parts.

Where rows are many, those of the released model have a kernel of their own (``attend_rows_hopper``).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.kernels.attend import attend
from octavo.kernels.storage import packed_entry_bytes
from octavo.kernels.triton_backend.attend_hopper import attend_part_hopper
from octavo.kernels.triton_backend.attend_kernels import attend_part, unite_parts
from octavo.kernels.triton_backend.attend_rows_hopper import attend_rows_hopper
from octavo.kernels.triton_backend.device import is_hopper, multiprocessors
from octavo.kernels.triton_backend.key_places import key_words, place_keys
from octavo.kernels.triton_backend.refusals import refuse_head_dim
from octavo.kernels.triton_backend.tuning import AttendForm, choose_attend_form, choose_splits

_ALIGNMENT = 16
"""Bytes at a multiple of which every key and query lies, so that a thread copies 16 at once."""


@attend.implement("triton", devices=frozenset({"cuda"}), refuses=refuse_head_dim)
def attend_triton(
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

    Scores, their softmax and sums are F32. Probabilities round to BF16 against the running maximum of their part of the
    row, tile by tile; parts are united in F32. Cosines and sines may differ from the reference's in the last bit.
    """
    if query.dtype != torch.bfloat16:
        raise TypeError(
            f"attend, backend triton: query is {query.dtype}; allowed: torch.bfloat16. Use numerics reference."
        )
    return run(
        choose_attend_form(query.shape[1], query.shape[2], is_hopper(query.device)),
        *(query, latents, ring, sink, frequencies, slots, positions, write_slots, write_positions, write_starts),
        *(page_table, entries, selected),
    )


def run(
    form: AttendForm,
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
    splits: int | None = None,
) -> Tensor:
    """The same in a given form; ``splits`` overrides how many parts a row has."""
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    rows, heads, channels = query.shape
    turning = frequencies.shape[0]
    if rows == 0:
        return attended
    query, latents, sink = query.contiguous(), latents.contiguous(), sink.contiguous()
    slots, positions = slots.contiguous(), positions.contiguous()
    window = ring.shape[1]
    window_places = triton.cdiv(window, form.keys) * form.keys
    if entries is None or selected is None:
        pool, chosen, top_k = latents, slots, 0
    else:
        pool, chosen, top_k = entries, selected.contiguous(), selected.shape[1]
    places = window_places + triton.cdiv(top_k, form.keys) * form.keys
    packed = pool.dtype == torch.uint8
    entry_size = packed_entry_bytes(channels) if packed else channels
    _check_alignment(query=query, latents=latents, ring=ring, entries=pool)
    unit = _ALIGNMENT // latents.element_size()
    entry_unit = _divisor(entry_size) if packed else unit

    share = max(1, latents.shape[0] // rows)
    distances = torch.empty(rows, places, dtype=torch.int64, device=query.device)
    used = torch.empty(rows, dtype=torch.int32, device=query.device)
    turns = torch.empty(rows, 2, turning, dtype=torch.float32, device=query.device)
    place_keys[(rows,)](
        *(latents, ring, slots, positions, write_slots.contiguous(), write_positions.contiguous()),
        *(write_starts.contiguous(), page_table.contiguous(), pool, chosen),
        *(frequencies.contiguous(), distances, used, turns),
        *(share, latents.shape[0], page_table.shape[1]),
        channels=channels,
        window=window,
        window_places=window_places,
        top_k=top_k,
        places=places,
        page_entries=pool.shape[1] if top_k else 1,
        entry_size=entry_size,
        entry_unit=entry_unit,
        unit=unit,
        packed=packed,
        turning=turning,
        PLACES=triton.next_power_of_2(places),
        CANDIDATES=triton.next_power_of_2(share),
        TURNING=triton.next_power_of_2(turning),
        num_warps=4,
    )

    if splits is None:
        splits = choose_splits(form, rows, heads, places // form.keys, multiprocessors(query.device))
    common = {
        "heads": heads,
        "turning": turning,
        "window_places": window_places,
        "places": places,
        "entry_unit": entry_unit,
        "unit": unit,
        "scale": channels**-0.5,
        "packed": packed,
    }
    if splits == 1 and _takes_whole_rows(form, heads, turning, window_places, top_k):
        tiles = triton.next_power_of_2(places // form.keys)
        words = torch.empty(rows, tiles, dtype=torch.int64, device=query.device)
        key_words[(rows,)](distances, words, places, KEYS=form.keys, TILES=tiles, num_warps=4)
        attend_rows_hopper[(min(rows, multiprocessors(query.device)), 1)](
            *(query, latents, sink, pool, distances, words, used, turns, positions, attended, rows),
            word_places=tiles,
            num_warps=4,
            **common,
        )
        return attended
    parts = splits if splits > 1 else 0
    numerators = torch.empty(parts, rows, heads, channels, dtype=torch.float32, device=query.device)
    maxima = torch.empty(parts, rows, heads, dtype=torch.float32, device=query.device)
    denominators = torch.empty_like(maxima)
    shared = common | {"divided": splits > 1, "num_warps": form.warps}
    tensors = (
        *(query, latents, sink, pool, distances, used, turns, positions, attended),
        *(numerators, maxima, denominators),
    )
    grid = (rows, triton.cdiv(heads, form.heads), splits)
    if form.hopper:
        attend_part_hopper[grid](*tensors, rows, splits, **shared)
    else:
        attend_part[grid](
            *tensors,
            rows,
            splits,
            channels=channels,
            HEADS=form.heads,
            CHANNELS=triton.next_power_of_2(channels),
            KEYS=form.keys,
            num_stages=form.stages,
            **shared,
        )
    if parts:
        unite_parts[(rows, heads)](
            *(numerators, maxima, denominators, sink, turns, positions, attended, rows, splits),
            heads=heads,
            channels=channels,
            turning=turning,
            SPLITS=triton.next_power_of_2(splits),
            CHANNELS=triton.next_power_of_2(channels),
            num_warps=4,
            launch_pdl=True,
        )
    return attended


def _takes_whole_rows(form: AttendForm, heads: int, turning: int, window_places: int, top_k: int) -> bool:
    """Whether ``attend_rows_hopper`` takes rows that are not divided: it has been measured on these shapes alone."""
    return form.hopper and (heads, turning) == (64, 32) and window_places >= 2 * form.keys and top_k > 0


def _check_alignment(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.data_ptr() % _ALIGNMENT or not tensor.is_contiguous():
            raise ValueError(
                f"attend, backend triton: {name} begins at {tensor.data_ptr():#x} and has strides {tensor.stride()}; "
                f"allowed are contiguous tensors at multiples of {_ALIGNMENT} bytes. Clone it into memory of its own."
            )


def _divisor(count: int) -> int:
    """The largest power of two, at most 16, that divides a number."""
    return min(16, count & -count)
