"""The kernels of ``mhc_mix`` compile for an H200 at true shapes, use tensor cores as intended, and fit."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import mhc
    from octavo.kernels.triton_backend.mhc_tuning import choose_mix_form, steps_of_part
    from tests.kernels.compiled_launches import (
        MULTIPROCESSORS,
        REGISTERS,
        SHARED_BYTES,
        Launched,
        check_that_it_fits,
        launches_compiled,
        loops_with,
    )

ROWS = (1, 17, 65, 257, 2048, 8192)
"""Steps that use every form, and sums of one to many rows a program."""
SPILLED_BYTES = 64
"""Of eight streams, whose matrix has 80 rows: no model has them."""


def shapes(rows: int, streams: int, width: int) -> dict[str, Any]:
    mixes = (2 + streams) * streams
    return {
        "streams": torch.empty(rows, streams, width, dtype=torch.bfloat16),
        "fn": torch.empty(mixes, streams * width),
        "scale": torch.empty(3),
        "base": torch.empty(mixes),
        "iterations": 20,
        "epsilon": 1e-6,
        "norm_epsilon": 1e-6,
    }


def compiled(rows: int, streams: int, width: int) -> list[Launched]:
    with launches_compiled() as launched:
        mhc.mhc_mix_triton(**shapes(rows, streams, width))
    return launched


def exchanges(code: list[str]) -> int:
    """Instructions by which warps exchange values or wait for each other."""
    return sum(any(word in line for word in ("STS", "LDS", "BAR")) for line in code)


@pytest.fixture(scope="module")
def at_true_shapes() -> dict[int, list[Launched]]:
    return {rows: compiled(rows, 4, 5120) for rows in ROWS}


def test_everything_fits_and_nothing_spills(at_true_shapes: dict[int, list[Launched]]) -> None:
    for launched in at_true_shapes.values():
        assert [one.kernel for one in launched] == ["multiply_streams", "finish_mix"]
        check_that_it_fits(launched)


def test_all_programs_run_at_once(at_true_shapes: dict[int, list[Launched]]) -> None:
    """Registers and shared memory hold as many as are launched: none waits for another to end."""
    for rows, (multiply, _) in at_true_shapes.items():
        held = min(
            REGISTERS // (multiply.threads * -(-multiply.registers // 8) * 8),
            (SHARED_BYTES + 1024) // (multiply.shared_bytes + 1024),
        )
        programs = multiply.programs[0] * multiply.programs[1]
        assert programs <= held * MULTIPROCESSORS, f"{rows} rows: {programs} programs, {held} a multiprocessor"


def test_warps_share_no_matrix_of_sinkhorns(at_true_shapes: dict[int, list[Launched]]) -> None:
    """Forty sums one after the other: threads may exchange registers, warps would have to wait for each other."""
    for rows, (_, finish) in at_true_shapes.items():
        (rounds,) = loops_with(finish, "MUFU.RCP")
        assert exchanges(rounds) == 0, f"{rows} rows"
    # Of padded streams the rounds are no loop: exchanges for what is stored may stand among them, but not one a round.
    code = compiled(1, 5, 4096)[1].machine_code
    reciprocals = [place for place, line in enumerate(code) if "MUFU.RCP" in line]
    assert exchanges(code[reciprocals[0] : reciprocals[-1]]) < 20


def test_three_products_a_step_on_tensor_cores(at_true_shapes: dict[int, list[Launched]]) -> None:
    """Parts of the matrix are cut out of the bits: conversions of numbers run at a quarter of the rate."""
    for rows, (multiply, _) in at_true_shapes.items():
        form = choose_mix_form(rows)
        (loop,) = loops_with(multiply, "MMA")
        names = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in loop]
        wide = form.rows >= 64
        products = sum(name.startswith("HGMMA" if wide else "HMMA") for name in names)
        assert products == 3 * form.channels // 16 * (form.rows // (16 * form.warps) if wide else 1), f"{rows} rows"
        assert not any(name.startswith(("F2F", "LDL", "STL")) for name in names), f"{rows} rows"
        assert any(name.startswith("LDGSTS") for name in names), f"{rows} rows: loads are not under way early"


@pytest.mark.parametrize("rows", (1, 16, 17, 64, 65, 512, 513, 2048, 8192))
def test_parts_cover_the_channels_once(rows: int) -> None:
    form = choose_mix_form(rows)
    for channels in (16, 512, 20480):
        part = steps_of_part(form, rows, channels) * form.channels
        parts = -(-channels // part)
        assert (parts - 1) * part < channels <= parts * part
        assert parts * -(-rows // form.rows) <= max(form.programs, -(-rows // form.rows))


@pytest.mark.parametrize(("rows", "streams", "width"), [(29, 4, 256), (7, 4, 128), (3, 2, 40), (70, 3, 37), (1, 8, 64)])
def test_other_shapes_compile(rows: int, streams: int, width: int) -> None:
    check_that_it_fits(compiled(rows, streams, width), SPILLED_BYTES)


def test_streams_that_are_not_bf16_are_refused() -> None:
    given = shapes(2, 4, 128)
    with pytest.raises(TypeError, match=r"streams are torch\.float32; allowed: torch\.bfloat16"):
        mhc.mhc_mix_triton(**given | {"streams": given["streams"].float()})
