"""Entries and index keys of KV sources: golden ones, pairs in and across steps, and where they are written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.rope import yarn_frequencies
from tests.conftest import ReportCount
from tests.kernels.batches import MAX_PAGES, PAGES, SLOTS, Batch, Request, page_table
from tests.kernels.calls import same_bits
from tests.kernels.cases import EPSILON
from tests.kernels.goldens import mini_weights, tensors

STAGE = tensors("prefill_ref")
FREQUENCIES = yarn_frequencies(32, 160000.0, 16.0, 32.0, 1.0, 4096)
BF16 = torch.bfloat16
every_ratio = pytest.mark.parametrize("ratio", (1, 2))


class Source:
    """A KV source of the mini model with empty pools; what nobody wrote is NaN."""

    def __init__(self, ratio: int, layer: int | None = None, dtype: torch.dtype = BF16) -> None:
        weights, self.ratio, self.table = mini_weights(), ratio, page_table()
        name = f"layers.{layer or {1: 6, 2: 2}[ratio]}.attn"
        self.norm = weights[f"{name}.compressor.norm.weight"]
        self.wk, self.k_norm = weights[f"{name}.indexer.wk.weight"], weights[f"{name}.indexer.k_norm.weight"]
        self.entries = torch.full((PAGES, 64 // ratio, 64), torch.nan, dtype=dtype)
        self.keys = torch.full_like(self.entries, torch.nan)
        self.pending = torch.full((SLOTS, 2, 64), torch.nan) if ratio == 2 else None

    def step(self, batch: Batch, values: Tensor, gates: Tensor | None) -> None:
        kernels.publish(
            values,
            gates,
            self.norm,
            self.wk,
            self.k_norm,
            FREQUENCIES,
            batch.slots,
            batch.positions,
            batch.starts,
            self.table,
            self.entries,
            self.keys,
            self.pending,
            EPSILON,
        )

    def written(self, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """The first entries and keys of a request, by logical number."""
        page = 64 // self.ratio
        places = [(int(self.table[slot, j // page]), j % page) for j in range(count)]
        stored = [torch.stack([pool[place] for place in places]) for pool in (self.entries, self.keys)]
        return stored[0], stored[1]


class Tokens:
    """Random projections of some requests, [SLOTS, 256, 64] by slot and position."""

    def __init__(self, ratio: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        dtype = BF16 if ratio == 1 else torch.float32
        self.values = torch.randn(SLOTS, 64 * MAX_PAGES, 64, generator=random).to(dtype)
        self.gates = 3 * torch.randn(SLOTS, 64 * MAX_PAGES, 64, generator=random) if ratio == 2 else None

    def step(self, source: Source, *requests: tuple[int, int, int], dead: int = 0) -> None:
        """One step with the given (slot, start, count); dead rows hold NaN."""
        batch = Batch(tuple(Request(*request) for request in requests), dead)
        source.step(
            batch, self._rows(self.values, batch), None if self.gates is None else self._rows(self.gates, batch)
        )

    def _rows(self, tokens: Tensor, batch: Batch) -> Tensor:
        rows = tokens[batch.slots.long(), batch.positions.long()]
        return rows.masked_fill(~batch.live.unsqueeze(1), torch.nan)


@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (4, 2), (6, 1)])
def test_golden_entries_and_keys(layer: int, ratio: int) -> None:
    """37 tokens of the mini model, from the golden attention input of the KV source; the last one waits at ratio 2."""
    x, name = STAGE[f"p37.attn_in.{layer}"], f"layers.{layer}.attn.compressor"
    source, batch = Source(ratio, layer), Batch((Request(3, 0, 37),))
    weights = mini_weights()
    if ratio == 2:
        values, gates = (kernels.linear_f32(x, weights[f"{name}.{part}.weight"]) for part in ("wkv", "wgate"))
        source.step(batch, values, gates)
        assert source.pending is not None
        assert same_bits(source.pending[3], torch.stack((values[36], gates[36])))
    else:
        source.step(batch, kernels.linear(x, weights[f"{name}.wkv.weight"]), None)
    entries, keys = source.written(3, 37 // ratio)
    assert same_bits(entries, STAGE[f"p37.compress_kv.{layer}"])
    assert same_bits(keys, STAGE[f"p37.index_k.{layer}"])


@every_ratio
def test_unrounded_entries_are_the_definition(ratio: int) -> None:
    """``plain``: softmax of the gates per channel, norm, key projection, rotation at the group's first position.

    Tolerance 2e-6 relative to the largest value: a few F32 operations, and angles of up to 40 radians in F32.
    """
    source, tokens = Source(ratio, dtype=torch.float32), Tokens(ratio)
    tokens.values = tokens.values.float()
    tokens.step(source, (4, 0, 40))
    values = tokens.values[4, :40].double().view(-1, ratio, 64)
    if tokens.gates is not None:
        values = values * tokens.gates[4, :40].double().view(-1, ratio, 64).softmax(1)
    compressed = normed(values.sum(1), source.norm)
    key = normed(compressed @ source.wk.double().t(), source.k_norm)
    for stored, expected in zip(source.written(4, 40 // ratio), (compressed, key), strict=True):
        positions = torch.arange(0, 40, ratio, dtype=torch.float64)
        bound = 2e-6 * float(expected.abs().max())
        torch.testing.assert_close(stored.double(), rotated(expected, positions), rtol=0, atol=bound)


def test_key_is_made_before_the_entry_is_rotated_and_rounded() -> None:
    """In BF16 the key differs from one that is made of the stored entry."""
    source, tokens = Source(1), Tokens(1)
    tokens.step(source, (0, 0, 8))
    entries, keys = source.written(0, 8)
    late = normed(entries.double() @ source.wk.double().t(), source.k_norm)
    assert (rotated(late, torch.arange(8.0)) - keys.double()).abs().max() > 0.1


@every_ratio
@pytest.mark.parametrize("total", (1, 2, 7, 66, 129))
def test_any_split_into_steps_writes_the_same(ratio: int, total: int, report_count: ReportCount) -> None:
    """Pairs within a step and across steps, odd and even lengths, past the border of a page; to the bit.

    After an even length nothing waits, and what ``pending`` still holds has no meaning.
    """
    whole, tokens = Source(ratio), Tokens(ratio)
    tokens.step(whole, (2, 0, total))
    splits = {(1,) * total, *((first, total - first) for first in (1, 2, 3, 5, 64, 65) if first < total)}
    for split in sorted(splits):
        parts = Source(ratio)
        for start, count in zip(itertools.accumulate(split, initial=0), split, strict=False):
            tokens.step(parts, (2, start, count), dead=start % 3)
        assert same_pools(parts, whole), split
        if parts.pending is not None and whole.pending is not None and total % 2:
            assert same_bits(parts.pending[2], whole.pending[2]), split
    report_count("splits of a request into steps", len(splits), "publish")


@every_ratio
def test_interleaved_requests_write_what_each_writes_alone(ratio: int) -> None:
    """Three steps of three requests: a chunk ends odd where the next request's begins odd, and lengths are mixed."""
    tokens = Tokens(ratio)
    steps: Sequence[Sequence[tuple[int, int, int]]] = (
        ((5, 0, 3), (1, 0, 1), (6, 0, 2)),
        ((1, 1, 1), (5, 3, 2), (6, 2, 7)),
        ((6, 9, 1), (5, 5, 4), (1, 2, 64)),
    )
    together, alone = Source(ratio), Source(ratio)
    for step in steps:
        tokens.step(together, *step, dead=2)
    for slot in (1, 5, 6):
        for step in steps:
            for request in step:
                if request[0] == slot:
                    tokens.step(alone, request)
    assert same_pools(together, alone)
    if together.pending is not None and alone.pending is not None:
        assert same_bits(together.pending, alone.pending)


