"""Numerics ``fast`` on the golden mini checkpoint: near the official code's logits, and far from them when broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.torch_backend import attend, experts, publish
from octavo.runtime.config import EngineConfig, GraphMode
from tests.model.mini_run import MINI, golden
from tests.teacher_forced import judge_fast, teacher_forced


def config(graphs: GraphMode = "on") -> EngineConfig:
    return EngineConfig(
        model=MINI, device="cpu", numerics="fast", kv_tokens=256, max_requests=2, chunk=96, graphs=graphs
    )


@pytest.fixture(scope="module")
def prefill() -> dict[str, Tensor]:
    return golden("prefill", "reference")


@pytest.mark.parametrize(("prompt", "steps"), [("p37", [37]), ("p37", [30, 1, 1, 5]), ("p96", [96]), ("p96", [50, 46])])
def test_near_the_goldens(prompt: str, steps: list[int], prefill: dict[str, Tensor]) -> None:
    logits = teacher_forced(config(), prefill[f"{prompt}.input_ids"].tolist(), steps)
    assert not judge_fast(logits, prefill[f"{prompt}.logits"])


@pytest.mark.parametrize("graphs", ["off", "eager", "compare", "poison"])
def test_modes_agree(graphs: GraphMode, prefill: dict[str, Tensor]) -> None:
    """Steps as large as their bucket have no padding: then all modes run the same kernels on the same rows."""
    ids = prefill["p96.input_ids"].tolist()
    steps = [64, 16, 8, 8]
    assert teacher_forced(config(graphs), ids, steps).equal(teacher_forced(config("on"), ids, steps))


def _not_back(turn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *rest, inverse=False: x if inverse else turn(x, *rest)


def _no_sink(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda query, found, sink: function(query, found, torch.full_like(sink, -1e4))


def _wrong_sign(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda gate, up, limit: function(gate, -up, limit)


def _no_norm(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, epsilon: x


@pytest.mark.parametrize(
    ("module", "name", "breaks"),
    [
        (attend, "_softmax_attention", _no_sink),
        (attend, "turn", _not_back),
        (experts, "gated", _wrong_sign),
        (publish, "rms", _no_norm),
    ],
    ids=["attend without sink", "attend without turning back", "experts with a wrong sign", "publish without norm"],
)
def test_a_broken_operator_exceeds_the_limits(
    module: Any, name: str, breaks: Any, prefill: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, breaks(getattr(module, name)))
    logits = teacher_forced(config(), prefill["p96.input_ids"].tolist(), [96])
    assert judge_fast(logits, prefill["p96.logits"])
