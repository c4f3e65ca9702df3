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
from tools.train_nano.functions import expand, look_up, mix, turn

_INTEGER = frozenset(kernels.OPERATORS[name].overload for name in ("token_classes", "engram_hash"))
"""Operators on integers: there is nothing to differentiate, so the engine's own run."""

_PLAIN: Mapping[str, Callable[..., Any]] = {
    "mhc_mix": mix,
    "mhc_expand": expand,
    "stream_mean": lambda streams: streams.mean(1),
    "combine": torch.add,
}
"""Operators in which nothing is rounded that training rounds."""
_ROUNDED: Mapping[str, Callable[..., Any]] = {
    "linear_f32": rows.linear_f32,
    "rms_norm": rows.rms_norm,
    "mhc_collapse": rows.mhc_collapse,
    "window_latent": rows.window_latent,
    "index_query": rows.index_query,
    "engram_gate": rows.engram_gate,
}
"""Those that act on each row alone."""


class TrainingOperators(TorchFunctionMode):
    """A context in which the model's operators run on ``step`` and can be differentiated."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        by_name = dict(_PLAIN)
        by_name |= {name: functools.partial(function, step.numerics) for name, function in _ROUNDED.items()}
        by_name |= {
            method.__name__.removeprefix("_"): _by_keyword(method)
            for method in (
                *(self._linear_f8, self._grouped_linear, self._shared_expert, self._linear, self._experts),
                *(self._publish, self._select),
                *(self._select_candidates, self._attend, self._commit_window, self._engram_lookup, self._embed_tokens),
            )
        }
        self._table = {kernels.OPERATORS[name].overload: function for name, function in by_name.items()}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._table.get(func) if isinstance(func, torch._ops.OpOverload) else None
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "octavo" and func not in _INTEGER:
            raise NotImplementedError(f"{func}: no differentiable counterpart in tools/train_nano")
        return func(*args, **(kwargs or {}))

    # The following take their operator's arguments by name, and leave out those that only pools and batches need, and
    # what weights are besides the masters that they are here.

    def _linear_f8(self, x: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return rows.linear_f8(self.step.numerics, self._own(x, weight), weight)

    def _grouped_linear(self, x: Tensor, weight: Tensor, groups: int, **_: Any) -> Tensor:
        return rows.grouped_linear(self.step.numerics, x, weight, groups)

    def _shared_expert(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float, **_: Any) -> Tensor:
        return rows.shared_expert(self.step.numerics, x, w1, w2, w3, limit)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return rows.linear(self.step.numerics, self._own(x, weight), weight)

    def _own(self, x: Tensor, weight: Tensor) -> Tensor:
        """Input of a matrix; what belongs to the indexer passes no gradient on."""
        return x.detach() if id(weight) in self.step.learned else x

    def _experts(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        top_k: int,
        route_scale: float,
        limit: float,
        **_: Any,
    ) -> Tensor:
        numerics = self.step.numerics
        weights = rows.route(x, numerics.weight(gate, Format.BF16, torch.float32), bias, top_k, route_scale)
        self.step.loads.append((weights.detach() > 0).float().sum(0))
        return rows.routed_experts(numerics, x, weights, w1, w2, w3, limit)

    def _publish(self, entries: Tensor, **given: Any) -> None:
        wanted = ("values", "gates", "norm", "wk", "k_norm", "frequencies", "epsilon")
        attention.publish(self.step, source=int(entries), **{name: given[name] for name in wanted})

    def _select(self, keys: Tensor, **given: Any) -> Tensor | None:
        wanted = ("query", "weights", "candidates", "scale", "top_k")
        return attention.select(self.step, source=int(keys), **{name: given[name] for name in wanted})

    def _select_candidates(self, keys: Tensor, **given: Any) -> tuple[Tensor | None, Tensor | None]:
        wanted = ("query", "weights", "scale", "top_k", "top_blocks", "block_size")
        return attention.select_candidates(self.step, source=int(keys), **{name: given[name] for name in wanted})

    def _attend(
        self,
        query: Tensor,
        latents: Tensor,
        ring: Tensor,
        sink: Tensor,
        frequencies: Tensor,
        positions: Tensor,
        entries: Tensor | None,
        selected: Tensor | None,
        **_: Any,
    ) -> Tensor:
        source = None if entries is None else int(entries)
        angles = self.step.numerics.angles(positions, frequencies)
        turned = turn(query, *angles, inverse=False)
        attended = attention.attend(self.step, turned, latents, ring.shape[1], sink, source, selected)
        return turn(attended, *angles, inverse=True)

    def _commit_window(self, **_: Any) -> None:
        return None

    def _embed_tokens(self, ids: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return look_up(self.step.numerics.weight(weight, Format.BF16), ids)

    def _engram_lookup(self, table: Tensor, rows: Tensor, **_: Any) -> Tensor:
        return look_up(self.step.numerics.weight(table, Format.F8_ROWS), rows).flatten(1)


def _by_keyword(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` called like the operator that it stands for, with every argument by its name in the schema."""
    schema = kernels.OPERATORS[method.__name__.removeprefix("_")].overload._schema
    names = [argument.name for argument in schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(**dict(zip(names, args, strict=False)), **kwargs)

    return call
