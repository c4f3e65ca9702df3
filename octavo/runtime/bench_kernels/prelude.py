"""Cases of what stands before the body, and of ``window_latent``, at the released model's widths: operators of one
small kernel. Engram tables are the preset slice's, 80,000 rows a column.

Ours are measured against the references, or where a compiler may fuse, against what Inductor makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.operator import Operator
from octavo.kernels.rope import yarn_frequencies
from octavo.runtime.bench_kernels.case import Call, KernelCase, Prepared, call_copy, copies_for
from octavo.runtime.bus_memory import seen_from

_HIDDEN, _VOCABULARY, _CLASSES = 5120, 129280, 99092
_ORDERS, _COLUMNS, _COLUMN_ROWS, _TABLE_WIDTH = 3, 24, 80_000, 256
_HEAD_DIM, _TURNING = 512, 64
_CONTEXT = 32768
_ROWS = (1, 128, 8192)
_MOST_COPIES = 32

Inputs = Sequence[Mapping[str, Any]]


def embed_cases() -> Iterator[KernelCase]:
    return _of_rows(_prepare_embed)


def classes_cases() -> Iterator[KernelCase]:
    return _of_rows(_prepare_classes)


def hash_cases() -> Iterator[KernelCase]:
    return _of_rows(_prepare_hash)


def lookup_cases() -> Iterator[KernelCase]:
    yield from _of_rows(functools.partial(_prepare_lookup, on_host=False))
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows, table on the host", functools.partial(_prepare_lookup, rows, on_host=True))


def latent_cases() -> Iterator[KernelCase]:
    return _of_rows(_prepare_latent)


def _of_rows(prepare: Callable[[int], Prepared]) -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(prepare, rows))


@torch.no_grad()
def _prepare_embed(rows: int) -> Prepared:
    weight = torch.empty(_VOCABULARY, _HIDDEN, dtype=torch.bfloat16, device="cuda").normal_()
    moved = rows * (8.0 + 2 * 2 * _HIDDEN)
    inputs = [
        {"ids": _integers(0, _VOCABULARY, rows), "weight": weight, "dtype": torch.bfloat16}
        for _ in range(copies_for(moved, _MOST_COPIES))
    ]
    return _prepared(kernels.embed_tokens, inputs, moved)


@torch.no_grad()
def _prepare_classes(rows: int) -> Prepared:
    classes = _integers(0, _CLASSES, _VOCABULARY)
    inputs = [
        {
            "ids": _integers(0, _VOCABULARY, rows),
            "image": torch.zeros(rows, dtype=torch.bool, device="cuda"),
            "classes": classes,
        }
        for _ in range(_MOST_COPIES)
    ]
    return _prepared(kernels.token_classes, inputs, rows * (8.0 + 1 + 8 + 8))


@torch.no_grad()
def _prepare_hash(rows: int) -> Prepared:
    """Up to 128 rows a request each, above a single request."""
    requests = rows if rows <= 128 else 1
    row = torch.arange(rows, device="cuda")
    inputs = [
        {
            "classes": _integers(0, _CLASSES, rows),
            "history": _integers(0, _CLASSES, requests, _ORDERS),
            "primes": _integers(_COLUMN_ROWS - 999, _COLUMN_ROWS, _COLUMNS),
            "offsets": torch.arange(_COLUMNS, device="cuda") * _COLUMN_ROWS,
            "multipliers": _integers(0, 2**45, _ORDERS + 1) * 2 + 1,
            "write_slots": (row * requests // rows).int(),
            "write_positions": (_CONTEXT + row % (rows // requests)).int(),
            "write_starts": torch.full((rows,), _CONTEXT, dtype=torch.int32, device="cuda"),
            "pad_class": 2,
        }
        for _ in range(_MOST_COPIES)
    ]
    return _prepared(kernels.engram_hash, inputs, rows * (8.0 + 3 * 4 + 8 * _COLUMNS))


@torch.no_grad()
def _prepare_lookup(rows: int, on_host: bool) -> Prepared:
    entries = _COLUMNS * _COLUMN_ROWS
    codes = torch.randint(0, 120, (entries, _TABLE_WIDTH), dtype=torch.uint8, device="cuda")
    if on_host:
        codes = seen_from(codes.device, codes.cpu().flatten()).view_as(codes)
    table = codes.view(torch.float8_e4m3fn)
    scale = torch.randint(115, 125, (entries, _TABLE_WIDTH // 32), dtype=torch.uint8, device="cuda")
    moved = rows * _COLUMNS * (8.0 + _TABLE_WIDTH * (1 + 1 / 32 + 2))
    inputs = [
        {"table": table, "scale": scale, "rows": _integers(0, entries, rows, _COLUMNS), "dtype": torch.bfloat16}
        for _ in range(copies_for(moved, _MOST_COPIES))
    ]
    return _prepared(kernels.engram_lookup, inputs, moved)


@torch.no_grad()
def _prepare_latent(rows: int) -> Prepared:
    moved = rows * (4.0 + 2 * 2 * _HEAD_DIM)
    inputs = [
        {
            "x": torch.randn(rows, _HEAD_DIM, device="cuda").to(torch.bfloat16),
            "weight": torch.ones(_HEAD_DIM, dtype=torch.bfloat16, device="cuda"),
            "positions": (_CONTEXT + torch.arange(rows, device="cuda")).int(),
            "frequencies": yarn_frequencies(_TURNING, 160000.0, 16.0, 32.0, 1.0, 65536).cuda(),
            "epsilon": 1e-6,
        }
        for _ in range(copies_for(moved, _MOST_COPIES))
    ]
    compiled = torch.compile(kernels.window_latent.backends["torch"].function, dynamic=True, fullgraph=True)
    return _prepared(
        kernels.window_latent, inputs, moved, ("torch, Inductor", functools.partial(call_copy, compiled, inputs))
    )


def _prepared(
    operator: Operator[..., object], inputs: Inputs, moved: float, other: tuple[str, Call] | None = None
) -> Prepared:
    """Against ``other``, or the reference. Nothing of a multiplication counts: memory is what these take."""
    name, call = other or ("reference", functools.partial(call_copy, operator.backends["reference"].overload, inputs))
    ours = functools.partial(call_copy, operator.backends["triton"].overload, inputs)
    return Prepared(variants={"triton": ours, name: call}, copies=len(inputs), operations=0.0, bytes=moved)


def _integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, device="cuda")
