"""Mixture of experts: golden routing and outputs, the rules of the choice, and sums over ranges of experts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.experts import route
from octavo.kernels.numerics import softplus
from tests.kernels.batches import random_batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import CASES, Arguments
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.goldens import mini_pair, mini_weights, tensors

STAGE = {name.removeprefix("p37."): t for name, t in tensors("prefill_ref").items() if name.startswith("p37.")}
LAYERS = range(10)
LIVE = torch.ones(37, dtype=torch.bool)
TEXT = torch.zeros(37, dtype=torch.bool)


@pytest.mark.parametrize("layer", LAYERS)
def test_golden_routing(layer: int) -> None:
    """Experts are the golden ones; weights within 1e-6: the score is composed from ``exp`` and ``log1p`` here, and
    128 products are summed in F32 in an order that the platform chooses."""
    chosen, weights = route(STAGE[f"ffn_in.{layer}"], LIVE, TEXT, *router(layer), 2, 1.5)
    order = chosen.argsort(1)
    golden = STAGE[f"moe.{layer}.experts"].long().argsort(1)
    assert torch.equal(chosen.gather(1, order), STAGE[f"moe.{layer}.experts"].long().gather(1, golden))
    expected = STAGE[f"moe.{layer}.weights"].gather(1, golden)
    torch.testing.assert_close(weights.gather(1, order), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_golden_outputs(layer: int) -> None:
    """Routed and shared experts of every mini layer, with a clamp that bites, to the bit."""
    x = STAGE[f"ffn_in.{layer}"]
    partial = kernels.experts(
        x, LIVE, TEXT, *router(layer), **packed(layer), first_expert=0, top_k=2, route_scale=1.5, limit=0.5
    )
    shared = kernels.shared_expert(x, *shared_weights(layer), 0.5)
    assert same_bits(kernels.combine(partial, shared), STAGE[f"ffn_out.{layer}"])
    assert not torch.equal(kernels.shared_expert(x, *shared_weights(layer), 10.0), shared)


@pytest.mark.parametrize("size", (MINI, WIDE), ids=lambda size: size.name)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
def test_partial_sums_over_ranges_add_up_to_all(size: Size, dtype: torch.dtype) -> None:
    """Any division of the experts over ranks gives the sum of one rank to the bit: addends have few enough bits.

    In ``plain`` F32 outputs are added in F64: 53 bits hold sums of two or five of them, unless one is 2^26 times
    smaller than another; none is here.
    """
    arguments = arguments_of(size, dtype)
    whole = kernels.experts(**arguments)
    count = size.experts
    for borders in ([0, 3, count], [0, 1, 2, count - 1, count], [*range(count + 1)], [0, 0, count]):
        total = torch.zeros_like(whole)
        for low, high in itertools.pairwise(borders):
            total = total + kernels.experts(**resident(arguments, low, high))
        assert same_bits(total, whole), borders
    assert whole[arguments["live"]].any(1).all()


def test_rows_of_a_rank_without_their_experts_are_zero() -> None:
    arguments = arguments_of(MINI, torch.bfloat16)
    chosen, _ = routed(arguments)
    partial = kernels.experts(**resident(arguments, 0, 2))
    strangers = ~((chosen == 0) | (chosen == 1)).any(1)
    assert strangers.any()
    assert same_bits(partial[strangers], torch.zeros_like(partial[strangers]))
    assert partial[~strangers].any(1).all()


def test_a_dead_row_is_routed_nowhere() -> None:
    arguments = arguments_of(MINI, torch.bfloat16)
    arguments["x"] = torch.randn(29, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen, weights = routed(arguments)
    dead = ~arguments["live"]
    assert dead.any()
    assert (chosen[dead] == -1).all()
    assert (weights[dead] == 0).all()
    assert ((chosen[~dead] >= 0) & (weights[~dead] > 0)).all()


def test_bias_takes_part_in_the_choice_alone() -> None:
    """Scores rise with the expert's number; a bias on expert 0 gets it chosen, at the weight of its low score."""
    logits = [0.0, 1.0, 2.0, 3.0]
    chosen, weights = route_logits(logits, bias=[10.0, 0.0, 0.0, 0.0])
    assert chosen.tolist() == [[0, 3]]
    low, high = (math.sqrt(math.log1p(math.exp(x))) for x in (0.0, 3.0))
    expected = torch.tensor([[low, high]]) / (low + high) * 1.5
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)  # a handful of F32 operations
    assert route_logits(logits)[0].tolist() == [[3, 2]]


def test_image_rows_have_a_bias_of_their_own() -> None:
    x, gate = torch.zeros(2, 32), torch.zeros(4, 32)
    bias, bias_vl = torch.tensor([0.0, 0, 1, 2]), torch.tensor([2.0, 1, 0, 0])
    image = torch.tensor([False, True])
    live = torch.ones(2, dtype=torch.bool)
    assert route(x, live, image, gate, bias, bias_vl, 2, 1.0)[0].tolist() == [[3, 2], [0, 1]]
    assert route(x, live, image, gate, bias, None, 2, 1.0)[0].tolist() == [[3, 2], [3, 2]]


def test_ties_go_to_the_lower_expert() -> None:
    assert route_logits([1.0] * 6)[0].tolist() == [[0, 1]]


