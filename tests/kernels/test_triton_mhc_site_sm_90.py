"""The kernels of ``mhc_site`` compile for an H200 at true shapes, use tensor cores as intended, and fit."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.model.presets import preset

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import mhc, mhc_site
    from octavo.kernels.triton_backend.mhc_tuning import MixForm, choose_site_form, steps_of_part
    from tests.kernels.compiled_launches import (
        Launched,
        check_dependence,
        check_that_it_fits,
        launches_compiled,
        loops_with,
    )
    from tests.kernels.test_triton_mhc_sm_90 import exchanges

ROWS = (1, 64, 128)
"""Steps that use every form of one pass."""
SPILLED_BYTES = 32
"""Pointers and numbers of rows, outside of the loop."""


def shapes(rows: int, width: int) -> dict[str, Any]:
    bf16 = torch.bfloat16
    return {
        "streams": torch.empty(rows, 4, width, dtype=bf16),
        "y": torch.empty(rows, width, dtype=bf16),
        "post": torch.empty(rows, 4),
        "comb": torch.empty(rows, 4, 4),
        "pre": torch.empty(rows, 4),
        "weight": torch.empty(width, dtype=bf16),
        "collapse_epsilon": 1e-6,
        "fn": torch.empty(24, 4 * width),
        "scale": torch.empty(3),
        "base": torch.empty(24),
        "iterations": 20,
        "epsilon": 1e-6,
        "norm_epsilon": 1e-6,
    }


def compiled(rows: int, width: int) -> list[Launched]:
    with launches_compiled() as launched:
        mhc_site.mhc_site_triton(**shapes(rows, width))
    return launched


def form_of(rows: int) -> MixForm:
    form = choose_site_form(rows)
    assert form is not None
    return form


@pytest.fixture(scope="module")
def at_true_shapes() -> dict[int, list[Launched]]:
    return {rows: compiled(rows, 5120) for rows in ROWS}


def test_everything_fits(at_true_shapes: dict[int, list[Launched]]) -> None:
    for launched in at_true_shapes.values():
        assert [one.kernel for one in launched] == ["expand_and_multiply", "finish_site"]
        check_that_it_fits(launched, SPILLED_BYTES)
        for one in launched:
            check_dependence(one, one.kernel, waits=True, lets_start=True)


def test_streams_are_expanded_once(at_true_shapes: dict[int, list[Launched]]) -> None:
    """Triton would expand them anew for tensor cores, in another layout: four products of a stream, twice."""
    for rows, (expand, _) in at_true_shapes.items():
        form = form_of(rows)
        (loop,) = loops_with(expand, "MMA")
        of_thread = max(1, form.rows * form.channels // (32 * form.warps))
        products = sum(name_of(line).startswith(("FMUL", "FFMA")) for line in loop)
        expected = of_thread * (4 * 4 + 4 + 4 + 4 + 1)
        assert expected <= products <= 1.15 * expected, f"{rows} rows: {products} of {expected}"


def test_loads_are_under_way_early(at_true_shapes: dict[int, list[Launched]]) -> None:
    for rows, (expand, _) in at_true_shapes.items():
        if form_of(rows).stages > 1:
            (loop,) = loops_with(expand, "MMA")
            assert any(name_of(line).startswith("LDGSTS") for line in loop), f"{rows} rows"


def test_warps_share_no_matrix_of_sinkhorns(at_true_shapes: dict[int, list[Launched]]) -> None:
    """As ``test_triton_mhc_sm_90.py`` says."""
    for rows, (_, finish) in at_true_shapes.items():
        rounds = loops_with(finish, "MUFU.RCP")
        assert len(rounds) == 1 and exchanges(rounds[0]) == 0, f"{rows} rows"


@pytest.mark.parametrize("rows", (1, 16, 17, 64, 65, 256))
def test_parts_cover_the_channels_once(rows: int) -> None:
    form = form_of(rows)
    for channels in (16, 128, 5120):
        part = steps_of_part(form, rows, channels) * form.channels
        parts = -(-channels // part)
        assert (parts - 1) * part < channels <= parts * part
        assert parts * -(-rows // form.rows) <= form.programs


def test_many_rows_are_expanded_and_collapsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a program, in registers; the mix is a second pass, which has tests of its own."""
    assert choose_site_form(256) is not None and choose_site_form(257) is None
    mixed = (torch.empty(8192, 4), torch.empty(8192, 4), torch.empty(8192, 4, 4))
    monkeypatch.setattr(mhc, "run", lambda *arguments: mixed)
    (expand,) = compiled(8192, 5120)
    assert (expand.kernel, expand.programs) == ("expand_and_collapse", (8192,))
    check_that_it_fits([expand])
    assert expand.registers <= 80, "three programs of 256 threads a multiprocessor: loads of one pass behind another's"


def test_another_width_compiles() -> None:
    check_that_it_fits(compiled(3, 40), SPILLED_BYTES)


def test_other_streams_are_refused() -> None:
    given = shapes(2, 128)
    with pytest.raises(TypeError, match=r"4 streams of torch\.float32; allowed: 4 of torch\.bfloat16"):
        mhc_site.mhc_site_triton(**given | {"streams": given["streams"].float()})
    with pytest.raises(TypeError, match=r"3 streams of torch\.bfloat16; allowed: 4 of"):
        mhc_site.mhc_site_triton(**given | {"streams": given["streams"][:, :3]})


@pytest.mark.parametrize(
    ("streams", "reason"), [(4, None), (2, "hc_mult 2: allowed is 4"), (8, "hc_mult 8: allowed is 4")]
)
def test_models_that_it_computes(streams: int, reason: str | None) -> None:
    text = preset("mini").text_config
    refuses = kernels.mhc_site.backends["triton"].refuses
    assert refuses(dataclasses.replace(text, hc_mult=streams)) == reason


def name_of(line: str) -> str:
    """The instruction, without what it depends on."""
    words = line.split()
    return words[1] if words[0].startswith("@") else words[0]
