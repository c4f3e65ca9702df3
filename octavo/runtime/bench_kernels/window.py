"""Cases of ``commit_window`` at the released model's widths: decode steps and chunks of one prompt."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from octavo import kernels
from octavo.runtime.bench_kernels.case import KernelCase, Prepared, call_copy

_CHANNELS, _WINDOW = 512, 128
_CONTEXT = 32768
_COPIES = 8


def window_cases() -> Iterator[KernelCase]:
    for rows, requests in ((1, 1), (128, 128), (512, 1), (8192, 1)):
        kind = "decode" if requests == rows else "prefill"
        yield KernelCase(f"{kind} {rows}", functools.partial(_prepare, rows, requests))


@torch.no_grad()
def _prepare(rows: int, requests: int) -> Prepared:
    inputs = [_inputs(rows, requests) for _ in range(_COPIES)]
    kept = min(rows // requests, _WINDOW) * requests
    return Prepared(
        variants={
            name: functools.partial(call_copy, kernels.commit_window.backends[name].overload, inputs)
            for name in ("triton", "torch")
        },
        copies=_COPIES,
        operations=0.0,
        bytes=2 * 2.0 * kept * _CHANNELS + 2 * 4.0 * rows,
    )


def _inputs(rows: int, requests: int) -> dict[str, Any]:
    cuda: Any = {"device": "cuda"}
    row = torch.arange(rows, **cuda)
    each = rows // requests
    return {
        "ring": torch.zeros(requests, _WINDOW, _CHANNELS, dtype=torch.bfloat16, **cuda),
        "latents": torch.randn(rows, _CHANNELS, **cuda).to(torch.bfloat16),
        "write_slots": (row // each).int(),
        "write_positions": (_CONTEXT + row % each).int(),
    }