@pytest.mark.parametrize(("logit", "share"), [(-50.0, 0.75), (-80.0, None), (-90.0, None), (-1000.0, 0.0)])
def test_scores_that_underflow_give_no_nan(logit: float, share: float | None) -> None:
    """1e-20 is added to the sum of scores: weights fade to zero where sqrt(softplus) falls below it, never 0 / 0.

    Tolerance 1e-3: e^-90 is a denormal F32 of 17 bits or so.
    """
    _, weights = route_logits([logit] * 4)
    score = math.sqrt(math.log1p(math.exp(logit)))
    expected = 1.5 * score / (2 * score + 1e-20)
    torch.testing.assert_close(weights, torch.full((1, 2), expected), rtol=1e-3, atol=0)
    if share is not None:
        assert abs(expected - share) < 1e-6


def test_softplus_does_not_overflow() -> None:
    x = torch.tensor([-200.0, -30.0, 0.0, 19.9, 20.1, 100.0, 3e38])
    expected = [math.log1p(math.exp(v)) if v < 100 else v for v in x.tolist()]
    torch.testing.assert_close(softplus(x), torch.tensor(expected), rtol=1e-6, atol=0)


def test_clamp_bounds_the_gate_above_and_the_other_half_on_both_sides() -> None:
    """One expert: gate = 2 x0, up = 2 x1, output channel 0 = silu(min(gate, 1)) x clamp(up, -1, 1) x route scale.

    Tolerance 1e-6: a handful of F32 operations (mode ``plain``).
    """
    inputs = [(0.25, 0.25), (4.0, 0.25), (-4.0, 0.25), (0.25, 4.0), (0.25, -4.0), (4.0, -4.0)]
    x = torch.zeros(6, 32)
    x[:, :2] = torch.tensor(inputs)
    two = 0b0100  # E2M1 code of 2.0 in the low nibble
    w1, w2, w3 = (torch.zeros(1, 32, 16, dtype=torch.uint8) for _ in range(3))
    w1[0, 0, 0], w3[0, 0, 0], w2[0, 0, 0] = two, two << 4, two
    one = torch.full((1, 32, 1), 127, dtype=torch.uint8)
    live, image = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    router = (torch.zeros(1, 32), torch.zeros(1), None)
    result = kernels.experts(x, live, image, *router, w1, one, w2, one, w3, one, 0, 1, 1.5, 1.0)
    expected = []
    for a, b in inputs:
        gate, up = min(2 * a, 1.0), max(-1.0, min(2 * b, 1.0))
        expected.append(2 * 1.5 * gate / (1 + math.exp(-gate)) * up)
    torch.testing.assert_close(result[:, 0].float(), torch.tensor(expected), rtol=1e-6, atol=0)
    assert not result[:, 1:].any()


def test_combine_rounds_the_sum_once() -> None:
    """1 + 2^-8 is halfway between two BF16 values and would fall to 1 before the shared expert is added."""
    reduced = torch.tensor([[1 + 2.0**-8]], dtype=torch.float64)
    shared = torch.tensor([[2.0**-9]], dtype=torch.bfloat16)
    assert kernels.combine(reduced, shared).tolist() == [[1 + 2.0**-7]]
    assert kernels.combine(reduced, 0 * shared).tolist() == [[1.0]]
    assert kernels.combine(reduced, shared.float()).tolist() == [[1 + 2.0**-8 + 2.0**-9]]


def router(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    weights, name = mini_weights(), f"layers.{layer}.ffn.gate"
    return weights[f"{name}.weight"].float(), weights[f"{name}.bias"], weights[f"{name}.bias_vl"]


def packed(layer: int) -> Arguments:
    """Matrices and scales of all eight experts."""
    result = {}
    for number in (1, 2, 3):
        pairs = [mini_pair(f"layers.{layer}.ffn.experts.{expert}.w{number}") for expert in range(8)]
        result[f"w{number}"], result[f"s{number}"] = (torch.stack(part) for part in zip(*pairs, strict=True))
    return result


def shared_weights(layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    w1, w2, w3 = (mini_pair(f"layers.{layer}.ffn.shared_experts.{matrix}") for matrix in ("w1", "w2", "w3"))
    return (*w1, *w2, *w3)


def arguments_of(size: Size, dtype: torch.dtype) -> Arguments:
    case = next(case for case in CASES if case.name == "experts_all")
    return case.arguments(random_batch(29, seed=3), size, dtype)


def resident(arguments: Arguments, low: int, high: int) -> Arguments:
    parts = {name: arguments[name][low:high] for name in ("w1", "s1", "w2", "s2", "w3", "s3")}
    return arguments | parts | {"first_expert": low}


def routed(arguments: Arguments) -> tuple[Tensor, Tensor]:
    names = ("x", "live", "image", "gate", "bias", "bias_vl", "top_k", "route_scale")
    return route(*(arguments[name] for name in names))


def route_logits(logits: list[float], bias: list[float] | None = None) -> tuple[Tensor, Tensor]:
    """Two experts of one live row whose router logits are given."""
    x, gate = torch.zeros(1, 32), torch.zeros(len(logits), 32)
    x[0, 0] = 1
    gate[:, 0] = torch.tensor(logits)
    live, image = torch.tensor([True]), torch.tensor([False])
    return route(x, live, image, gate, torch.tensor(bias or [0.0] * len(logits)), None, 2, 1.5)
