"""How the kernels of ``mhc_mix`` and ``mhc_site`` are cut, by rows: reviewed tables for an H200.

Every tile of rows reads the whole matrix, 2 MB at true shapes, from the cache: many rows a tile where there are many.
Channels are split where tiles of rows alone do not fill the device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixForm:
    """One way to multiply the streams."""

    rows: int
    """Of one program."""
    channels: int
    """Of one step of it."""
    warps: int
    stages: int
    """Of Triton's pipeline: steps under way."""
    programs: int
    """In all, about."""


_FORMS = (
    (513, MixForm(rows=128, channels=64, warps=8, stages=4, programs=264)),
    (257, MixForm(rows=64, channels=64, warps=4, stages=4, programs=264)),
    (65, MixForm(rows=64, channels=64, warps=4, stages=4, programs=132)),
    (17, MixForm(rows=64, channels=128, warps=4, stages=2, programs=160)),
    (1, MixForm(rows=16, channels=128, warps=4, stages=2, programs=160)),
)
"""By the least number of rows."""
_SITE_FORMS = (
    (65, MixForm(rows=64, channels=32, warps=4, stages=1, programs=160)),
    (17, MixForm(rows=16, channels=64, warps=4, stages=2, programs=160)),
    (0, MixForm(rows=16, channels=32, warps=4, stages=1, programs=160)),
)
"""By the least number of rows; channels are those of each of four streams."""
_ROWS_ALONE = 257
"""From so many rows on, a row a program fills the device."""


def choose_mix_form(rows: int) -> MixForm:
    return next(form for least, form in _FORMS if rows >= least)


def choose_site_form(rows: int) -> MixForm | None:
    """How one pass does all of a site, or None where expansion and products are two."""
    if rows >= _ROWS_ALONE:
        return None
    return next(form for least, form in _SITE_FORMS if rows >= least)


def warps_of_row(rows: int) -> int:
    """Of the program that expands and collapses a row."""
    return 8 if rows >= 1025 else 4


def steps_of_part(form: MixForm, rows: int, channels: int) -> int:
    """Steps that a program takes: as few as keep the number of programs at what the form says."""
    tiles = -(-rows // form.rows)
    steps = -(-channels // form.channels)
    return -(-steps // max(1, form.programs // tiles))
