"""The kernels of ``attend`` and ``commit_window`` compile for an H200 at true shapes, use its tensor cores, and fit."""

from __future__ import annotations

import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import attend, window
    from octavo.kernels.triton_backend.tuning import HOPPER, AttendForm, choose_attend_form, choose_splits
    from tests.kernels.compiled_launches import (
        MULTIPROCESSORS,
        Launched,
        check_dependence,
        check_that_it_fits,
        launches_compiled,
        loops_with,
    )

SPILLED_BYTES = 128
"""Of parts of rows on Hopper with packed entries: some thirty addresses that no loop changes. Others spill nothing."""
SPILLED_BY_ROWS = 32
"""Of whole rows with packed entries, in the group of warps that unpacks them: some eight addresses."""
SLOW_ANGLES = 32
"""Of ``place_keys``: the digits of an angle above a hundred thousand, by which it is reduced. Nothing else."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def shapes(
    rows: int,
    heads: int,
    channels: int,
    window: int,
    top_k: int,
    packed: bool,
    ratio: int,
    share: int = 1,
    turning: int = 32,
) -> dict[str, Any]:
    number = torch.int32
    pool = (
        empty(9, 64 // ratio, channels // 2 + channels // 16, dtype=torch.uint8)
        if packed
        else empty(9, 64 // ratio, channels)
    )
    return {
        "query": empty(rows, heads, channels),
        "latents": empty(share * rows, channels),
        "ring": empty(4, window, channels),
        "sink": empty(heads, dtype=torch.float32),
        "frequencies": empty(turning, dtype=torch.float32),
        "slots": empty(rows, dtype=number),
        "positions": empty(rows, dtype=number),
        **{f"write_{name}": empty(share * rows, dtype=number) for name in ("slots", "positions", "starts")},
        "page_table": empty(4, 16384, dtype=number),
        "entries": pool if top_k else None,
        "selected": empty(rows, top_k, dtype=number) if top_k else None,
    }


def compiled(form: AttendForm, **arguments: Any) -> list[Launched]:
    with launches_compiled() as launched:
        attend.run(form, **arguments)
    return launched


def fits(launched: list[Launched], stack_bytes: int = 0) -> None:
    check_that_it_fits(launched[:1], SLOW_ANGLES)
    check_that_it_fits(launched[1:], stack_bytes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))
def test_parts_of_rows(packed: bool) -> None:
    """One row of the released model in ten parts; scores and values by wgmma, none of it serialised."""
    form = choose_attend_form(64, 512, hopper=True)
    assert form is HOPPER
    launched = compiled(form, **shapes(1, 64, 512, 128, 512, packed, ratio=2))
    assert [one.kernel for one in launched] == ["place_keys", "attend_part_hopper", "unite_parts"]
    assert launched[1].programs == (1, 1, 10)
    check_dependence(launched[2], "unite_parts", waits=True, lets_start=True)
    fits(launched, SPILLED_BYTES if packed else 0)
    loops = loops_with(launched[1], "HGMMA")
    assert len(loops) == (2 if packed else 1)
    for loop in loops:
        # 32 steps of 16 channels for the scores, 4 of 16 keys for the values: none twice.
        assert sum("HGMMA" in line for line in loop) == 36
    check_copies(launched[1], packed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))
@pytest.mark.parametrize("rows", (67, 8192))
def test_whole_rows(rows: int, packed: bool) -> None:
    """Many rows of the released model: as many programs as processors, of two groups of warps that multiply."""
    launched = compiled(HOPPER, **shapes(rows, 64, 512, 128, 512, packed, ratio=2))
    assert [one.kernel for one in launched] == ["place_keys", "key_words", "attend_rows_hopper"]
    kernel = launched[2]
    assert (kernel.programs, kernel.threads) == ((min(rows, MULTIPROCESSORS), 1), 384)
    fits(launched, SPILLED_BY_ROWS if packed else 0)
    loops = loops_with(kernel, "HGMMA")
    assert len(loops) == 2
    for loop in loops:
        # Of a pair of tiles: the scores of one, the values of both, in half of the channels.
        assert sum("HGMMA" in line for line in loop) == 32 + 2 * 4
        # Products that ptxas serialises would be awaited one by one.
        assert sum("WARPGROUP.DEPBAR" in line for line in loop) == 3
        # Addresses of operands are computed in uniform registers: from others it would take two of these for each.
        assert sum("R2UR" in line for line in loop) <= 8
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in loop)
    check_copies(kernel, packed)


def check_copies(kernel: Launched, packed: bool) -> None:
    """16 bytes a thread at a time: keys that are copied, and what 16 bytes of codes in eight rows become."""
    copies = [line for line in kernel.machine_code if re.search(r"\bLDGSTS\b", line)]
    assert copies and all(".128" in line for line in copies)
    if packed:
        assert sum(".128" in line for line in kernel.machine_code if "STS" in line) >= 32


@pytest.mark.parametrize(
    ("heads", "top_k", "turning"), ((128, 512, 32), (64, 0, 32), (64, 512, 37)), ids=("heads", "window", "rotary")
)
def test_what_whole_rows_were_not_measured_on(heads: int, top_k: int, turning: int) -> None:
    launched = compiled(HOPPER, **shapes(8192, heads, 512, 128, top_k, False, ratio=1, turning=turning))
    assert [one.kernel for one in launched] == ["place_keys", "attend_part_hopper"]
    fits(launched)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))
@pytest.mark.parametrize(
    ("heads", "channels", "window", "top_k", "hopper"),
    ((8, 512, 128, 512, True), (8, 96, 64, 64, True), (64, 512, 128, 512, False), (40, 256, 100, 70, True)),
    ids=("eight heads of a rank", "nano", "another device", "odd sizes"),
)
def test_other_models(heads: int, channels: int, window: int, top_k: int, hopper: bool, packed: bool) -> None:
    form = choose_attend_form(heads, channels, hopper)
    assert not form.hopper
    launched = compiled(form, **shapes(3, heads, channels, window, top_k, packed, ratio=1, share=2))
    assert [one.kernel for one in launched] == ["place_keys", "attend_part", "unite_parts"]
    fits(launched)
    assert any("HMMA" in line for line in launched[1].machine_code)


@pytest.mark.parametrize("turning", (1, 37, 256))
def test_any_rotary_width(turning: int) -> None:
    """Pairs of channels: one, some that fill no block of 64 channels, and all."""
    fits(compiled(HOPPER, **shapes(1, 64, 512, 128, 512, False, ratio=2, turning=turning)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int64), ids=("latents", "classes"))
def test_windows(dtype: torch.dtype) -> None:
    number = torch.int32
    width = (512,) if dtype is torch.bfloat16 else ()
    with launches_compiled() as launched:
        window.commit_window_triton(
            empty(4, 128, *width, dtype=dtype), empty(300, *width, dtype=dtype), *[empty(300, dtype=number)] * 2
        )
    assert [one.kernel for one in launched] == ["commit_rows"]
    check_that_it_fits(launched)
    check_dependence(launched[0], "commit_rows", waits=True, lets_start=True)
    if dtype is torch.bfloat16:
        assert any(re.search(r"STG\.E\.128", line) for line in launched[0].machine_code), "16 bytes a thread"


def test_parts_fill_the_device() -> None:
    """Of ten tiles: no part is empty, and programs are resident together as long as rows are few."""
    counts = (1, 8, 13, 16, 32, 64, 66, 67, 128, 8192)
    splits = {rows: choose_splits(HOPPER, rows, 64, 10, MULTIPROCESSORS) for rows in counts}
    assert splits == {1: 10, 8: 10, 13: 10, 16: 5, 32: 4, 64: 2, 66: 2, 67: 1, 128: 1, 8192: 1}
    assert choose_splits(HOPPER, 8, 64, 10, multiprocessors=16) == 2, "of a smaller device"


def test_the_device_is_asked_for_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    given = shapes(8, 64, 512, 128, 512, True, ratio=2)
    with launches_compiled() as launched:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=16)
        )
        attend.run(HOPPER, **given)
    assert launched[1].programs == (8, 1, 2)


@pytest.mark.parametrize("name", ("query", "latents", "ring", "entries"))
def test_what_cannot_be_copied_16_bytes_at_a_time_is_refused(name: str) -> None:
    given = shapes(3, 64, 512, 128, 512, False, ratio=2)
    tensor = given[name]
    beside = empty(tensor.numel() + 1)[1:].view_as(tensor)
    with pytest.raises(ValueError, match=rf"attend, backend triton: {name} begins at .* multiples of 16 bytes"):
        attend.run(HOPPER, **given | {name: beside})
