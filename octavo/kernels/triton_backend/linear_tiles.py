"""How products with F8 weights are cut on an H200, by the rows of a step.

Few rows are a matter of memory: a weight is read once, enough programs must be resident at once for all of a device's
memory to be busy, and matrices with few outputs are split over their inputs for that. Many rows are a matter of tensor
cores: there the library multiplies, with weights in BF16 that are held, or made for one product. Where they are held it
multiplies sooner.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a product runs that reads F8 weights."""

    rows: int
    """Of a tile; dead ones cost as much as others."""
    outputs: int
    """Of a tile, a multiple of 16 for each warp."""
    warps: int
    blocks: int = 1
    """Of 128 inputs, read at once."""
    stages: int
    """Of what is read at once: on its way, or in use."""
    programs: int
    """At once on a multiprocessor: registers and shared memory suffice for so many."""
    prepared: bool
    """Rows are rounded and put in order by a kernel before, once, instead of by every program."""


Table = tuple[tuple[int, Launch], ...]
"""The most rows of a step, and how a product of so many rows runs. Beyond the last the library multiplies."""

FOR_NARROW: Table = (
    (16, Launch(rows=16, outputs=128, warps=8, stages=3, programs=2, prepared=False)),
    (32, Launch(rows=32, outputs=128, warps=8, stages=3, programs=2, prepared=True)),
    (64, Launch(rows=64, outputs=64, warps=4, stages=4, programs=2, prepared=True)),
    (128, Launch(rows=128, outputs=128, warps=8, stages=4, programs=1, prepared=True)),
)
FOR_WIDE: Table = (
    *FOR_NARROW[:2],
    (64, Launch(rows=64, outputs=128, warps=8, stages=3, programs=2, prepared=True)),
    (256, Launch(rows=128, outputs=256, warps=8, stages=4, programs=1, prepared=True)),
)
"""Matrices with more outputs than ``_NARROW``."""
FOR_TWO: Table = (
    *FOR_NARROW[:1],
    (32, Launch(rows=32, outputs=128, warps=8, stages=3, programs=1, prepared=True)),
    (64, Launch(rows=64, outputs=128, warps=8, stages=4, programs=1, prepared=True)),
    *FOR_NARROW[3:],
)
"""Two matrices on the same rows."""
_NARROW = 16384
"""Outputs up to which a matrix has too few tiles to fill the device."""
_BESIDE_HELD = 64
"""Rows up to which F8 weights are read although they are held in BF16 too: half the bytes are the shorter way."""
_LEAST_BLOCKS = 2
"""Of 128 inputs that a program gets: with fewer, its start costs more than its share of the sum."""


def choose_launch(rows: int, outputs: int, held: bool = False) -> Launch | None:
    """For one matrix, which may be ``held`` in BF16 too; None where the library multiplies."""
    return _launch(FOR_NARROW if outputs <= _NARROW else FOR_WIDE, rows, held)


def choose_launch_of_two(rows: int, held: bool = False) -> Launch | None:
    """The same for two matrices."""
    return _launch(FOR_TWO, rows, held)


def choose_share(launch: Launch, tiles: int, blocks: int, multiprocessors: int) -> int:
    """Blocks of 128 inputs that a program gets, if there are so many tiles of ``blocks``: fewer, until as many programs
    are there as can be resident at once."""
    splits = max(1, launch.programs * multiprocessors // tiles)
    share = max(_LEAST_BLOCKS, -(-blocks // splits))
    return min(-(-share // launch.blocks), -(-blocks // launch.blocks)) * launch.blocks


def _launch(table: Table, rows: int, held: bool) -> Launch | None:
    if held and rows > _BESIDE_HELD:
        return None
    return next((launch for most, launch in table if rows <= most), None)
