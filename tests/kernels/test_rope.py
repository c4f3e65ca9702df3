"""Rotary embedding against golden tables and rows, and the latents that are made with it against their parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.quantise import round_q4mx, round_q8
from octavo.kernels.rope import plain_frequencies, turn, yarn_frequencies
from tests.kernels.batches import random_batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import EPSILON
from tests.kernels.draw import MINI, Draw
from tests.kernels.goldens import mini_pair, mini_weights, tensors

GOLDEN = tensors("rope")
UNIT = tensors("kernels")
RELEASED = {
    "swa": plain_frequencies(64, 10000.0),
    "compressed": yarn_frequencies(64, 160000.0, 16.0, 32.0, 1.0, 65536),
}
"""The two tables of the released config (spec/model.md 3.4)."""
MINI_TABLES = (plain_frequencies(32, 10000.0), yarn_frequencies(32, 160000.0, 16.0, 32.0, 1.0, 4096))


@pytest.mark.parametrize("table", RELEASED)
def test_golden_frequencies(table: str) -> None:
    assert same_bits(RELEASED[table], GOLDEN[f"{table}.inv_freq"])


@pytest.mark.parametrize("table", RELEASED)
def test_golden_cosines_and_sines(table: str) -> None:
    """Within one unit in the last place: the platform's own cosine and sine may round the last bit either way.

    Turning (1, 0) gives (cosine, sine). An angle that was not the F32 product of position and frequency would be off
    by up to 0.03 at position 1,048,575.
    """
    positions = GOLDEN["positions"]
    unit = torch.tensor([1.0, 0.0]).repeat(positions.shape[0], 1, 32)
    turned = turn(unit, positions, RELEASED[table]).view(-1, 32, 2)
    for actual, name in zip(turned.unbind(-1), ("cos", "sin"), strict=True):
        expected = GOLDEN[f"{table}.{name}"]
        assert ((actual - expected).abs() <= one_ulp(expected)).all(), name


@pytest.mark.parametrize(("inverse", "name"), [(False, "rope.forward"), (True, "rope.inverse")])
def test_golden_rotation(inverse: bool, name: str) -> None:
    turned = turn(UNIT["rope.x"], UNIT["rope.positions"], RELEASED["compressed"], inverse)
    assert same_bits(turned, UNIT[name])


def test_ramp_ends_stay_within_the_channels() -> None:
    """Spec/model.md 7: a context so short that both ends fall below channel 0 slows every channel but the first."""
    short = yarn_frequencies(32, 160000.0, 16.0, 32.0, 1.0, 4)
    plain = plain_frequencies(32, 160000.0)
    assert same_bits(short[:1], plain[:1])
    assert same_bits(short[1:], plain[1:] / 16)
    long = yarn_frequencies(32, 160000.0, 16.0, 32.0, 1.0, 2**62)
    assert same_bits(long, plain)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
def test_only_the_last_channels_turn_and_turn_back(dtype: torch.dtype) -> None:
    """Tolerance of the way back: two roundings of values up to 6 to ``dtype``, or two F32 rotations."""
    draw = Draw(random_batch(21, seed=2), MINI, dtype, seed=1)
    x, positions, frequencies = draw.rows(3, 64), draw.batch.positions, draw.frequencies()
    turned = turn(x, positions, frequencies)
    assert same_bits(turned[..., :32], x[..., :32])
    assert not torch.equal(turned[..., 32:], x[..., 32:])
    back = turn(turned, positions, frequencies, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=6 * 2 * torch.finfo(dtype).eps)


def test_position_zero_turns_nothing() -> None:
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0))
    assert same_bits(turn(x, torch.tensor([0]), RELEASED["swa"]), x)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
def test_latents_and_index_queries_are_made_of_their_parts(dtype: torch.dtype) -> None:
    draw = Draw(random_batch(21, seed=2), MINI, dtype, seed=1)
    x, weight, positions, frequencies = draw.rows(64), draw.norm(64), draw.batch.positions, draw.frequencies()
    normed = kernels.rms_norm(x, weight, EPSILON)
    turned = turn(normed, positions, frequencies)
    latent = kernels.window_latent(x, weight, positions, frequencies, EPSILON)
    assert same_bits(latent, round_q8(turned))
    query = draw.rows(8, 64)
    expected = round_q4mx(turn(query, positions, frequencies))
    assert same_bits(kernels.index_query(query, positions, frequencies), expected)


@pytest.mark.parametrize("layer", range(10))
def test_golden_window_latents(layer: int) -> None:
    """From the golden attention input of every mini layer; layers 0 and 1 read the window alone."""
    weights, stage = mini_weights(), tensors("prefill_ref")
    projected = kernels.linear_f8(stage[f"p37.attn_in.{layer}"], *mini_pair(f"layers.{layer}.attn.wkv"))
    norm = weights[f"layers.{layer}.attn.kv_norm.weight"]
    latents = kernels.window_latent(projected, norm, torch.arange(37), MINI_TABLES[layer > 1], EPSILON)
    assert same_bits(latents, stage[f"p37.window_kv.{layer}"])


def one_ulp(x: Tensor) -> Tensor:
    return (torch.nextafter(x.abs(), torch.tensor(torch.inf)) - x.abs()).abs()
