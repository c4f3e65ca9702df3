"""Attention: the golden softmax, and which keys a row reads, shown with keys that give themselves away.

With one-hot keys, a zero query and a sink of -inf, the output is the share of each key: 1 / n for n keys read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.attend import sink_attention
from octavo.kernels.rope import turn
from tests.kernels.batches import MAX_PAGES, SLOTS, Batch, Request, page_table, random_batch
from tests.kernels.calls import same_bits
from tests.kernels.draw import MINI, Draw
from tests.kernels.goldens import tensors

GOLDEN = tensors("kernels")
W = 4
"""Window of the hand-made cases."""


def golden_keys() -> tuple[Tensor, Tensor]:
    """Keys of each row by its index list, and which of them are meant."""
    indices = GOLDEN["sparse_attn.indices"].long()
    return GOLDEN["sparse_attn.kv"][indices.clamp_min(0)], indices >= 0


def test_golden_attention() -> None:
    """150 places: three blocks of keys, rows with few, with one block of and without valid keys."""
    keys, valid = golden_keys()
    assert sorted(valid.sum(1).tolist()) == [0, 3, 64, 70, 100, 100]
    attended = sink_attention(GOLDEN["sparse_attn.q"], keys, valid, GOLDEN["sparse_attn.sink"].float())
    assert same_bits(attended, GOLDEN["sparse_attn.out"])


def test_f32_attention_is_the_exact_softmax() -> None:
    """Tolerance 1e-5 for outputs up to 1: exponentials and 150 additions in F32. BF16 numerics miss it (next line)."""
    keys, valid = golden_keys()
    sink = GOLDEN["sparse_attn.sink"].float()
    attended = sink_attention(GOLDEN["sparse_attn.q"].float(), keys.float(), valid, sink)
    torch.testing.assert_close(attended.double(), GOLDEN["sparse_attn.out_fp64"], rtol=0, atol=1e-5)
    rounded = sink_attention(GOLDEN["sparse_attn.q"], keys, valid, sink)
    assert (rounded.double() - GOLDEN["sparse_attn.out_fp64"]).abs().max() > 1e-4


def test_sink_takes_its_share_and_gives_nothing() -> None:
    """One key with score 0 and a sink of ln 3: a quarter of the key. Its logit is not scaled and is per head."""
    keys = torch.ones(1, 1, 16)
    valid = torch.tensor([[True]])
    attended = sink_attention(torch.zeros(1, 2, 16), keys, valid, torch.tensor([math.log(3), -torch.inf]))
    torch.testing.assert_close(attended[0], torch.tensor([[0.25] * 16, [1.0] * 16]), rtol=1e-6, atol=0)


def test_scores_are_scaled_by_the_root_of_the_width() -> None:
    """q k = 16 ln 3 at width 256 is a logit of ln 3: against a sink of 0, three quarters of the key (to F32)."""
    query = torch.zeros(1, 1, 256)
    query[0, 0, 0] = 16 * math.log(3)
    keys = torch.ones(1, 1, 256)
    attended = sink_attention(query, keys, torch.tensor([[True]]), torch.zeros(1))
    torch.testing.assert_close(attended, torch.full((1, 1, 256), 0.75), rtol=1e-6, atol=0)


@pytest.mark.parametrize("missing", (torch.nan, torch.inf))
def test_keys_that_are_not_valid_may_hold_anything(missing: float) -> None:
    keys, valid = golden_keys()
    soiled = keys.masked_fill(~valid.unsqueeze(-1), missing)
    sink = GOLDEN["sparse_attn.sink"].float()
    expected = sink_attention(GOLDEN["sparse_attn.q"], keys, valid, sink)
    assert same_bits(sink_attention(GOLDEN["sparse_attn.q"], soiled, valid, sink), expected)


def test_a_row_without_a_key_gives_zero_and_very_low_scores_do_not() -> None:
    query = torch.full((2, 1, 16), -1e4)
    keys = torch.full((2, 3, 16), 1e4)
    valid = torch.tensor([[False] * 3, [True, False, False]])
    attended = sink_attention(query, keys, valid, torch.tensor([-torch.inf]))
    assert same_bits(attended[0], torch.zeros(1, 16))
    assert attended[1].unique().tolist() == [1e4]


def test_window_of_a_new_request_is_causal() -> None:
    """Positions 0 to 5 in one step: each row reads itself and up to W - 1 before it, all from this step's latents."""
    batch = Batch((Request(2, 0, 6),))
    shares = attend_shares(batch, ring=torch.full((SLOTS, W, 16), torch.nan))
    assert read(shares) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}]


