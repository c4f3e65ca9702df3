"""Residual stream mixing against golden coefficients and a golden forward pass, stage by stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.mhc import collapse, split_mixes
from tests.kernels.batches import random_batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import CASES, EPSILON
from tests.kernels.draw import WIDE
from tests.kernels.goldens import mini_weights, tensors

UNIT = tensors("kernels")
STAGE = {name.removeprefix("p37."): t for name, t in tensors("prefill_ref").items() if name.startswith("p37.")}
LAYERS = range(10)
PRE_ULPS = 4
"""``pre`` passes a sigmoid that is composed from ``exp`` here and is the library's own in the goldens: ``exp``, the
sum and the quotient each round once, and 1e-6 is added."""


def test_golden_sinkhorn() -> None:
    """Small to extreme mixes, all within :data:`PRE_ULPS`: ``exp`` differs by a unit between CPUs."""
    mixes, scale, base = (UNIT[f"sinkhorn.{name}"].float() for name in ("mixes", "scale", "base"))
    pre, post, comb = split_mixes(mixes, scale, base, 4, 20, 1e-6)
    for name, actual in (("pre", pre), ("post", post), ("comb", comb)):
        assert ulps(actual, UNIT[f"sinkhorn.{name}"]) <= PRE_ULPS, name


def test_sinkhorn_ends_with_columns() -> None:
    """Sums over the source are one up to epsilon and rounding, 20 rounds also bring sums over the destination near."""
    mixes = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))
    _, post, comb = split_mixes(mixes, torch.ones(3), torch.zeros(24), 4, 20, 1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), rtol=0, atol=3e-6)
    torch.testing.assert_close(comb.sum(2), torch.ones(50, 4), rtol=0, atol=1e-3)
    assert (post > 0).all()
    assert (post < 2).all()
    _, _, once = split_mixes(mixes, torch.ones(3), torch.zeros(24), 4, 1, 1e-6)
    assert (once.sum(2) - 1).abs().max() > 0.1


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sublayer", ("attn", "ffn"))
def test_golden_mixes(layer: int, sublayer: str) -> None:
    """Coefficients of every sublayer of the mini model, from its golden input streams.

    Tolerance 1e-5: 512 products are summed in F32, in an order that the platform chooses.
    """
    weights = mini_weights()
    streams = entering(layer) if sublayer == "attn" else between(layer)
    fn, scale, base = (weights[f"layers.{layer}.hc_{sublayer}_{name}"] for name in ("fn", "scale", "base"))
    made = kernels.mhc_mix(streams, fn, scale, base, 20, 1e-6, EPSILON)
    for result, name in zip(made, ("pre", "post", "comb"), strict=True):
        torch.testing.assert_close(result, STAGE[f"hc.{layer}.{sublayer}.{name}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_golden_streams(layer: int) -> None:
    """Collapse before and expansion after both sublayers. ``pre`` is deferred: it comes from the sublayer before."""
    weights = mini_weights()
    first = torch.eye(1, 4).repeat(37, 1)
    pre = STAGE[f"pre.{layer - 1}"] if layer else first
    attn_in = kernels.mhc_collapse(entering(layer), pre, weights[f"layers.{layer}.attn_norm.weight"], EPSILON)
    assert same_bits(attn_in, STAGE[f"attn_in.{layer}"])
    pre = STAGE[f"hc.{layer}.attn.pre"]
    ffn_in = kernels.mhc_collapse(between(layer), pre, weights[f"layers.{layer}.ffn_norm.weight"], EPSILON)
    assert same_bits(ffn_in, STAGE[f"ffn_in.{layer}"])
    assert same_bits(expand(between(layer), layer, "ffn"), STAGE[f"X.{layer}"])


def test_golden_draft_features() -> None:
    """Means over the streams that enter layers 7, 8 and 9."""
    means = [kernels.stream_mean(entering(layer)) for layer in (7, 8, 9)]
    assert same_bits(torch.cat(means, 1), STAGE["main_hidden"])


def test_comb_goes_from_source_to_destination() -> None:
    """All of stream 0 goes to stream 1 and nothing else goes anywhere; y reaches stream 2 alone."""
    streams = torch.arange(8.0).view(1, 4, 2) + 1
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 1] = 1
    post = torch.tensor([[0.0, 0.0, 2.0, 0.0]])
    expanded = kernels.mhc_expand(streams, torch.tensor([[10.0, 20.0]]), post, comb)
    assert expanded[0].tolist() == [[0, 0], [1, 2], [20, 40], [0, 0]]


def test_collapse_rounds_once() -> None:
    """In BF16, 256 + 1 + 1 is 256 if each sum is rounded, and 258 if the sum is."""
    streams = torch.tensor([256.0, 1.0, 1.0, 0.0]).view(1, 4, 1).bfloat16()
    assert collapse(streams, torch.ones(1, 4)).tolist() == [[258.0]]
    assert kernels.stream_mean(4 * streams).tolist() == [[258.0]]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("rows", (0, 1, 19))
def test_a_site_is_its_three_parts(rows: int, dtype: torch.dtype) -> None:
    """The streams are rounded before they are mixed and collapsed, and to the bit."""
    given = next(case for case in CASES if case.name == "mhc_site").arguments(random_batch(rows, seed=1), WIDE, dtype)
    streams = kernels.mhc_expand(*(given[name] for name in ("streams", "y", "post", "comb")))
    x = kernels.mhc_collapse(streams, *(given[name] for name in ("pre", "weight", "collapse_epsilon")))
    settings = ("fn", "scale", "base", "iterations", "epsilon", "norm_epsilon")
    mixed = kernels.mhc_mix(streams, *(given[name] for name in settings))
    for found, wanted in zip(kernels.mhc_site(**given), (streams, x, *mixed), strict=True):
        assert found.dtype == wanted.dtype and same_bits(found, wanted)


def entering(layer: int) -> Tensor:
    """Streams that enter a block: those of the block before, or what Engram made of them."""
    made_by_engram = f"X_in.{layer}"
    return STAGE[made_by_engram if made_by_engram in STAGE else f"X.{layer - 1}"]


def between(layer: int) -> Tensor:
    """Streams between attention and experts."""
    return expand(entering(layer), layer, "attn")


def expand(streams: Tensor, layer: int, sublayer: str) -> Tensor:
    post, comb = (STAGE[f"hc.{layer}.{sublayer}.{name}"] for name in ("post", "comb"))
    return kernels.mhc_expand(streams, STAGE[f"{sublayer}_out.{layer}"], post, comb)


def ulps(actual: Tensor, expected: Tensor) -> int:
    """Largest distance of positive F32 values, in units in the last place."""
    assert actual.shape == expected.shape
    assert (expected > 0).all()
    return int((actual.view(torch.int32) - expected.view(torch.int32)).abs().max())
