"""While training, every operator of the model is replaced by its differentiable counterpart.

The modules stay the engine's. A :class:`TrainingOperators` catches their calls of ``octavo::`` overloads and answers
them from ``rows`` and ``attention``; an operator without a counterpart is an error, never a silent fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octavo import kernels
from tools.train_nano import attention, rows
from tools.train_nano.attention import Step
from tools.train_nano.formats import Format
from tools.train_nano.fused import look_up

_INTEGER = frozenset(kernels.OPERATORS[name].overload for name in ("token_classes", "engram_hash"))
"""Operators on integers: there is nothing to differentiate, so the engine's own run."""

_BY_ROW: Mapping[str, Callable[..., Any]] = {
    "linear_f32": rows.linear_f32,
    "grouped_linear": rows.grouped_linear,
    "rms_norm": rows.rms_norm,
    "mhc_mix": rows.mhc_mix,
    "mhc_collapse": rows.mhc_collapse,
    "mhc_expand": rows.mhc_expand,
    "stream_mean": rows.stream_mean,
    "rotate": rows.rotate,
    "window_latent": rows.window_latent,
    "index_query": rows.index_query,
    "shared_expert": rows.shared_expert,
    "combine": rows.combine,
    "engram_gate": rows.engram_gate,
}


class TrainingOperators(TorchFunctionMode):
    """A context in which the model's operators run on ``step`` and can be differentiated."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        numerics = step.numerics
        self._table: dict[Any, Callable[..., Any]] = {
            kernels.OPERATORS[name].overload: _with_numerics(function, numerics) for name, function in _BY_ROW.items()
        }
        for method in (
            *(self._linear_f8, self._linear, self._experts, self._publish, self._select, self._select_candidates),
            *(self._attend, self._commit_window, self._engram_lookup, self._embed_tokens),
        ):
            self._table[kernels.OPERATORS[method.__name__.removeprefix("_")].overload] = method

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._table.get(func) if isinstance(func, torch._ops.OpOverload) else None
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "octavo" and func not in _INTEGER:
            raise NotImplementedError(f"{func}: no differentiable counterpart in tools/train_nano")
        return func(*args, **(kwargs or {}))

    def _own(self, x: Tensor, weight: Tensor) -> Tensor:
        """Input of a matrix; what belongs to the indexer passes no gradient on."""
        return x.detach() if id(weight) in self.step.learned else x

    def _linear_f8(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return rows.linear_f8(self.step.numerics, self._own(x, weight), weight, scale)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return rows.linear(self.step.numerics, self._own(x, weight), weight)

    def _experts(
        self,
        x: Tensor,
        live: Tensor,
        image: Tensor,
        gate: Tensor,
        bias: Tensor,
        bias_vl: Tensor | None,
        w1: Tensor,
        s1: Tensor,
        w2: Tensor,
        s2: Tensor,
        w3: Tensor,
        s3: Tensor,
        first: int,
        top_k: int,
        route_scale: float,
        limit: float,
    ) -> Tensor:
        numerics = self.step.numerics
        weights = rows.route(x, numerics.weight(gate, Format.BF16, torch.float32), bias, top_k, route_scale)
        self.step.loads.append((weights.detach() > 0).float().sum(0))
        return rows.routed_experts(numerics, x, weights, w1, w2, w3, limit)

    def _publish(
        self,
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
        attention.publish(self.step, values, gates, norm, wk, k_norm, frequencies, int(entries), epsilon)

    def _select(
        self,
        query: Tensor,
        weights: Tensor,
        keys: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        candidates: Tensor | None,
        scale: float,
        top_k: int,
        block_size: int,
    ) -> Tensor | None:
        return attention.select(self.step, query, weights, int(keys), candidates, scale, top_k)

    def _select_candidates(
        self,
        query: Tensor,
        weights: Tensor,
        keys: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        scale: float,
        top_k: int,
        top_blocks: int,
        block_size: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        return attention.select_candidates(self.step, query, weights, int(keys), scale, top_k, top_blocks, block_size)

    def _attend(
        self,
        query: Tensor,
        latents: Tensor,
        ring: Tensor,
        sink: Tensor,
        slots: Tensor,
        positions: Tensor,
        write_slots: Tensor,
        write_positions: Tensor,
        write_starts: Tensor,
        page_table: Tensor,
        entries: Tensor | None,
        selected: Tensor | None,
    ) -> Tensor:
        source = None if entries is None else int(entries)
        return attention.attend(self.step, query, latents, ring.shape[1], sink, source, selected)

    def _commit_window(self, ring: Tensor, latents: Tensor, write_slots: Tensor, write_positions: Tensor) -> None:
        return None

    def _embed_tokens(self, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return look_up(self.step.numerics.weight(weight, Format.BF16), ids)

    def _engram_lookup(self, table: Tensor, scale: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        return look_up(self.step.numerics.weight(table, Format.F8_ROWS), index).flatten(1)


def _with_numerics(function: Callable[..., Any], numerics: rows.Numerics) -> Callable[..., Any]:
    return functools.partial(function, numerics)