def test_window_crosses_the_step_start_into_the_ring() -> None:
    """Step from position 6: older positions come from the ring, place = position mod W, and only those in reach."""
    ring = torch.full((SLOTS, W, 16), torch.nan)
    for position in (3, 4, 5):
        ring[2, position % W] = one_hot(position)
    shares = attend_shares(Batch((Request(2, 6, 5),)), ring)
    assert read(shares) == [{3, 4, 5, 6}, {4, 5, 6, 7}, {5, 6, 7, 8}, {6, 7, 8, 9}, {7, 8, 9, 10}]


def test_ring_is_not_read_before_the_sequence() -> None:
    """Position 1 of a request whose step starts there: one older position exists, the other places are empty."""
    ring = torch.full((SLOTS, W, 16), torch.nan)
    ring[2, 0] = one_hot(0)
    assert read(attend_shares(Batch((Request(2, 1, 2),)), ring)) == [{0, 1}, {0, 1, 2}]


def test_positions_of_the_step_never_come_from_the_ring() -> None:
    """The ring still holds what rejected drafts or an older request left at those places."""
    ring = torch.full((SLOTS, W, 16), torch.nan)
    for position in (3, 4, 5):
        ring[2, position % W] = one_hot(position)
    ring[2, 6 % W] = one_hot(15)
    assert read(attend_shares(Batch((Request(2, 6, 1),)), ring)) == [{3, 4, 5, 6}]


def test_requests_of_one_batch_keep_apart() -> None:
    """Three requests, two of them at the same positions, and dead rows: the marks are per slot here."""
    batch = Batch((Request(1, 2, 3), Request(7, 2, 3), Request(0, 0, 2)), dead=2)
    marks = {1: 0, 7: 6, 0: 12}
    ring = torch.full((SLOTS, W, 16), torch.nan)
    for slot in (1, 7):
        ring[slot, 0], ring[slot, 1] = one_hot(marks[slot]), one_hot(marks[slot] + 1)
    shares = attend_shares(batch, ring, mark=lambda slot, position: marks[slot] + position)
    assert read(shares) == [
        {0, 1, 2},
        {0, 1, 2, 3},
        {1, 2, 3, 4},
        {6, 7, 8},
        {6, 7, 8, 9},
        {7, 8, 9, 10},
        {12},
        {12, 13},
        set(),
        set(),
    ]


def test_selected_entries_are_translated_and_duplicates_count_twice() -> None:
    """Row at position 0 selects entries 1 and 33 (second page at ratio 2); an entry equal to a window key is kept."""
    table = page_table()
    entries = torch.full((int(table.max()) + 1, 32, 16), torch.nan)
    entries[table[3, 0].long(), 1] = one_hot(9)
    entries[table[3, 1].long(), 1] = one_hot(0)
    selected = torch.tensor([[1, 33, -1]], dtype=torch.int32)
    batch = Batch((Request(3, 0, 1),))
    shares = attend_shares(batch, torch.full((SLOTS, W, 16), torch.nan), entries=entries, selected=selected)
    expected = torch.zeros(16)
    expected[0], expected[9] = 2 / 3, 1 / 3
    torch.testing.assert_close(shares[0, 0], expected, rtol=1e-6, atol=0)


def test_a_dead_row_reads_nothing_whatever_it_selects() -> None:
    entries = torch.ones(MAX_PAGES * SLOTS + 3, 64, 16)
    selected = torch.tensor([[0, -1], [0, -1]], dtype=torch.int32)
    batch = Batch((Request(3, 0, 1),), dead=1)
    shares = attend_shares(batch, torch.zeros(SLOTS, W, 16), entries=entries, selected=selected)
    assert shares[0].any()
    assert same_bits(shares[1], torch.zeros(1, 16))


