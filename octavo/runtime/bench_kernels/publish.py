"""Cases of ``publish`` at the released model's widths: a chunk of a prompt and decode steps, of pairs and of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from octavo import kernels
from octavo.kernels.paging import PAGE_TOKENS, pages_for
from octavo.kernels.rope import yarn_frequencies
from octavo.kernels.storage import packed_entry_bytes, packed_key_bytes
from octavo.runtime.bench_kernels.case import KernelCase, Prepared, call_copy

_CHANNELS, _KEY_CHANNELS, _TURNING = 512, 128, 64
_CONTEXT = 32768
_COPIES = 4


def publish_cases() -> Iterator[KernelCase]:
    for rows, requests in ((1, 1), (128, 128), (2048, 1), (8192, 1)):
        for ratio in (1, 2):
            kind = "decode" if requests == rows else "prefill"
            yield KernelCase(f"{kind} {rows}, ratio {ratio}", functools.partial(_prepare, rows, requests, ratio))


@torch.no_grad()
def _prepare(rows: int, requests: int, ratio: int) -> Prepared:
    inputs = [_inputs(rows, requests, ratio) for _ in range(_COPIES)]
    read = 4.0 * 2 * rows if ratio == 2 else 2.0 * rows
    stored = rows / ratio * (packed_entry_bytes(_CHANNELS) + packed_key_bytes(_KEY_CHANNELS))
    return Prepared(
        variants={
            name: functools.partial(call_copy, kernels.publish.backends[name].overload, inputs)
            for name in ("triton", "torch")
        },
        copies=_COPIES,
        operations=2.0 * rows / ratio * _CHANNELS * _KEY_CHANNELS,
        bytes=read * _CHANNELS + stored + 2.0 * _CHANNELS * _KEY_CHANNELS,
    )


def _inputs(rows: int, requests: int, ratio: int) -> dict[str, Any]:
    cuda: Any = {"device": "cuda"}
    each = rows // requests
    row = torch.arange(rows, **cuda)
    start = _CONTEXT + (ratio == 2 and requests == rows)  # a decode step that completes pairs
    pages = pages_for(start + each)
    dtype = torch.float32 if ratio == 2 else torch.bfloat16
    pools = (packed_entry_bytes(_CHANNELS), packed_key_bytes(_KEY_CHANNELS))
    entries, keys = (
        torch.zeros(requests * pages, PAGE_TOKENS // ratio, width, dtype=torch.uint8, **cuda) for width in pools
    )
    return {
        "values": torch.randn(rows, _CHANNELS, dtype=dtype, **cuda),
        "gates": torch.randn(rows, _CHANNELS, dtype=dtype, **cuda) if ratio == 2 else None,
        "norm": torch.ones(_CHANNELS, dtype=torch.bfloat16, **cuda),
        "wk": torch.randn(_KEY_CHANNELS, _CHANNELS, dtype=torch.bfloat16, **cuda) * _CHANNELS**-0.5,
        "k_norm": torch.ones(_KEY_CHANNELS, dtype=torch.bfloat16, **cuda),
        "frequencies": yarn_frequencies(_TURNING, 160000.0, 16.0, 32.0, 1.0, 65536).cuda(),
        "write_slots": (row // each).int(),
        "write_positions": (start + row % each).int(),
        "write_starts": torch.full((rows,), start, dtype=torch.int32, **cuda),
        "page_table": torch.randperm(requests * pages, **cuda).view(requests, pages).int(),
        "entries": entries,
        "keys": keys,
        "pending": torch.randn(requests, 2, _CHANNELS, **cuda) if ratio == 2 else None,
        "epsilon": 1e-20,
    }
