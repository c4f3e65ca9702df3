"""Cases of ``select`` and ``select_candidates`` at the released model's widths: chunks of a prompt, decode steps, and
choices within candidate blocks. The library's part is ``deep_gemm.fp8_mqa_logits`` and ``torch.topk`` of its logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.paging import PAGE_TOKENS, pages_for
from octavo.kernels.storage import packed_key_bytes
from octavo.runtime.bench_kernels.case import FP8_PER_SECOND, Call, KernelCase, Prepared, call_copy, copies_for

_HEADS, _CHANNELS, _TOP_K, _TOP_BLOCKS, _BLOCK = 32, 128, 512, 2048, 8
_MOST_COPIES = 32
_TORCH_SCORES = 1 << 26
"""Scores that the backend torch is asked for: at more it takes seconds."""


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    requests: int
    keys: int
    """Of each request, from its last row's position."""
    ratio: int = 1
    operator: str = "select"
    within: bool = False
    """Choose within candidate blocks, drawn at random for each row."""

    @property
    def name(self) -> str:
        kind = "decode" if self.requests == self.rows else "prefill"
        what = " and blocks" if self.operator == "select_candidates" else " within blocks" if self.within else ""
        return f"{kind} {self.rows}, {self.keys} keys of ratio {self.ratio}{what}"


_SHAPES = (
    *(_Shape(rows, 1, 16384, ratio=2) for rows in (128, 512, 2048, 8192)),
    *(_Shape(rows, 1, 131072) for rows in (2048, 8192)),
    *(_Shape(rows, rows, 32768) for rows in (1, 16, 64, 128)),
    _Shape(1, 1, 1 << 20),
    *(_Shape(rows, 1, 131072, operator="select_candidates") for rows in (128, 2048)),
    *(_Shape(rows, 1, 131072, within=True) for rows in (128, 2048)),
    _Shape(128, 128, 131072, within=True),
)


def select_cases() -> Iterator[KernelCase]:
    for shape in _SHAPES:
        yield KernelCase(shape.name, functools.partial(_prepare, shape))


@torch.no_grad()
def _prepare(shape: _Shape) -> Prepared:
    """A row's own keys count as operations, or its candidates'; keys that rows share are read once."""
    random = torch.Generator("cuda").manual_seed(shape.rows)
    inputs = [_inputs(shape, random)]
    visible = ((inputs[0]["positions"] + 1) // shape.ratio).double()
    scored = float(visible.clamp_max(_TOP_BLOCKS * _BLOCK).sum() if shape.within else visible.sum())
    distinct = min(scored, float(shape.requests * shape.keys))
    moved = distinct * packed_key_bytes(_CHANNELS) + shape.rows * (2.0 * _HEADS * (_CHANNELS + 1) + 4.0 * _TOP_K)
    copies = copies_for(moved, _MOST_COPIES)
    inputs += [_inputs(shape, random) for _ in range(copies - 1)]
    backends = kernels.OPERATORS[shape.operator].backends
    variants: dict[str, Call] = {"triton": functools.partial(call_copy, backends["triton"].overload, inputs)}
    if shape.rows * shape.keys <= _TORCH_SCORES:
        variants["torch"] = functools.partial(call_copy, backends["torch"].overload, inputs)
    if find_spec("deep_gemm") is not None and shape.requests == 1 and shape.operator == "select" and not shape.within:
        variants["deep_gemm and topk"] = _library(shape, inputs[0])
    return Prepared(
        variants=variants,
        copies=copies,
        operations=2.0 * _HEADS * _CHANNELS * scored,
        bytes=moved,
        operations_per_second=FP8_PER_SECOND,
    )


def _library(shape: _Shape, given: dict[str, Any]) -> Call:
    """The same choice of the same many keys, in FP8; the keys lie in order and are unpacked already."""
    deep_gemm: Any = import_module("deep_gemm")
    query = given["query"].to(torch.float8_e4m3fn)
    keys = torch.randn(shape.keys, _CHANNELS, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(shape.keys, device="cuda")
    weights = given["weights"].float()
    ends = ((given["positions"] + 1) // shape.ratio).int()
    starts = torch.zeros_like(ends)

    def run(number: int) -> Tensor:
        logits: Tensor = deep_gemm.fp8_mqa_logits(query, (keys, scales), weights, starts, ends)
        return logits.topk(_TOP_K, dim=1).indices

    return run


def _inputs(shape: _Shape, random: torch.Generator) -> dict[str, Any]:
    cuda: Any = {"device": "cuda", "generator": random}
    each, tokens = shape.rows // shape.requests, shape.keys * shape.ratio
    pages = pages_for(tokens)
    row = torch.arange(shape.rows, device="cuda")
    positions = (tokens - each + row % each).int()
    pool = (shape.requests * pages, PAGE_TOKENS // shape.ratio, packed_key_bytes(_CHANNELS))
    keys = torch.randint(0, 256, pool, dtype=torch.uint8, **cuda)
    keys[..., _CHANNELS // 2 :] = 126 + keys[..., _CHANNELS // 2 :] % 3  # scales of a half to two
    given = {
        "query": torch.randn(shape.rows, _HEADS, _CHANNELS, dtype=torch.bfloat16, **cuda),
        "weights": torch.randn(shape.rows, _HEADS, dtype=torch.bfloat16, **cuda),
        "keys": keys,
        "page_table": torch.randperm(shape.requests * pages, **cuda).view(shape.requests, pages).int(),
        "slots": (row // each).int(),
        "positions": positions,
        "scale": (_HEADS * _CHANNELS) ** -0.5,
        "top_k": _TOP_K,
        "block_size": _BLOCK,
    }
    if shape.operator == "select_candidates":
        return given | {"top_blocks": _TOP_BLOCKS}
    return given | {"candidates": _candidates(shape, positions, random) if shape.within else None}


def _candidates(shape: _Shape, positions: Tensor, random: torch.Generator) -> Tensor:
    """[R, 2048] int32: distinct blocks of each row's visible ones, ascending."""
    blocks = (int(positions.min()) + 1) // (shape.ratio * _BLOCK)
    order = torch.rand(shape.rows, blocks, device="cuda", generator=random)
    return order.topk(_TOP_BLOCKS, dim=1).indices.sort(dim=1).values.int()
