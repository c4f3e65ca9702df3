"""Engram: golden hash ids of the released config, in one step and in many; golden table rows and gates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.engram import DEAD_CLASS, gates
from octavo.model.engram_hash import engram_hashes
from tests.conftest import ReportCount
from tests.kernels.batches import Batch, Request
from tests.kernels.calls import same_bits
from tests.kernels.cases import EPSILON, Arguments
from tests.kernels.goldens import description, mini_pair, mini_weights, tensors
from tests.tokenizer_data import PUBLISHED, config

REAL: dict[str, Any] = description("engram_real")
SEQUENCES: list[list[int]] = [case["compressed"] for case in REAL["cases"]]
"""Token classes, -1 inside image spans."""
STAGE = {name.removeprefix("p37."): t for name, t in tensors("prefill_ref").items() if name.startswith("p37.")}


class Hasher:
    """The two hashes of the released config, with a history that other requests left behind."""

    def __init__(self, slots: int) -> None:
        self.history = torch.full((slots, 3), 777)
        self.hashes: list[Arguments] = [
            {
                "primes": torch.tensor(np.concatenate(h.primes)),
                "offsets": torch.tensor(h.offsets),
                "multipliers": torch.tensor(h.multipliers),
            }
            for h in engram_hashes(config(PUBLISHED).text_config)
        ]

    def step(self, batch: Batch, classes: Tensor) -> Tensor:
        """Ids [R, layers, columns] of the live rows; the history moves on."""
        ids = [
            kernels.engram_hash(
                classes,
                self.history,
                write_slots=batch.slots,
                write_positions=batch.positions,
                write_starts=batch.starts,
                pad_class=REAL["pad_compressed"],
                **hashed,
            )
            for hashed in self.hashes
        ]
        kernels.commit_window(self.history, classes, batch.slots, batch.positions)
        return torch.stack(ids, dim=1)[batch.live]


def test_golden_sequences_in_one_batch() -> None:
    """Ten requests with image spans, pads and sequence starts, one after the other, and dead rows."""
    batch = Batch(tuple(Request(9 - i, 0, len(s)) for i, s in enumerate(SEQUENCES)), dead=3)
    classes = torch.tensor([*(c for s in SEQUENCES for c in s), 5, 5, 5])
    ids = Hasher(10).step(batch, classes)
    for number, case in enumerate(REAL["cases"]):
        assert ids[batch.rows_of([number])].tolist() == case["hash"], case["text"]
    assert sum(DEAD_CLASS in s for s in SEQUENCES) >= 3


@pytest.mark.parametrize("count", (1, 2, 3, 4, 5, 7))
def test_golden_sequences_in_steps(count: int, report_count: ReportCount) -> None:
    """``count`` tokens of every request a step: look-backs go through the history, image spans cross the steps."""
    hasher = Hasher(10)
    found: list[list[Any]] = [[] for _ in SEQUENCES]
    for start in range(0, max(map(len, SEQUENCES)), count):
        parts = [(i, s[start : start + count]) for i, s in enumerate(SEQUENCES) if len(s) > start]
        batch = Batch(tuple(Request(i, start, len(part)) for i, part in parts), dead=1)
        ids = hasher.step(batch, torch.tensor([*(c for _, part in parts for c in part), 5]))
        for number, (i, _) in enumerate(parts):
            found[i] += ids[batch.rows_of([number])].tolist()
    assert found == [case["hash"] for case in REAL["cases"]]
    report_count("golden hash ids", sum(map(len, SEQUENCES)) * 48, "in steps")


def test_history_of_others_and_of_the_past_is_not_read() -> None:
    """Two tokens in: only the places of positions 0 and 1 count, and only those of the own slot."""
    batch = Batch((Request(1, 2, 2),))
    arguments: Arguments = {
        "primes": torch.tensor([101, 103, 107]),
        "offsets": torch.tensor([0, 101, 204]),
        "multipliers": torch.tensor([3, 5, 7, 11]),
        "pad_class": 2,
        "write_slots": batch.slots,
        "write_positions": batch.positions,
        "write_starts": batch.starts,
    }
    classes = torch.tensor([20, 30])
    history = torch.tensor([[900, 901, 902], [6, 9, 903]])
    ids = kernels.engram_hash(classes, history, **arguments)
    assert ids.tolist() == [
        [(20 * 3 ^ 9 * 5) % 101, (20 * 3 ^ 9 * 5 ^ 6 * 7) % 103 + 101, (20 * 3 ^ 9 * 5 ^ 6 * 7 ^ 2 * 11) % 107 + 204],
        [
            (30 * 3 ^ 20 * 5) % 101,
            (30 * 3 ^ 20 * 5 ^ 9 * 7) % 103 + 101,
            (30 * 3 ^ 20 * 5 ^ 9 * 7 ^ 6 * 11) % 107 + 204,
        ],
    ]


@pytest.mark.parametrize("layer", (1, 4))
def test_golden_rows_and_gates(layer: int) -> None:
    """Golden ids to table rows, their projection, gates and streams of both Engram layers of the mini model."""
    weights, name = mini_weights(), f"layers.{layer}.engram"
    rows = kernels.engram_lookup(*mini_pair(f"{name}.embed"), STAGE[f"engram.{layer}.hash_ids"], torch.bfloat16)
    projected = kernels.linear_f8(rows, *mini_pair(f"{name}.wkv"))
    assert same_bits(projected, STAGE[f"engram.{layer}.kv"])

    streams, norms = STAGE[f"X.{layer - 1}"], (weights[f"{name}.q_weight"], weights[f"{name}.k_weight"])
    keys = projected[:, :512].view(37, 4, 128)
    # Three sums of 128 F32 products, a root and an exponential: 1e-6 of values up to 1.
    torch.testing.assert_close(gates(streams, keys, *norms, EPSILON), STAGE[f"engram.{layer}.gate"], rtol=0, atol=1e-6)
    text = torch.zeros(37, dtype=torch.bool)
    # Where another CPU's sums move a gate by a unit, a sum beside a midpoint rounds to the other BF16 value.
    gated = kernels.engram_gate(streams, projected, text, *norms, EPSILON)
    assert (gated != STAGE[f"X_in.{layer}"]).sum() <= 2
    torch.testing.assert_close(gated, STAGE[f"X_in.{layer}"], rtol=2**-7, atol=0)


def test_image_rows_keep_their_streams() -> None:
    """Whatever was looked up for them: a gate of zero times NaN would not be enough."""
    random = torch.Generator().manual_seed(0)
    streams, projected = torch.randn(4, 2, 32, generator=random).bfloat16(), torch.randn(4, 96, generator=random)
    projected = projected.bfloat16()
    image = torch.tensor([False, True, True, False])
    ones = torch.ones(2, 32, dtype=torch.bfloat16)
    open_gates = kernels.engram_gate(streams, projected, ~image & image, ones, ones, EPSILON)
    soiled = projected.masked_fill(image.unsqueeze(1), torch.nan)
    result = kernels.engram_gate(streams, soiled, image, ones, ones, EPSILON)
    assert same_bits(result[image], streams[image])
    assert same_bits(result[~image], open_gates[~image])
    assert not torch.equal(open_gates[image], streams[image])


def test_gate_is_the_sigmoid_of_the_signed_root_of_the_agreement() -> None:
    """Equal rows of ones agree by D / sqrt(D) = 8 at D = 64; opposite ones by -8; nothing known gives one half.

    Tolerance 1e-6: a handful of F32 operations. Just off zero the root is taken of 1e-6 at least.
    """
    one, zero = torch.ones(1, 1, 64), torch.zeros(1, 1, 64)
    weight = torch.ones(1, 64, dtype=torch.bfloat16)
    slight = zero.clone()
    slight[..., 0] = 1e-8
    slight[..., 1] = 1

    def gate(x: Tensor, key: Tensor, q_weight: Tensor = weight) -> float:
        return float(gates(x, key, q_weight, weight, EPSILON))

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    assert gate(one, one) == pytest.approx(sigmoid(math.sqrt(8)), rel=1e-6)
    assert gate(3 * one, -7 * one) == pytest.approx(sigmoid(-math.sqrt(8)), rel=1e-6)
    assert gate(one, one, 2 * weight) == pytest.approx(sigmoid(4), rel=1e-6)
    assert gate(zero, one) == 0.5
    first = zero.clone()
    first[..., 0] = 1
    assert gate(first, slight) == pytest.approx(sigmoid(1e-3), rel=1e-6)
