"""What the routers of a step choose, which the floor of its experts goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.experts import choose_experts
from octavo.kernels.experts import experts as experts_operator
from octavo.runtime.bench_steps.components import walk
from octavo.runtime.bench_steps.steps import StepInputs, Steps
from octavo.runtime.floor import Routing


def routed(steps: Steps, step: StepInputs) -> tuple[Routing, ...]:
    """By layer. Runs the step once, uncompiled, so that it moves the state on."""
    with _Watched() as watched:
        for _ in walk(steps, step, compiled=False):
            pass
    return tuple(watched.found)


class _Watched(TorchDispatchMode):
    """While it is active, every call of ``experts`` is noted, whichever backend serves it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Routing] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func._schema.name == experts_operator.overload._schema.name:
            names = [argument.name for argument in func._schema.arguments]
            self.found.append(_chosen(**dict(zip(names, args, strict=False)), **given))
        call: Callable[..., Any] = func
        return call(*args, **given)


def _chosen(**given: Any) -> Routing:
    """As ``experts`` chooses, by its arguments; the router's product in F32."""
    logits = torch.mm(given["x"].float(), given["gate"].float().t())
    routing = given["live"], given["image"], given["bias"], given["bias_vl"]
    chosen, _ = choose_experts(logits, *routing, given["top_k"], given["route_scale"])
    local = chosen - given["first_expert"]
    local = local[(chosen >= 0) & (local >= 0) & (local < given["w1"].shape[0])]
    return Routing(local.numel(), local.unique().numel())
