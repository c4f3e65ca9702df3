"""How the kernels of ``mhc_mix`` are cut, by rows: a reviewed table for an H200.

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


def choose_mix_form(rows: int) -> MixForm:
    return next(form for least, form in _FORMS if rows >= least)


def steps_of_part(form: MixForm, rows: int, channels: int) -> int:
    """Steps that a program takes: as few as keep the number of programs at what the form says."""
    tiles = -(-rows // form.rows)
    steps = -(-channels // form.channels)
    return -(-steps // max(1, form.programs // tiles))
