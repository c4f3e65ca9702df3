"""The kernels of the indexer and of ``publish`` compile for an H200 at true shapes, use its tensor cores, and fit."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import publish, select, select_tuning
    from tests.kernels.compiled_launches import REGISTERS, check_that_it_fits, launches_compiled

LISTS_OF_BLOCKS = 160
"""Bytes spilled where blocks are listed too: addresses and constants, some ten words of which each tile reads."""
SLOW_ANGLES = 96
"""Bytes of stack of ``publish``: the reduction of angles beyond 100,000 works in memory."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def indexer(rows: int, heads: int, channels: int, ratio: int, packed: bool) -> dict[str, Any]:
    width, dtype = (channels // 2 + channels // 32, torch.uint8) if packed else (channels, torch.bfloat16)
    return {
        "query": empty(rows, heads, channels),
        "weights": empty(rows, heads),
        "keys": empty(9, 64 // ratio, width, dtype=dtype),
        "page_table": empty(4, 16384, dtype=torch.int32),
        "slots": empty(rows, dtype=torch.int32),
        "positions": empty(rows, dtype=torch.int32),
        "scale": 0.01,
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", (1, 8192))
def test_choices_of_the_released_model(rows: int) -> None:
    """Rows in two grids, together and alone, 4096 at once; lists united in one step or in two."""
    with launches_compiled() as launched:
        select.select_triton(**indexer(rows, 32, 128, 2, True), candidates=None, top_k=512, block_size=8)
    scoring = [one for one in launched if one.kernel == "score_rows"]
    uniting = [one for one in launched if one.kernel == "unite_lists"]
    if rows == 1:
        assert [one.programs for one in scoring] == [(1, 128), (1, 128)]
        assert [one.programs for one in uniting] == [(1, 8), (1, 1)]
    else:
        assert [one.programs for one in scoring] == [(512, 1), (4096, 1)] * 2
        assert [one.programs for one in uniting] == [(4096, 1)] * 2
    check_that_it_fits(launched)
    for one in scoring[:2]:
        assert one.registers * one.threads * 2 <= REGISTERS, "two programs of a processor take turns"
        products = [i for i, line in enumerate(one.machine_code) if "HGMMA" in line]
        assert len(products) == 8, "128 channels in 8 steps of 16"
        if one is scoring[0]:
            before = one.machine_code[products[0] - 200 : products[0]]
            assert not any("STS" in line or "BAR.SYNC" in line for line in before), (
                "keys are unpacked where they are multiplied"
            )


@pytest.mark.timeout(300)
def test_candidates_of_the_released_model() -> None:
    given = indexer(2048, 32, 128, 1, True)
    with launches_compiled() as launched:
        select.select_candidates_triton(**given, top_k=512, top_blocks=2048, block_size=8)
        select.select_triton(**given, candidates=empty(2048, 2048, dtype=torch.int32), top_k=512, block_size=8)
    check_that_it_fits(launched[:2], LISTS_OF_BLOCKS)
    check_that_it_fits(launched[2:])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("heads", "channels", "top_k", "top_blocks", "block_size", "packed"),
    ((4, 64, 64, 16, 32, True), (8, 64, 8, 3, 4, False), (12, 96, 70, 7, 8, True)),
    ids=("nano", "mini", "odd sizes"),
)
def test_other_models(heads: int, channels: int, top_k: int, top_blocks: int, block_size: int, packed: bool) -> None:
    given = indexer(40, heads, channels, 1, packed)
    with launches_compiled() as launched:
        select.select_candidates_triton(**given, top_k=top_k, top_blocks=top_blocks, block_size=block_size)
    check_that_it_fits(launched, LISTS_OF_BLOCKS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ratio", "channels", "key_channels", "packed"), ((1, 512, 128, True), (2, 512, 128, True), (2, 96, 64, False))
)
def test_publish(ratio: int, channels: int, key_channels: int, packed: bool) -> None:
    rows, number = 300, torch.int32
    dtype = torch.float32 if ratio == 2 else torch.bfloat16
    pools = [empty(9, 64 // ratio, width) for width in (channels, key_channels)]
    if packed:
        widths = (channels // 2 + channels // 16, key_channels // 2 + key_channels // 32)
        pools = [empty(9, 64 // ratio, width, dtype=torch.uint8) for width in widths]
    with launches_compiled() as launched:
        publish.publish_triton(
            values=empty(rows, channels, dtype=dtype),
            gates=empty(rows, channels, dtype=dtype) if ratio == 2 else None,
            norm=empty(channels),
            wk=empty(key_channels, channels),
            k_norm=empty(key_channels),
            frequencies=empty(16, dtype=torch.float32),
            **{f"write_{name}": empty(rows, dtype=number) for name in ("slots", "positions", "starts")},
            page_table=empty(4, 100, dtype=number),
            entries=pools[0],
            keys=pools[1],
            pending=empty(4, 2, channels, dtype=dtype) if ratio == 2 else None,
            epsilon=1e-20,
        )
    assert [one.kernel for one in launched] == ["publish_rows", *(["keep_waiting"] if ratio == 2 else [])]
    check_that_it_fits(launched[:1], SLOW_ANGLES)
    check_that_it_fits(launched[1:])
    assert any("HMMA" in line for line in launched[0].machine_code)


@pytest.mark.parametrize("name", ("query", "weights"))
def test_what_is_not_bf16_is_refused(name: str) -> None:
    given = indexer(2, 4, 64, 1, True)
    given[name] = given[name].float()
    with pytest.raises(TypeError, match=rf"{name} of torch\.float32; allowed: torch\.bfloat16"):
        select.select_triton(**given, candidates=None, top_k=8, block_size=8)
    with pytest.raises(TypeError, match=rf"select_candidates.*{name} of torch\.float32"):
        select.select_candidates_triton(**given, top_k=8, top_blocks=4, block_size=8)


def test_pages_that_a_tile_does_not_hold_whole_are_refused() -> None:
    given = indexer(2, 4, 64, 1, False) | {"keys": empty(9, 48, 64)}
    with pytest.raises(ValueError, match="pages of 48 entries; allowed are divisors of 64"):
        select.select_triton(**given, candidates=None, top_k=8, block_size=8)


def test_programs_fill_the_device_and_short_contexts_are_not_cut_up() -> None:
    splits = {rows: select_tuning.splits_for(rows, 16384) for rows in (1, 16, 17, 64, 128, 256, 1024, 2048, 4096)}
    assert splits == {1: 128, 16: 64, 17: 64, 64: 16, 128: 16, 256: 8, 1024: 4, 2048: 2, 4096: 1}
    assert select_tuning.splits_for(1, 1) == 1
    assert select_tuning.splits_for(1, 64) == 8
