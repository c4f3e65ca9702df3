"""Packed and plain pools hold the same numbers, and operators read the same from both."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.kernels.storage import (
    load_entries,
    load_keys,
    packed_entry_bytes,
    packed_key_bytes,
    store_entries,
    store_keys,
)

RELEASED_BYTES = {"entries": (512, 288), "keys": (128, 68)}
STORES = {
    "entries": (store_entries, load_entries, packed_entry_bytes),
    "keys": (store_keys, load_keys, packed_key_bytes),
}


def values(rows: int, channels: int) -> torch.Tensor:
    """Normal values, zeros, and scales from tiny to beyond what E4M3 scales can hold."""
    drawn = torch.randn(rows, channels, generator=torch.Generator().manual_seed(channels))
    drawn[0] = 0.0
    drawn[1:5] *= torch.tensor([1e-6, 1e-3, 1e3, 1e6]).unsqueeze(1)
    return drawn.bfloat16()


@pytest.mark.parametrize("kind", STORES)
def test_released_sizes(kind: str) -> None:
    channels, count = RELEASED_BYTES[kind]
    assert STORES[kind][2](channels) == count


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("channels", [32, 64, 128, 512])
def test_packed_holds_what_bf16_holds(kind: str, channels: int) -> None:
    """To the bit: a code of 2 bits times a scale of at most 4 has six significant bits, BF16 has eight."""
    store, load, size = STORES[kind]
    rows = values(40, channels)
    page, place = torch.arange(40) // 8 % 5, torch.arange(40) % 8
    packed = torch.full((5, 8, size(channels)), 255, dtype=torch.uint8)
    plain = torch.full((5, 8, channels), torch.nan, dtype=torch.bfloat16)
    store(packed, page, place, rows)
    store(plain, page, place, rows)
    read = load(packed, page, place, channels, torch.bfloat16)
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, load(plain, page, place, channels, torch.bfloat16))
    assert not torch.equal(read, rows), "nothing was quantised"


@pytest.mark.parametrize("kind", STORES)
def test_f32_pools_take_values_as_they_are(kind: str) -> None:
    store, load, _ = STORES[kind]
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    pool, page, place = torch.zeros(1, 4, 64), torch.zeros(4, dtype=torch.int64), torch.arange(4)
    store(pool, page, place, rows)
    assert torch.equal(load(pool, page, place, 64, torch.float32), rows)


def test_operators_read_the_same_from_both() -> None:
    """``publish`` into both kinds of pool, then ``select`` and ``attend`` from each, bitwise; ratio 1."""
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    tokens, channels, index_channels, pages = 130, 64, 32, 4
    positions = torch.arange(tokens, dtype=torch.int32)
    zeros, table = torch.zeros_like(positions), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    compressed, norm, wk, k_norm = draw(tokens, channels), draw(channels), draw(index_channels, channels), draw(32)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    query, weights, index_query = draw(tokens, 2, channels), draw(tokens, 4), draw(tokens, 4, index_channels)
    latents, ring, sink = draw(tokens, channels), torch.zeros(1, 8, channels).bfloat16(), torch.zeros(2)
    outcomes = []
    for packed in (False, True):
        shapes = (packed_entry_bytes(channels), packed_key_bytes(index_channels)) if packed else (64, 32)
        dtype = torch.uint8 if packed else torch.bfloat16
        entries, keys = (torch.zeros(pages, 64, width, dtype=dtype) for width in shapes)
        write = (zeros, positions, zeros)
        kernels.publish(compressed, None, norm, wk, k_norm, frequencies, *write, table, entries, keys, None, 1e-20)
        where = (keys, table, zeros, positions)
        selected, candidates = kernels.select_candidates(index_query, weights, *where, 0.1, 6, 3, 4)
        restricted = kernels.select(index_query, weights, *where, candidates, 0.1, 6, 4)
        attended = kernels.attend(
            *(query, latents, ring, sink, frequencies, zeros, positions, *write, table, entries, restricted)
        )
        outcomes.append((selected, candidates, restricted, attended))
    for plain_result, packed_result in zip(*outcomes, strict=True):
        assert torch.equal(plain_result, packed_result)
    assert (outcomes[0][0] >= 0).any() and outcomes[0][3].abs().sum() > 0
