"""Cases of ``attend`` at the released model's widths: decode and prefill, packed and plain pools, 64 and 8 heads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.paging import PAGE_TOKENS, pages_for
from octavo.kernels.rope import plain_frequencies
from octavo.kernels.storage import packed_entry_bytes
from octavo.runtime.bench_kernels.case import KernelCase, Prepared, call_copy, copies_for

_CHANNELS, _WINDOW, _TOP_K = 512, 128, 512
_ROPE_DIM, _THETA = 64, 160000.0
_MOST_COPIES = 256


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    requests: int
    context: int
    """Tokens of each request before the step."""
    packed: bool
    heads: int = 64

    @property
    def tokens(self) -> int:
        """Of each request after the step."""
        return self.context + self.rows // self.requests

    @property
    def entry_bytes(self) -> int:
        return packed_entry_bytes(_CHANNELS) if self.packed else 2 * _CHANNELS

    @property
    def name(self) -> str:
        kind = "decode" if self.requests == self.rows else "prefill"
        storage = "packed" if self.packed else "plain"
        return f"{kind} {self.rows}, context {self.context}, {storage}, {self.heads} heads"


_SHAPES = (
    *(_Shape(rows, rows, 32768, packed=True) for rows in (1, 16, 64, 128)),
    *(_Shape(rows, rows, 32768, packed=False) for rows in (1, 128)),
    *(_Shape(rows, 1, 32768, packed=True) for rows in (128, 512, 2048, 8192)),
    *(_Shape(8192, 1, context, packed=True) for context in (0, 131072)),
    _Shape(8192, 1, 32768, packed=False),
    *(_Shape(8192, 1, 32768, packed, heads=8) for packed in (True, False)),
    _Shape(64, 64, 32768, packed=True, heads=8),
)


def attend_cases() -> Iterator[KernelCase]:
    for shape in _SHAPES:
        yield KernelCase(shape.name, functools.partial(_prepare, shape))


@torch.no_grad()
def _prepare(shape: _Shape) -> Prepared:
    """Entries of ratio 1. Selections are random entries before the row's own position, ascending.

    Rows of one request share entries and latents: each is counted once.
    """
    random = torch.Generator("cuda").manual_seed(shape.rows)
    inputs = [_inputs(shape, random)]
    of_window = int((inputs[0]["positions"] + 1).clamp_max(_WINDOW).sum())
    of_entries = int((inputs[0]["selected"] >= 0).sum())
    moved = 4.0 * shape.rows * shape.heads * _CHANNELS
    if shape.requests == shape.rows:
        moved += of_entries * shape.entry_bytes + 2.0 * of_window * _CHANNELS
    else:
        moved += min(of_entries, shape.tokens) * shape.entry_bytes + 2.0 * (shape.rows + _WINDOW) * _CHANNELS
    copies = copies_for(moved, _MOST_COPIES)
    inputs += [_inputs(shape, random) for _ in range(copies - 1)]
    return Prepared(
        variants={
            name: functools.partial(call_copy, kernels.attend.backends[name].overload, inputs)
            for name in ("triton", "torch")
        },
        copies=copies,
        operations=4.0 * shape.heads * _CHANNELS * (of_window + of_entries),
        bytes=moved,
    )


def _inputs(shape: _Shape, random: torch.Generator) -> dict[str, Any]:
    cuda: Any = {"device": "cuda", "generator": random}
    each, pages = shape.rows // shape.requests, pages_for(shape.tokens)
    row = torch.arange(shape.rows, device="cuda")
    slots, positions = row // each, shape.context + row % each
    starts = torch.full_like(positions, shape.context)
    visible = (positions + 1).unsqueeze(1)
    chosen = (torch.rand(shape.rows, _TOP_K, **cuda) * visible).long().clamp_max(visible - 1)
    selected = torch.where(torch.arange(_TOP_K, device="cuda") < visible, chosen, 2**30).sort(1).values
    width = packed_entry_bytes(_CHANNELS) if shape.packed else _CHANNELS
    return {
        "query": _normal(shape.rows, shape.heads, _CHANNELS, **cuda),
        "latents": _normal(shape.rows, _CHANNELS, **cuda),
        "ring": _normal(shape.requests, _WINDOW, _CHANNELS, **cuda),
        "sink": torch.randn(shape.heads, **cuda),
        "frequencies": plain_frequencies(_ROPE_DIM, _THETA).cuda(),
        "slots": slots.int(),
        "positions": positions.int(),
        "write_slots": slots.int(),
        "write_positions": positions.int(),
        "write_starts": starts.int(),
        "page_table": torch.randperm(shape.requests * pages, **cuda).view(shape.requests, pages).int(),
        "entries": _pool(shape.requests * pages, width, shape.packed, random),
        "selected": torch.where(selected < 2**30, selected, -1).int(),
    }


def _pool(pages: int, width: int, packed: bool, random: torch.Generator) -> Tensor:
    cuda: Any = {"device": "cuda", "generator": random}
    if not packed:
        return _normal(pages, PAGE_TOKENS, width, **cuda)
    pool = torch.randint(0, 256, (pages, PAGE_TOKENS, width), dtype=torch.uint8, **cuda)
    pool[..., _CHANNELS // 2 :] %= 64  # scales of E4M3 below 2
    return pool


def _normal(*shape: int, **cuda: Any) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, **cuda)
