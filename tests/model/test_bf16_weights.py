"""F8 weights that are held in BF16 too: the same numbers, more bytes, and read where products are BF16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import Engine, EngineConfig, SamplingParams, UsageError, kernels
from octavo.kernels.quantise import dequantise_tiles
from octavo.model.model import empty_model, resident_bytes
from octavo.model.presets import preset
from octavo.model.random_weights import randomise
from octavo.model.weights import HeldInBF16
from octavo.runtime.assemble import choose_bf16_weights, plan
from tests.kernels.batches import random_batch
from tests.kernels.draw import WIDE, Draw

CPU = torch.device("cpu")


def test_every_dense_weight_is_held_exactly() -> None:
    """All that is stored as F8, and routed experts, which are F4, not."""
    model = empty_model(preset("tiny"), CPU, bf16_weights=True)
    randomise(model.official_parameters(), seed=0)
    model.fill_bf16()
    held = [module for module in model.modules() if isinstance(module, HeldInBF16)]
    weights = [each for module in held for each in module.f8_weights()]
    f8 = [tensor for tensor in model.parameters() if tensor.dtype is torch.float8_e4m3fn]
    assert {each.weight.data_ptr() for each in weights} == {tensor.data_ptr() for tensor in f8}
    for module in held:
        assert module.weight_bf16 is not None
        expected = torch.cat([dequantise_tiles(each.weight, each.scale) for each in module.f8_weights()])
        assert torch.equal(module.weight_bf16.double(), expected.double())
    without = empty_model(preset("tiny"), CPU)
    assert resident_bytes(model) == resident_bytes(without) + 2 * sum(tensor.nbytes for tensor in f8)
    assert set(model.official_parameters()) == set(without.official_parameters())


@pytest.mark.parametrize("rows", (1, 19))
def test_operators_give_the_same_with_and_without(rows: int) -> None:
    """By the torch backend to the bit; the reference does not look at them."""
    draw = Draw(random_batch(rows, seed=4), WIDE, torch.bfloat16, seed=7)
    x, weight = draw.rows(WIDE.hidden), draw.tiled(64, WIDE.hidden)
    gate, down, up = draw.tiled(64, WIDE.hidden), draw.tiled(WIDE.hidden, 64), draw.tiled(64, WIDE.hidden)

    def wide(*pairs: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([dequantise_tiles(*pair) for pair in pairs]).bfloat16()

    calls: tuple[tuple[Any, tuple[Any, ...], tuple[Tensor, ...]], ...] = (
        (kernels.linear_f8, (x, *weight), (wide(weight),)),
        (kernels.grouped_linear, (x.view(rows, 2, -1), *draw.tiled(64, WIDE.hidden // 2), 2), ()),
        (kernels.shared_expert, (x, *gate, *down, *up, 10.0), (wide(gate, up), wide(down))),
    )
    for operator, given, held in calls:
        if operator is kernels.grouped_linear:
            held = (wide((given[1], given[2])),)
        backend = operator.backends["torch"].overload
        assert torch.equal(backend(*given, *held), backend(*given)), operator.name
        nonsense = [torch.full_like(each, torch.nan) for each in held]
        assert backend(*given, *nonsense).isnan().all(), f"{operator.name} reads them"
        assert torch.equal(operator(*given, *nonsense), operator(*given)), operator.name


@pytest.mark.timeout(120)
def test_answers_are_the_same() -> None:
    found = {}
    for held in ("on", "off"):
        fields: dict[str, Any] = {"numerics": "fast", "chunk": 48, "kv_tokens": 4096, "max_requests": 8, "layers": 3}
        with Engine(EngineConfig(device="cpu", bf16_weights=held, **fields)) as engine:
            params = SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True)
            (result,) = engine.generate(["The key is 9071."], params)
        found[held] = (result.ids, result.answers[0].logprobs)
    assert found["on"] == found["off"]


def test_the_default_and_what_is_refused() -> None:
    cuda = torch.device("cuda")
    assert choose_bf16_weights("auto", "fast", cuda)
    assert not choose_bf16_weights("auto", "fast", CPU) and not choose_bf16_weights("auto", "reference", cuda)
    assert choose_bf16_weights("on", "fast", CPU) and not choose_bf16_weights("off", "fast", cuda)
    with pytest.raises(UsageError, match=r"--bf16-weights on with reference numerics.*nothing would read them"):
        plan(EngineConfig(device="cpu", bf16_weights="on"))
