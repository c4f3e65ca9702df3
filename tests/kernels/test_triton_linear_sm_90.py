"""The kernels of products with F8 weights compile for an H200 at true shapes, use tensor cores as intended, and fit."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend.linear import grouped_linear_triton, linear_f8_pair_triton, linear_f8_triton
    from octavo.kernels.triton_backend.linear_tiles import FOR_NARROW, FOR_TWO, FOR_WIDE, Launch
    from octavo.kernels.triton_backend.shared_expert import shared_expert_triton
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

ROWS = (1, 32, 64, 128)
"""Steps that use every launch of the tables."""
MANY = 2048
SPILLED = 2048
"""Bytes a thread may keep in memory where a row of weights is not whole blocks, as in no model that is released."""


def weight(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    scale = torch.empty(-(-outputs // 32), -(-inputs // 32), dtype=torch.uint8)
    return torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), scale


def rows_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def linear(rows: int, outputs: int, inputs: int) -> list[Launched]:
    with launches_compiled() as launched:
        linear_f8_triton(rows_of(rows, inputs), *weight(outputs, inputs))
    return launched


def pair(rows: int, first: int, second: int, inputs: int) -> list[Launched]:
    with launches_compiled() as launched:
        linear_f8_pair_triton(rows_of(rows, inputs), *weight(first, inputs), *weight(second, inputs))
    return launched


def grouped(rows: int, heads: int, head_dim: int, groups: int, rank: int) -> list[Launched]:
    with launches_compiled() as launched:
        grouped_linear_triton(
            rows_of(rows, heads, head_dim), *weight(groups * rank, heads // groups * head_dim), groups
        )
    return launched


def shared(rows: int, hidden: int, inner: int) -> list[Launched]:
    with launches_compiled() as launched:
        (w1, s1), (w2, s2), (w3, s3) = weight(inner, hidden), weight(hidden, inner), weight(inner, hidden)
        shared_expert_triton(rows_of(rows, hidden), w1, s1, w2, s2, w3, s3, 10.0)
    return launched


@pytest.fixture(scope="module")
def at_true_shapes() -> dict[int, list[Launched]]:
    """By rows of the step: query down and latent, query up, the grouped product, the shared expert."""
    return {
        rows: [
            *pair(rows, 1280, 512, 5120),
            *(linear(rows, 1280, 5120) if rows == 64 else ()),  # others by the grouped product
            *(linear(rows, 32768, 1280) if rows != 32 else ()),  # by the launch of narrow ones
            *(grouped(rows, 64, 512, 8, 1024) if rows != 64 else ()),
            *shared(rows, 5120, 2304),
        ]
        for rows in ROWS
    }


def test_the_steps_above_use_every_launch(at_true_shapes: dict[int, list[Launched]]) -> None:
    used = {launch_of(one, rows) for rows, launched in at_true_shapes.items() for one in launched}
    assert used - {None} == {launch for table in (FOR_NARROW, FOR_WIDE, FOR_TWO) for _, launch in table}


@pytest.mark.timeout(300)
def test_everything_fits(at_true_shapes: dict[int, list[Launched]]) -> None:
    for launched in at_true_shapes.values():
        check_that_it_fits(launched)


def test_as_many_programs_fit_at_once_as_the_table_says(at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, launched in at_true_shapes.items():
        for one in launched:
            launch = launch_of(one, rows)
            if launch is None:
                continue
            what = f"{rows} rows: {one.kernel} of {one.programs}"
            assert one.threads == 32 * launch.warps, what
            assert launch.programs * (one.shared_bytes + 1024) <= SHARED_BYTES + 1024, what
            assert launch.programs * one.threads * -(-one.registers // 8) * 8 <= REGISTERS, what


def test_few_rows_are_a_single_wave(at_true_shapes: dict[int, list[Launched]]) -> None:
    """Every program is resident at once, and most multiprocessors have work."""
    for one in at_true_shapes[1]:
        if (launch := launch_of(one, 1)) is not None:
            tiles, outputs, splits = one.programs
            programs = tiles * outputs * splits
            assert MULTIPROCESSORS // 2 <= programs <= launch.programs * MULTIPROCESSORS, (one.kernel, one.programs)


def test_weights_go_from_registers_to_tensor_cores(at_true_shapes: dict[int, list[Launched]]) -> None:
    """Nothing but rows that are rounded on the way is written to shared memory between a load and a product."""
    for rows, launched in at_true_shapes.items():
        for one in launched:
            if (launch := launch_of(one, rows)) is None:
                continue
            what = f"{rows} rows: {one.kernel}"
            loops = loops_with(one, "HGMMA")
            assert loops, f"{what}: no loop with products"
            for loop in loops:
                names = [word for line in loop for word in re.findall(r"[A-Z][A-Z0-9_.]+", line)]
                stored = sum(name.startswith("STS") for name in names)
                mine = launch.rows * 128 * launch.blocks // (2 * one.threads)
                assert stored <= (0 if launch.prepared else mine), f"{what}: {stored} words to shared memory"
                assert not {"STL", "LDL", "LDL.LU"} & set(names), what
                assert {"LDGSTS.E.BYPASS.128", "LDS.128"} <= set(names), f"{what}: {sorted(set(names))}"
            products = [line for line in one.ptx.splitlines() if "wgmma.mma_async" in line]
            assert products and all(line.count("{") == 2 for line in products), f"{what}: operands in shared memory"


def test_kernels_wait_for_those_ahead(at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, launched in at_true_shapes.items():
        for one in launched:
            check_dependence(one, f"{rows} rows: {one.kernel} of {one.programs}", waits=True, lets_start=True)


def test_many_rows_are_rounded_once_and_weights_made_bf16_once() -> None:
    assert [one.kernel for one in linear(MANY, 1280, 5120)] == ["prepare_rows", "dequantise"]
    assert [one.kernel for one in pair(MANY, 1280, 512, 5120)] == ["prepare_rows", "dequantise", "dequantise"]
    assert [one.kernel for one in grouped(MANY, 64, 512, 8, 1024)] == ["dequantise"]
    names = [one.kernel for one in shared(MANY, 5120, 2304)]
    assert names == ["dequantise", "dequantise", "prepare_rows", "gate_parts", "dequantise"]


def test_a_pair_of_few_rows_is_prepared_multiplied_and_summed_once(at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, launched in at_true_shapes.items():
        names = [one.kernel for one in launched[: 2 if rows == 1 else 3]]
        assert names == ["prepare_rows"] * (rows > 1) + ["multiply_pair", "sum_parts_of_pair"], rows


def test_other_shapes_compile() -> None:
    """Those of the mini model and of octavo-nano, and widths that fill no tile; the largest launches with those too."""
    check_that_it_fits(linear(3, 131, 160))
    check_that_it_fits(pair(40, 64, 64, 128))
    check_that_it_fits(pair(90, 131, 67, 160), SPILLED)
    check_that_it_fits(grouped(40, 8, 96, 2, 64))
    for rows in (3, 40):
        check_that_it_fits(shared(rows, 128, 64))
    check_that_it_fits(shared(90, 160, 96), SPILLED)
    check_that_it_fits(linear(90, 16_500, 160), SPILLED)
    check_that_it_fits(grouped(MANY, 4, 64, 2, 32))
    check_that_it_fits(shared(MANY, 256, 128))


def test_rows_that_are_not_bf16_are_refused() -> None:
    x, (matrix, scale) = rows_of(2, 128, dtype=torch.float32), weight(128, 128)
    expected = r"rows are torch\.float32; allowed: torch\.bfloat16"
    with pytest.raises(TypeError, match=f"linear_f8, backend triton: {expected}"):
        linear_f8_triton(x, matrix, scale)
    with pytest.raises(TypeError, match=f"linear_f8_pair, backend triton: {expected}"):
        linear_f8_pair_triton(x, matrix, scale, matrix, scale)
    with pytest.raises(TypeError, match=f"grouped_linear, backend triton: {expected}"):
        grouped_linear_triton(x, matrix, scale, 1)
    with pytest.raises(TypeError, match=f"shared_expert, backend triton: {expected}"):
        shared_expert_triton(x, matrix, scale, matrix, scale, matrix, scale, 1.0)


def launch_of(one: Launched, rows: int) -> Launch | None:
    """What the tables have for a product, by its name and the number of its tiles of outputs."""
    if not one.kernel.startswith("multiply"):
        return None
    wide = one.programs[1] >= 128 and one.programs[2] == 1
    table = FOR_TWO if one.kernel == "multiply_two" else FOR_WIDE if wide else FOR_NARROW
    return next((launch for most, launch in table if rows <= most), None)
