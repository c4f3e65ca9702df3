"""How the kernels of ``attend`` are cut, by shape: a reviewed table, and the number of parts that fills the device.

Reasoned for an H200: each multiprocessor has 227 KiB of shared memory and 65,536 registers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttendForm:
    """One way to run ``attend``."""

    hopper: bool
    """By ``attend_hopper``, for heads in blocks of 64 and 512 channels; else by ``attend_kernels``."""
    heads: int
    """Of one program; a power of two from 16 on, the least height of a product."""
    keys: int
    """Of one tile."""
    warps: int
    stages: int
    """Of Triton's pipeline: tiles under way."""
    resident: int
    """Programs that a multiprocessor holds."""


HOPPER = AttendForm(hopper=True, heads=64, keys=64, warps=8, stages=1, resident=1)
"""64 x 512 F32 sums are half of all registers; keys twice, queries and shares are 200 KiB of shared memory."""
FEW_HEADS = AttendForm(hopper=False, heads=16, keys=32, warps=4, stages=2, resident=2)
"""200 registers a thread: two programs hide each other's waits. More keys a tile would spill."""
MANY_HEADS = AttendForm(hopper=False, heads=32, keys=32, warps=8, stages=2, resident=1)
"""Any other model. 64 heads in one program would spill where entries are packed."""


def choose_attend_form(heads: int, channels: int, hopper: bool) -> AttendForm:
    """heads of ``channels`` each -> the form; ``hopper`` says whether the device has compute capability 9.0."""
    if hopper and heads % HOPPER.heads == 0 and channels == 512:
        return HOPPER
    return FEW_HEADS if heads <= FEW_HEADS.heads else MANY_HEADS


def choose_splits(form: AttendForm, rows: int, heads: int, tiles: int, multiprocessors: int) -> int:
    """Parts of a row's keys: as many as it takes for all programs to be resident at once, and none without a tile."""
    programs = rows * -(-heads // form.heads)
    share = -(-tiles // max(1, form.resident * multiprocessors // programs))
    return -(-tiles // share)