@every_ratio
def test_only_completed_groups_are_written(ratio: int) -> None:
    """Seven tokens: seven entries, or three and a waiting half; nothing else in the pools changes."""
    source, tokens = Source(ratio), Tokens(ratio)
    tokens.step(source, (2, 0, 7), dead=3)
    count = 7 // ratio
    for pool in (source.entries, source.keys):
        written = ~pool.isnan().all(-1)
        assert written.sum() == count
        assert written[source.table[2, 0].long(), :count].all()
    if source.pending is not None and tokens.gates is not None:
        assert same_bits(source.pending[2], torch.stack((tokens.values[2, 6], tokens.gates[2, 6])))
        others = torch.arange(SLOTS) != 2
        assert source.pending[others].isnan().all()


def test_a_pair_within_a_step_does_not_read_the_waiting_half() -> None:
    """What waits is NaN here; only a step that begins at an odd position may take it."""
    source, tokens = Source(2), Tokens(2)
    tokens.step(source, (0, 4, 2))
    page = source.table[0, 0].long()
    assert not source.entries[page, 2].isnan().any()
    tokens.step(source, (0, 7, 1))
    assert source.entries[page, 3].isnan().all()


def test_gates_weigh_each_channel() -> None:
    """Gates of +-100 choose one half per channel; equal gates give the mean. Extreme gates stay finite."""
    source = Source(2, dtype=torch.float32)
    source.norm = torch.ones(64, dtype=BF16)
    values, gates = torch.ones(2, 64), torch.zeros(2, 64)
    values[1] = 3
    gates[0, :16], gates[1, :16] = 100, -100
    gates[0, 16:32], gates[1, 16:32] = -3e38, 3e38
    source.step(Batch((Request(0, 0, 2),)), values, gates)
    entry = source.written(0, 1)[0][0]
    ratios = entry / entry[0]
    torch.testing.assert_close(ratios, torch.tensor([1.0] * 16 + [3.0] * 16 + [2.0] * 32), rtol=1e-6, atol=0)


def same_pools(a: Source, b: Source) -> bool:
    return same_bits(a.entries, b.entries) and same_bits(a.keys, b.keys)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight.double() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the last 32 channels as a complex product in F64."""
    turn = torch.polar(torch.ones(len(positions), 16, dtype=torch.float64), positions.double()[:, None] * FREQUENCIES)
    pairs = torch.view_as_complex(x[:, 32:].reshape(-1, 16, 2)) * turn
    return torch.cat((x[:, :32], torch.view_as_real(pairs).flatten(1)), dim=1)