def test_keys_stand_in_left_justified_places() -> None:
    """Blocks of 64 keys round against their own running maximum, so the places of keys matter to the bit.

    Judge: the keys of each row listed one by one. Without the empty places of a window that is not yet full, selected
    keys move from the second block to the first: that changes bits here, so the comparison is not idle.
    """
    window, table = 40, page_table()
    batch = Batch((Request(3, 30, 8), Request(1, 37, 20), Request(6, 0, 9)), dead=2)
    draw = Draw(batch, MINI, torch.bfloat16, seed=9)
    query, latents = draw.rows(4, 64) * 4, draw.rows(64)
    ring = draw.normal(SLOTS, window, 64, dtype=torch.bfloat16)
    entries, sink, frequencies = draw.pool(1, 64), draw.normal(4), draw.frequencies()
    selected = draw.choices(60, batch.positions + 1)
    written = (batch.slots, batch.positions, batch.starts)
    result = kernels.attend(
        *(query, latents, ring, sink, frequencies, batch.slots, batch.positions, *written, table, entries, selected)
    )
    turned = turn(query, batch.positions, frequencies)

    nothing = torch.full((64,), torch.nan, dtype=torch.bfloat16)

    def judge(places: int) -> Tensor:
        """With ``places`` places for the window at least; ``nothing`` stands in empty ones."""
        listed = torch.full((batch.rows, window + 60, 64), torch.nan, dtype=torch.bfloat16)
        for row, (slot, position, start) in enumerate(zip(*(w.tolist() for w in written), strict=True)):
            seen = range(max(0, position - window + 1), position + 1)
            keys = [latents[row - position + p] if p >= start else ring[slot, p % window] for p in seen]
            keys += [nothing] * (places - len(keys))
            keys += [nothing if e < 0 else entries[table[slot, e // 64], e % 64] for e in selected[row].tolist()]
            listed[row, : len(keys)] = torch.stack(keys)
        attended = sink_attention(turned, listed, ~listed.isnan().any(-1), sink)
        return turn(attended, batch.positions, frequencies, inverse=True)

    live = batch.live
    assert same_bits(judge(window)[live], result[live])
    assert not same_bits(judge(0)[live], result[live])


@pytest.mark.parametrize("splits", ([7, 13], [1, 1, 1, 17], [16, 4], [3, 17]))
def test_a_step_in_parts_is_the_step(splits: Sequence[int]) -> None:
    """Committing the window between the parts, rows and ring end the same, to the bit."""
    draw = Draw(Batch((Request(5, 37, 20),)), MINI, torch.bfloat16, seed=3)
    query, latents, sink = draw.rows(4, 64), draw.rows(64), draw.normal(4)
    frequencies = draw.frequencies()
    first = draw.normal(SLOTS, MINI.window, 64, dtype=torch.bfloat16)

    def run(parts: Sequence[int]) -> tuple[Tensor, Tensor]:
        ring, done, results = first.clone(), 0, []
        for count in parts:
            part, batch = slice(done, done + count), Batch((Request(5, 37 + done, count),), dead=2)
            padded = torch.cat((latents[part], latents.new_zeros(2, 64)))
            where = (batch.slots, batch.positions)
            rows = torch.cat((query[part], query.new_zeros(2, 4, 64)))
            written = (*where, batch.starts)
            attended = kernels.attend(
                *(rows, padded, ring, sink, frequencies, *where, *written, page_table(), None, None)
            )
            kernels.commit_window(ring, padded, *where)
            results.append(attended[:count])
            done += count
        return torch.cat(results), ring

    for part, whole in zip(run(splits), run([20]), strict=True):
        assert same_bits(part, whole)


def test_commit_keeps_the_last_window() -> None:
    """Nine rows into a ring of four: the last four stay, each at position mod 4. Short steps keep old rows."""
    ring = torch.zeros(3, 4, 1)
    batch = Batch((Request(2, 1, 2), Request(0, 5, 9)), dead=2)
    latents = torch.tensor([[201.0], [202.0], *([100.0 + p] for p in range(5, 14)), [torch.nan], [torch.nan]])
    kernels.commit_window(ring, latents, batch.slots, batch.positions)
    assert ring[..., 0].tolist() == [[112, 113, 110, 111], [0, 0, 0, 0], [0, 201, 202, 0]]


def test_queries_turn_and_outputs_turn_back() -> None:
    """Two channels a head and frequency 1: at position p a query meets the key of position p as if both lay at 0.

    Keys of unit length, turned by their positions, and an equal query: each logit is the cosine of the distance times
    16 over the root of 2; outputs are the mean of the keys as the row's own position sees them (to F32).
    """
    count = 4
    positions = torch.arange(count)
    frequencies = torch.ones(1)
    batch = Batch((Request(2, 0, count),))
    latents = turn(torch.tensor([[1.0, 0.0]] * count), positions, frequencies)
    query, ring = torch.tensor([[[16.0, 0.0]]] * count), torch.full((SLOTS, count, 2), torch.nan)
    where = (batch.slots, batch.positions)
    attended = kernels.attend(
        *(query, latents, ring, torch.tensor([-torch.inf]), frequencies, *where, *where, batch.starts),
        *(page_table(), None, None),
    )
    distance = (positions - positions.unsqueeze(1)).float()
    shares = (16 * 2**-0.5 * distance.cos()).masked_fill(distance > 0, -torch.inf).softmax(1)
    expected = torch.stack(((shares * distance.cos()).sum(1), (shares * distance.sin()).sum(1)), dim=1)
    torch.testing.assert_close(attended[:, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
def test_either_turn_rounds(dtype: torch.dtype) -> None:
    """To the bit what the attention between the two turns gives, if the query was turned before and is not again."""
    draw = Draw(random_batch(21, seed=2), MINI, dtype, seed=1)
    batch = draw.batch
    query, frequencies = 4 * draw.rows(4, 64), draw.frequencies()
    rest = (draw.rows(64), draw.normal(SLOTS, MINI.window, 64, dtype=dtype), draw.normal(4))
    where = (batch.slots, batch.positions, batch.slots, batch.positions, batch.starts, page_table())
    entries, selected = draw.pool(1, 64), draw.choices(MINI.top_k, batch.positions + 1)
    turned = turn(query, batch.positions, frequencies)
    between = kernels.attend(turned, *rest, torch.zeros_like(frequencies), *where, entries, selected)
    attended = kernels.attend(query, *rest, frequencies, *where, entries, selected)
    assert same_bits(attended, turn(between, batch.positions, frequencies, inverse=True))
    assert not same_bits(attended, between)


def one_hot(place: int) -> Tensor:
    return torch.eye(16)[place]


def attend_shares(
    batch: Batch,
    ring: Tensor,
    mark: Callable[[int, int], int] = lambda slot, position: position,
    entries: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Share of each key in each row's output, [R, 1, 16]; ``mark`` numbers the latents of this step.

    Of 16 channels that all turn with frequency zero.
    """
    slots, positions = batch.slots, batch.positions
    latents = torch.stack(
        [
            torch.full((16,), torch.nan) if position < 0 else one_hot(mark(slot, position))
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
        ]
    )
    query, sink = torch.zeros(batch.rows, 1, 16), torch.tensor([-torch.inf])
    written = (slots, positions, batch.starts)
    return kernels.attend(
        *(query, latents, ring, sink, torch.zeros(8), slots, positions, *written, page_table(), entries, selected)
    )


def read(shares: Tensor) -> list[set[int]]:
    """The keys that each row read; all of them with equal shares, of one altogether (to F32)."""
    keys = []
    for row in shares[:, 0]:
        found = set(row.nonzero().flatten().tolist())
        expected = torch.zeros(16)
        expected[list(found)] = 1 / max(1, len(found))
        torch.testing.assert_close(row, expected, rtol=1e-6, atol=0)
        keys.append(found)
    return keys
