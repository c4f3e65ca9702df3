"""Rows of tables by number, each operator in one kernel: token classes, token embedding and Engram table rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.embed import embed_tokens
from octavo.kernels.engram import DEAD_CLASS, engram_lookup, token_classes
from octavo.kernels.triton_backend.scales import e8m0_to_float

_IDS = 256
_EMBED_ROWS, _EMBED_COLUMNS = 2, 1024
_TABLE_ROWS = 8
"""Of programs of four warps."""


@token_classes.implement("triton", devices=frozenset({"cuda"}))
def token_classes_triton(ids: Tensor, image: Tensor, classes: Tensor) -> Tensor:
    """See the reference."""
    found = torch.empty_like(ids, memory_format=torch.contiguous_format)
    rows = ids.shape[0]
    if rows:
        look_up_classes[(triton.cdiv(rows, _IDS),)](
            *(ids.contiguous(), image.contiguous().view(torch.uint8), classes.contiguous(), found, rows),
            dead_class=DEAD_CLASS,
            IDS=_IDS,
            num_warps=4,
        )
    return found


@embed_tokens.implement("triton", devices=frozenset({"cuda"}))
def embed_tokens_triton(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    _check_contiguous("embed_tokens", weight=weight)
    rows, channels = ids.shape[0], weight.shape[1]
    found = torch.empty(rows, channels, dtype=dtype, device=ids.device)
    if rows:
        columns = min(_EMBED_COLUMNS, triton.next_power_of_2(channels))
        embed_rows[(triton.cdiv(rows, _EMBED_ROWS), triton.cdiv(channels, columns))](
            *(ids.contiguous(), weight, found, rows),
            channels=channels,
            ROWS=_EMBED_ROWS,
            COLUMNS=columns,
            num_warps=4,
        )
    return found


@engram_lookup.implement("triton", devices=frozenset({"cuda"}))
def engram_lookup_triton(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference, which also serves tables in host memory: no kernel reads these."""
    if table.device != rows.device:
        return engram_lookup.reference(table, scale, rows, dtype)
    _check_contiguous("engram_lookup", table=table, scale=scale)
    width = table.shape[1]
    found = torch.empty(rows.shape[0], rows.shape[1] * width, dtype=dtype, device=rows.device)
    numbers = rows.numel()
    if numbers:
        look_up_rows[(triton.cdiv(numbers, _TABLE_ROWS),)](
            *(table, scale, rows.contiguous(), found, numbers),
            groups=width // 32,
            ROWS=_TABLE_ROWS,
            GROUPS=triton.next_power_of_2(width // 32),
            num_warps=4,
        )
    return found


def _check_contiguous(operator: str, **tables: Tensor) -> None:
    """A table is never copied to be read."""
    for name, table in tables.items():
        if not table.is_contiguous():
            raise ValueError(
                f"{operator}, backend triton: {name} has strides {table.stride()}; allowed are contiguous tables. "
                "Store its rows one after another."
            )


@triton.jit(do_not_specialize=["rows"])
def look_up_classes(
    ids: tl.tensor,
    image: tl.tensor,
    classes: tl.tensor,
    found: tl.tensor,
    rows: tl.int32,
    dead_class: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """IDS classes; image [R] uint8."""
    row = tl.program_id(0) * IDS + tl.arange(0, IDS)
    there = row < rows
    number = tl.load(ids + row, mask=there, other=-1)
    live = (number >= 0) & (tl.load(image + row, mask=there, other=0) == 0)
    tl.store(found + row, tl.load(classes + number, mask=live, other=dead_class), mask=there)


@triton.jit(do_not_specialize=["rows"])
def embed_rows(
    ids: tl.tensor,
    weight: tl.tensor,
    found: tl.tensor,
    rows: tl.int32,
    channels: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """COLUMNS channels of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = row < rows
    number = tl.load(ids + row, mask=there, other=-1)[:, None]
    values = tl.load(weight + number * channels + column, mask=(number >= 0) & (column < channels), other=0.0)
    goal = found + row.to(tl.int64)[:, None] * channels + column
    tl.store(goal, values.to(found.dtype.element_ty), mask=there[:, None] & (column < channels))


@triton.jit(do_not_specialize=["numbers"])
def look_up_rows(
    table: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    found: tl.tensor,
    numbers: tl.int32,
    groups: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """ROWS of the table rows, dequantised: rows [numbers] -> found [numbers, 32 groups]; GROUPS pads to a power of
    two."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = place < numbers
    number = tl.load(rows + place, mask=there, other=0)[:, None]
    group = tl.arange(0, GROUPS)[None, :]
    known = there[:, None] & (group < groups)
    factor = e8m0_to_float(tl.load(scale + number * groups + group, mask=known, other=0))[:, :, None]
    column = group[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    codes = tl.load(table + number[:, :, None] * (32 * groups) + column, mask=known[:, :, None], other=0.0)
    goal = found + place.to(tl.int64)[:, None, None] * (32 * groups) + column
    tl.store(goal, (codes.to(tl.float32) * factor).to(found.dtype.element_ty), mask=known[:, :, None])
