"""The kernels of ``experts`` compile for an H200 at true shapes, use tensor cores as intended, and fit."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import expert_narrow, expert_tiles, expert_wide, experts
    from octavo.kernels.triton_backend.expert_tiles import (
        FEW_ROWS,
        MOST_SCORED,
        NARROW,
        TILES,
        WIDE_TILES,
        Narrow,
        Tile,
        choose_few,
        choose_tiles,
    )
    from tests.kernels.compiled_launches import (
        MULTIPROCESSORS,
        REGISTERS,
        SHARED_BYTES,
        Launched,
        check_dependence,
        check_that_it_fits,
        launches_compiled,
        loops_with,
    )

SPILLED_BYTES = 96
"""A few numbers may wait in memory while a tile is computed: once a tile, not in the loop."""
ROWS = (64, 1024, 3072, 8192)
"""Steps that use every tile of widths that are not whole; it is compiled for true ones."""
RAGGED = (5120, 2272)
NARROW_ROWS = (8, 64, 512)
"""Steps in every narrow tile."""
WIDE_ROWS = (2048, 8192)
"""Steps in every wide tile."""
FEW = (1, 4)
"""Steps of few rows, in every way that the table has."""


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def shapes(rows: int, experts: int, resident: range, hidden: int, inner: int, top_k: int) -> dict[str, Any]:
    count = len(resident)
    return {
        "x": empty(rows, hidden, dtype=torch.bfloat16),
        "live": empty(rows, dtype=torch.bool),
        "image": empty(rows, dtype=torch.bool),
        "gate": empty(experts, hidden, dtype=torch.bfloat16),
        "bias": empty(experts, dtype=torch.float32),
        "bias_vl": empty(experts, dtype=torch.float32) if resident.start == 0 else None,
        "w1": empty(count, inner, hidden // 2),
        "s1": empty(count, inner, hidden // 32),
        "w2": empty(count, hidden, inner // 2),
        "s2": empty(count, hidden, inner // 32),
        "w3": empty(count, inner, hidden // 2),
        "s3": empty(count, inner, hidden // 32),
        "first_expert": resident.start,
        "top_k": top_k,
        "route_scale": 1.5,
        "limit": 10.0,
    }


def compiled(**arguments: Any) -> list[Launched]:
    with launches_compiled() as launched:
        experts.experts_triton(**arguments)
    return launched


@pytest.fixture(scope="module")
def at_true_shapes() -> dict[int, list[Launched]]:
    """By rows of the step; 48 of 384 experts, as on one of eight GPUs."""
    found = {}
    for rows in ROWS:
        chosen = tile_of(rows)
        with mock.patch.object(experts, "choose_tiles", lambda *step, chosen=chosen: chosen):
            found[rows] = compiled(**shapes(rows, 384, range(48), 5120, 2304, 6))
    return found


@pytest.fixture(scope="module")
def narrow_at_true_shapes() -> dict[int, list[Launched]]:
    return {rows: compiled(**shapes(rows, 384, range(48), 5120, 2304, 6)) for rows in NARROW_ROWS}


@pytest.fixture(scope="module")
def wide_at_true_shapes() -> dict[int, list[Launched]]:
    return {rows: compiled(**shapes(rows, 384, range(48), 5120, 2304, 6)) for rows in WIDE_ROWS}


@pytest.fixture(scope="module")
def few_at_true_shapes() -> dict[int, list[Launched]]:
    return {rows: compiled(**shapes(rows, 384, range(48), 5120, 2304, 6)) for rows in FEW}


def tile_of(rows: int) -> Tile:
    tile = choose_tiles(rows, 6, 384, RAGGED, True)
    assert isinstance(tile, Tile)
    return tile


def narrow_of(rows: int) -> Narrow:
    tile = choose_tiles(rows, 6, 384, (5120, 2304), True)
    assert isinstance(tile, Narrow)
    return tile


def fits_at_once(one: Launched, programs: int, what: str) -> None:
    """So many of its programs on a multiprocessor, and no more are launched than fill the device."""
    assert programs * (one.shared_bytes + 1024) <= SHARED_BYTES + 1024, what
    assert programs * one.threads * -(-one.registers // 8) * 8 <= REGISTERS, what
    assert one.programs[0] <= programs * MULTIPROCESSORS, what


def test_the_steps_above_use_every_tile() -> None:
    assert [tile_of(rows) for rows in ROWS] == list(TILES.values())
    assert [choose_tiles(rows, 6, 384, (5120, 2304), True) for rows in WIDE_ROWS] == [tile for _, tile in WIDE_TILES]
    assert [narrow_of(rows) for rows in NARROW_ROWS] == [tile for _, tile in NARROW]
    assert [choose_few(rows) for rows in FEW] == list(FEW_ROWS)
    assert all(choose_few(rows) is None for rows in (*ROWS, *NARROW_ROWS))


@pytest.mark.timeout(300)
def test_everything_fits(at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, launched in at_true_shapes.items():
        check_that_it_fits(launched, SPILLED_BYTES)
        names = [one.kernel for one in launched]
        first = "score_rows" if rows <= MOST_SCORED else "round_rows"
        assert names == [first, "route", "place_pairs", "gate_and_up", "down", "sum_pairs"]


def test_few_rows_are_four_launches_that_fit(few_at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, launched in few_at_true_shapes.items():
        check_that_it_fits(launched)
        assert [one.kernel for one in launched] == ["score_rows", "route", "gate_and_up_few", "down_and_sum"]
        fits_at_once(launched[2], expert_tiles.FEW.programs, f"{rows} rows")
        assert expert_tiles.FEW.programs * launched[3].threads * launched[3].registers <= REGISTERS


def test_as_many_programs_fit_at_once_as_the_table_says(at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, launched in at_true_shapes.items():
        by_name = {one.kernel: one for one in launched}
        for kernel, launch in (("gate_and_up", tile_of(rows).gate_and_up), ("down", tile_of(rows).down)):
            assert by_name[kernel].threads == 32 * launch.warps
            fits_at_once(by_name[kernel], launch.programs, f"{rows} rows: {kernel}")


def test_narrow_tiles_read_whole_lines_and_move_nothing_between_threads(
    narrow_at_true_shapes: dict[int, list[Launched]],
) -> None:
    """From shared memory to tensor cores by way of registers, sixteen steps at once; all that the table says fits."""
    for rows, launched in narrow_at_true_shapes.items():
        check_that_it_fits(launched)
        first = "score_rows" if rows <= MOST_SCORED else "round_rows"
        names = [first, "route", "place_pairs", "multiply_narrow", "gate_pairs", "multiply_narrow", "sum_pairs"]
        assert [one.kernel for one in launched] == names
        tile = narrow_of(rows)
        for one in launched:
            what = f"{rows} rows: {one.kernel}"
            if one.kernel != "multiply_narrow":
                waits, lets = ("route", "gate_pairs", "sum_pairs"), ("score_rows", "route")
                check_dependence(one, what, one.kernel in waits, one.kernel in lets)
                continue
            assert one.threads == 32 * tile.warps
            fits_at_once(one, tile.programs, what)
            loops = loops_with(one, "HMMA")
            assert loops, f"{what}: no loop with products"
            for loop in loops:
                names_in = {word for line in loop for word in re.findall(r"[A-Z][A-Z0-9_.]+", line)}
                moved = {name for name in names_in if name.startswith(("STS", "STL", "LDL", "SHFL", "PRMT"))}
                assert not moved, f"{what}: {sorted(moved)}"
                assert {"LDGSTS.E.BYPASS.128", "LDS.128"} <= names_in, f"{what}: {sorted(names_in)}"
                products = sum("HMMA" in line for line in loop)
                assert products == 16 * (tile.rows // 8) * (tile.outputs // (16 * tile.warps)), what


@pytest.mark.parametrize(("hidden", "inner"), [(5120, 2272), (160, 256)])
def test_narrow_tiles_refuse_widths_that_are_not_whole(hidden: int, inner: int) -> None:
    """Else channels would stay unwritten."""
    form, tiles, order = NARROW[0][1], empty(4, 3, dtype=torch.int32), empty(6, dtype=torch.int32)
    given = form, tiles, tiles[0, :1], empty(6, inner, dtype=torch.bfloat16), order
    with pytest.raises(ValueError, match=rf"{inner} inputs and {hidden} outputs: allowed are multiples of 128"):
        expert_narrow.multiply_down_narrow(*given, empty(4, hidden, inner // 2), empty(4, hidden, inner // 32))


def test_products_of_wide_tiles_follow_each_other(wide_at_true_shapes: dict[int, list[Launched]]) -> None:
    """A loop for every width of a tile and every group, with eight products for 64 channels, once or twice, and again
    for 32 rows more. It waits for all products at the end of a block, before that only where an operand's registers are
    written again; decoded weights stay in registers."""
    names = ["route", "place_pairs", "round_pairs", "multiply_wide", "gate_pairs", "multiply_wide", "sum_pairs"]
    for rows, launched in wide_at_true_shapes.items():
        check_that_it_fits(launched)
        assert [one.kernel for one in launched] == names
        twice = rows == WIDE_ROWS[1]
        expected = 2 * [16, 16, 32, 16, 32] if twice else 4 * [8, 8, 16]
        for one in launched:
            if one.kernel != "multiply_wide":
                waits = one.kernel in ("route", "gate_pairs", "sum_pairs")
                check_dependence(one, one.kernel, waits, one.kernel == "route")
                continue
            assert one.programs == (MULTIPROCESSORS,)
            loops = loops_with(one, "HGMMA")
            products = [sum("HGMMA" in line for line in loop) for loop in loops]
            assert sorted(products) == sorted(expected), products
            for loop in loops:
                assert sum("WARPGROUP.DEPBAR" in line for line in loop) == (4 if twice else 1)
                names_in = {word for line in loop for word in re.findall(r"[A-Z][A-Z0-9_.]+", line)}
                moved = {name for name in names_in if name.startswith(("STS", "STL", "LDL", "SHFL", "PRMT"))}
                assert not moved and "LDS.128" in names_in, sorted(names_in)
            operands = [line for line in one.ptx.splitlines() if "wgmma.mma_async" in line]
            assert operands and all(line.count("{") == 2 for line in operands), "operands in shared memory"


@pytest.mark.parametrize(("hidden", "inner"), [(5120, 2240), (5248, 2304)])
def test_wide_tiles_refuse_widths_that_are_not_whole(hidden: int, inner: int) -> None:
    tiles, order, totals = (empty(*shape, dtype=torch.int32) for shape in ((4, 3), (6,), (2,)))
    given = WIDE_TILES[0][1], tiles, totals, empty(6, inner, dtype=torch.bfloat16), order
    with pytest.raises(ValueError, match=rf"{inner} inputs and {hidden} outputs: allowed are multiples of 128 and"):
        expert_wide.multiply_down_wide(*given, empty(4, hidden, inner // 2), empty(4, hidden, inner // 32))


def test_weights_go_from_registers_to_tensor_cores(
    at_true_shapes: dict[int, list[Launched]], few_at_true_shapes: dict[int, list[Launched]]
) -> None:
    """No layout is changed through shared memory between a load and a product, and nothing is spilled there.

    ``down_and_sum`` alone rounds its rows in the loop and stores those.
    """
    for rows, launched in {**at_true_shapes, **few_at_true_shapes}.items():
        for one in launched:
            if not one.kernel.startswith(("gate_and_up", "down")):
                continue
            what = f"{rows} rows: {one.kernel}"
            loops = loops_with(one, "HGMMA")
            assert loops, f"{what}: no loop with products"
            for loop in loops:
                names = {word for line in loop for word in re.findall(r"[A-Z][A-Z0-9_.]+", line)}
                stored = set() if one.kernel == "down_and_sum" else {"STS", "STS.128", "PRMT"}
                assert not names & {"STL", "LDL", "LDL.LU", *stored}, f"{what}: {sorted(names)}"
                assert {"LDGSTS.E.BYPASS.128", "LDS.128"} <= names, f"{what}: {sorted(names)}"
            products = [line for line in one.ptx.splitlines() if "wgmma.mma_async" in line]
            assert products and all(line.count("{") == 2 for line in products), f"{what}: operands in shared memory"


def test_kernels_for_few_rows_wait_for_those_ahead(few_at_true_shapes: dict[int, list[Launched]]) -> None:
    """The rule of ``dependent_launch``: before they touch memory, and before any branch. The first one is ordinary."""
    for rows, launched in few_at_true_shapes.items():
        for one in launched:
            what = f"{rows} rows: {one.kernel}"
            check_dependence(one, what, one is not launched[0], one is not launched[-1])


def test_products_of_small_tiles_wait_once(
    at_true_shapes: dict[int, list[Launched]], few_at_true_shapes: dict[int, list[Launched]]
) -> None:
    """A product of eight steps is awaited at its end, not after each of them."""
    for rows, launched in {**at_true_shapes, **few_at_true_shapes}.items():
        for one in launched:
            if one.kernel.startswith(("gate_and_up", "down")) and rows <= 512:
                for loop in loops_with(one, "HGMMA"):
                    steps = sum("HGMMA" in line for line in loop)
                    waits = sum("WARPGROUP.DEPBAR" in line for line in loop)
                    assert steps >= 8 and 0 < waits <= steps // 4, f"{rows} rows: {one.kernel}: {waits} of {steps}"


@pytest.mark.parametrize(
    ("rows", "count", "resident", "hidden", "inner", "top_k"),
    [
        pytest.param(29, 8, range(8), 256, 128, 2, id="nano"),
        pytest.param(7, 8, range(4, 8), 128, 64, 2, id="mini"),
        pytest.param(1, 12, range(1, 2), 512, 160, 5, id="ragged"),
        pytest.param(19, 12, range(1, 2), 512, 160, 5, id="ragged, more rows"),
    ],
)
def test_other_shapes_compile(rows: int, count: int, resident: range, hidden: int, inner: int, top_k: int) -> None:
    check_that_it_fits(compiled(**shapes(rows, count, resident, hidden, inner, top_k)), SPILLED_BYTES)


def test_rows_that_are_not_bf16_are_refused() -> None:
    with pytest.raises(TypeError, match=r"rows are torch\.float32; allowed: torch\.bfloat16"):
        experts.experts_triton(**shapes(2, 8, range(8), 256, 128, 2) | {"x": empty(2, 256, dtype=torch.float32)})
