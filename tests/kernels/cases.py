"""Valid arguments for every operator: at least one case each, for any batch, size and numeric mode.

A case is a function that makes the arguments of one operator, by name. Activations are BF16 (mode ``reference``) or
F32 (mode ``plain``); rows that are dead in the batch hold zeros, -1 or False.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.engram import DEAD_CLASS
from octavo.kernels.operator import Operator
from octavo.kernels.rope import plain_frequencies
from tests.kernels.batches import SLOTS, Batch, page_table
from tests.kernels.draw import Draw, Size

Arguments = dict[str, Any]
EPSILON = 1e-20
CLASSES = 420
"""Token classes of the mini tokenizer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call an operator."""

    name: str
    operator: Operator[..., object]
    make: Callable[[Draw], Arguments]

    def arguments(self, batch: Batch, size: Size, dtype: torch.dtype, seed: int = 0) -> Arguments:
        return self.make(Draw(batch, size, dtype, seed))


CASES: list[Case] = []
"""Every case; filled below."""


def case(
    operator: Operator[..., Any],
) -> Callable[[Callable[[Draw], Arguments]], Callable[[Draw], Arguments]]:
    def register(make: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
        CASES.append(Case(make.__name__, operator, make))
        return make

    return register


def _written(batch: Batch) -> Arguments:
    return {"write_slots": batch.slots, "write_positions": batch.positions, "write_starts": batch.starts}


def _attend(draw: Draw, entries: Tensor | None, selected: Tensor | None) -> Arguments:
    size, batch = draw.size, draw.batch
    return {
        "query": draw.rows(size.heads, size.head_dim),
        "latents": draw.rows(size.head_dim),
        "ring": draw.normal(SLOTS, size.window, size.head_dim, dtype=draw.dtype),
        "sink": draw.normal(size.heads),
        "frequencies": plain_frequencies(size.rotary, 10000.0) if entries is None else draw.frequencies(),
        "slots": batch.slots,
        "positions": batch.positions,
        **_written(batch),
        "page_table": page_table(),
        "entries": entries,
        "selected": selected,
    }


@case(kernels.attend)
def attend_window(draw: Draw) -> Arguments:
    return _attend(draw, None, None)


@case(kernels.attend)
def attend_pairs(draw: Draw) -> Arguments:
    selected = draw.choices(draw.size.top_k, (draw.batch.positions + 1) // 2)
    return _attend(draw, draw.pool(2, draw.size.head_dim), selected)


@case(kernels.attend)
def attend_tokens(draw: Draw) -> Arguments:
    selected = draw.choices(draw.size.top_k, draw.batch.positions + 1)
    return _attend(draw, draw.pool(1, draw.size.head_dim), selected)


@case(kernels.commit_window)
def commit_window(draw: Draw) -> Arguments:
    size, batch = draw.size, draw.batch
    return {
        "ring": draw.normal(SLOTS, size.window, size.head_dim, dtype=draw.dtype),
        "latents": draw.rows(size.head_dim),
        "write_slots": batch.slots,
        "write_positions": batch.positions,
    }


@case(kernels.commit_window)
def commit_history(draw: Draw) -> Arguments:
    """The Engram history is a ring of token classes."""
    batch = draw.batch
    return {
        "ring": draw.integers(0, CLASSES, SLOTS, 3),
        "latents": draw.integers(0, CLASSES, batch.rows),
        "write_slots": batch.slots,
        "write_positions": batch.positions,
    }


def _publish(draw: Draw, ratio: int, **halves: Tensor | None) -> Arguments:
    size = draw.size
    return {
        **halves,
        "norm": draw.norm(size.head_dim),
        "wk": draw.matrix(size.index_dim, size.head_dim),
        "k_norm": draw.norm(size.index_dim),
        "frequencies": draw.frequencies(),
        **_written(draw.batch),
        "page_table": page_table(),
        "entries": draw.pool(ratio, size.head_dim),
        "keys": draw.pool(ratio, size.index_dim),
        "epsilon": EPSILON,
    }


@case(kernels.publish)
def publish_tokens(draw: Draw) -> Arguments:
    return _publish(draw, 1, values=draw.rows(draw.size.head_dim), gates=None, pending=None)


@case(kernels.publish)
def publish_pairs(draw: Draw) -> Arguments:
    return _publish(
        draw,
        2,
        values=draw.rows(draw.size.head_dim, dtype=torch.float32),
        gates=draw.rows(draw.size.head_dim, dtype=torch.float32),
        pending=draw.normal(SLOTS, 2, draw.size.head_dim),
    )


def _select(draw: Draw, ratio: int) -> Arguments:
    size, batch = draw.size, draw.batch
    return {
        "query": draw.rows(size.index_heads, size.index_dim),
        "weights": draw.rows(size.index_heads),
        "keys": draw.pool(ratio, size.index_dim),
        "page_table": page_table(),
        "slots": batch.slots,
        "positions": batch.positions,
        "scale": size.index_dim**-0.5 * size.index_heads**-0.5,
        "top_k": size.top_k,
        "block_size": size.block_size,
    }


@case(kernels.select)
def select_pairs(draw: Draw) -> Arguments:
    return _select(draw, 2) | {"candidates": None}


@case(kernels.select)
def select_restricted(draw: Draw) -> Arguments:
    size = draw.size
    blocks = -(-(draw.batch.positions + 1) // size.block_size)
    return _select(draw, 1) | {"candidates": draw.choices(size.top_blocks, blocks)}


@case(kernels.select_candidates)
def select_candidates(draw: Draw) -> Arguments:
    return _select(draw, 1) | {"top_blocks": draw.size.top_blocks}


@case(kernels.embed_tokens)
def embed_tokens(draw: Draw) -> Arguments:
    ids = draw.integers(0, 300, draw.batch.rows).masked_fill(~draw.batch.live, -1)
    return {"ids": ids, "weight": draw.normal(300, draw.size.hidden, dtype=torch.bfloat16), "dtype": draw.dtype}


@case(kernels.token_classes)
def token_classes(draw: Draw) -> Arguments:
    ids = draw.integers(0, 300, draw.batch.rows).masked_fill(~draw.batch.live, -1)
    return {"ids": ids, "image": draw.batch.image, "classes": draw.integers(0, CLASSES, 300)}


@case(kernels.engram_hash)
def engram_hash(draw: Draw) -> Arguments:
    columns = 3 * draw.size.engram_heads
    classes = draw.integers(0, CLASSES, draw.batch.rows)
    history = draw.integers(0, CLASSES, SLOTS, 3)
    return {
        "classes": classes.masked_fill(draw.batch.image | ~draw.batch.live, DEAD_CLASS),
        "history": history.masked_fill(history % 7 == 0, DEAD_CLASS),
        "primes": draw.integers(101, 200, columns),
        "offsets": torch.arange(columns) * 200,
        "multipliers": draw.integers(1, 2**53, 4) * 2 + 1,
        **_written(draw.batch),
        "pad_class": 2,
    }


@case(kernels.engram_lookup)
def engram_lookup(draw: Draw) -> Arguments:
    size = draw.size
    columns, entries = 3 * size.engram_heads, 300
    return {
        "table": draw.normal(entries, size.engram_width).to(torch.float8_e4m3fn),
        "scale": draw.integers(120, 128, entries, size.engram_width // 32, dtype=torch.uint8),
        "rows": draw.integers(0, entries, draw.batch.rows, columns),
        "dtype": draw.dtype,
    }


@case(kernels.engram_gate)
def engram_gate(draw: Draw) -> Arguments:
    size = draw.size
    return {
        "streams": draw.rows(size.streams, size.hidden),
        "projected": draw.rows((size.streams + 1) * size.hidden),
        "image": draw.batch.image,
        "q_weight": draw.norm(size.streams, size.hidden),
        "k_weight": draw.norm(size.streams, size.hidden),
        "epsilon": EPSILON,
    }


def _experts(draw: Draw, resident: range) -> Arguments:
    size = draw.size
    w1, s1 = draw.packed(size.experts, size.inner, size.hidden)
    w2, s2 = draw.packed(size.experts, size.hidden, size.inner)
    w3, s3 = draw.packed(size.experts, size.inner, size.hidden)
    part = slice(resident.start, resident.stop)
    return {
        "x": draw.rows(size.hidden),
        "live": draw.batch.live,
        "image": draw.batch.image,
        "gate": draw.matrix(size.experts, size.hidden),
        "bias": draw.normal(size.experts, gain=0.1),
        "bias_vl": draw.normal(size.experts, gain=0.5),
        "w1": w1[part],
        "s1": s1[part],
        "w2": w2[part],
        "s2": s2[part],
        "w3": w3[part],
        "s3": s3[part],
        "first_expert": resident.start,
        "top_k": size.chosen,
        "route_scale": 1.5,
        "limit": 0.5,
    }


@case(kernels.experts)
def experts_all(draw: Draw) -> Arguments:
    return _experts(draw, range(draw.size.experts))


@case(kernels.experts)
def experts_of_one_rank(draw: Draw) -> Arguments:
    """Half of the experts, of a model without vision."""
    half = draw.size.experts // 2
    return _experts(draw, range(half, 2 * half)) | {"bias_vl": None}


@case(kernels.shared_expert)
def shared_expert(draw: Draw) -> Arguments:
    size = draw.size
    w1, s1 = draw.tiled(size.inner, size.hidden)
    w2, s2 = draw.tiled(size.hidden, size.inner)
    w3, s3 = draw.tiled(size.inner, size.hidden)
    weights = {"w1": w1, "s1": s1, "w2": w2, "s2": s2, "w3": w3, "s3": s3}
    return {"x": draw.rows(size.hidden), **weights, "limit": 0.5}


@case(kernels.combine)
def combine(draw: Draw) -> Arguments:
    hidden = draw.size.hidden
    return {"reduced": draw.rows(hidden, dtype=torch.float64), "shared": draw.rows(hidden)}


@case(kernels.linear)
def linear(draw: Draw) -> Arguments:
    return {"x": draw.rows(draw.size.hidden), "weight": draw.matrix(draw.size.head_dim + 3, draw.size.hidden)}


@case(kernels.linear_f8)
def linear_f8(draw: Draw) -> Arguments:
    weight, scale = draw.tiled(draw.size.head_dim + 3, draw.size.hidden)
    return {"x": draw.rows(draw.size.hidden), "weight": weight, "scale": scale}


@case(kernels.linear_f8_pair)
def linear_f8_pair(draw: Draw) -> Arguments:
    """Of other numbers of outputs, that share no tile."""
    weight_a, scale_a = draw.tiled(draw.size.inner + 5, draw.size.hidden)
    weight_b, scale_b = draw.tiled(draw.size.head_dim + 3, draw.size.hidden)
    return {
        "x": draw.rows(draw.size.hidden),
        "weight_a": weight_a,
        "scale_a": scale_a,
        "weight_b": weight_b,
        "scale_b": scale_b,
    }


@case(kernels.linear_f32)
def linear_f32(draw: Draw) -> Arguments:
    return {"x": draw.rows(draw.size.hidden), "weight": draw.matrix(draw.size.head_dim + 3, draw.size.hidden)}


@case(kernels.grouped_linear)
def grouped_linear(draw: Draw) -> Arguments:
    size = draw.size
    weight, scale = draw.tiled(size.groups * size.rank, size.heads // size.groups * size.head_dim)
    return {"x": draw.rows(size.heads, size.head_dim), "weight": weight, "scale": scale, "groups": size.groups}


@case(kernels.mhc_mix)
def mhc_mix(draw: Draw) -> Arguments:
    size = draw.size
    mixes = size.streams * (2 + size.streams)
    return {
        "streams": draw.rows(size.streams, size.hidden),
        "fn": draw.matrix(mixes, size.streams * size.hidden, torch.float32),
        "scale": draw.normal(3),
        "base": draw.normal(mixes),
        "iterations": 20,
        "epsilon": 1e-6,
        "norm_epsilon": EPSILON,
    }


@case(kernels.mhc_collapse)
def mhc_collapse(draw: Draw) -> Arguments:
    size = draw.size
    return {
        "streams": draw.rows(size.streams, size.hidden),
        "pre": draw.rows(size.streams, dtype=torch.float32).sigmoid(),
        "weight": draw.norm(size.hidden),
        "epsilon": EPSILON,
    }


@case(kernels.mhc_expand)
def mhc_expand(draw: Draw) -> Arguments:
    size = draw.size
    return {
        "streams": draw.rows(size.streams, size.hidden),
        "y": draw.rows(size.hidden),
        "post": draw.rows(size.streams, dtype=torch.float32).sigmoid(),
        "comb": draw.rows(size.streams, size.streams, dtype=torch.float32).softmax(1),
    }


@case(kernels.mhc_site)
def mhc_site(draw: Draw) -> Arguments:
    collapse, mix = mhc_collapse(draw), mhc_mix(draw)
    return {
        **mhc_expand(draw),
        "pre": collapse["pre"],
        "weight": collapse["weight"],
        "collapse_epsilon": EPSILON,
        **{name: value for name, value in mix.items() if name != "streams"},
    }


@case(kernels.stream_mean)
def stream_mean(draw: Draw) -> Arguments:
    return {"streams": draw.rows(draw.size.streams, draw.size.hidden)}


@case(kernels.rms_norm)
def rms_norm(draw: Draw) -> Arguments:
    return {"x": draw.rows(draw.size.hidden), "weight": draw.norm(draw.size.hidden), "epsilon": EPSILON}


@case(kernels.window_latent)
def window_latent(draw: Draw) -> Arguments:
    return {
        "x": draw.rows(draw.size.head_dim),
        "weight": draw.norm(draw.size.head_dim),
        "positions": draw.batch.positions,
        "frequencies": draw.frequencies(),
        "epsilon": EPSILON,
    }


@case(kernels.index_query)
def index_query(draw: Draw) -> Arguments:
    return {
        "x": draw.rows(draw.size.index_heads, draw.size.index_dim),
        "positions": draw.batch.positions,
        "frequencies": draw.frequencies(),
    }
