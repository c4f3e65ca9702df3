"""How the products of ``experts`` are cut on an H200, by the rows that an expert gets on average.

Few rows are a matter of memory: an expert's weights are read once if its rows fit into one tile, and many loads must be
on their way. Many rows are a matter of tensor cores: whole tiles of 128 rows, and small tiles for what is left of an
expert, since a tile costs what its rows cost, whether there are pairs on them or not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one product runs."""

    warps: int
    blocks: int = 1
    """Of 128 columns, read at once: two make whole lines of memory and fewer instructions for each weight."""
    stages: int
    """Of what is read at once: on its way, or in use."""
    programs: int
    """At once on a multiprocessor: registers and shared memory suffice for so many."""
    registers: int | None = None
    """The most that a thread may have, where that makes room for another program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Rows of a tile and how its two products run; the second one gives ``outputs`` channels a tile."""

    rows: int
    gate_and_up: Launch
    down: Launch
    outputs: int


TILES = {
    tile.rows: tile
    for tile in (
        Tile(
            rows=16,
            gate_and_up=Launch(warps=8, blocks=2, stages=3, programs=2, registers=128),
            down=Launch(warps=8, blocks=2, stages=3, programs=2, registers=128),
            outputs=256,
        ),
        Tile(
            rows=32,
            gate_and_up=Launch(warps=8, stages=5, programs=2, registers=128),
            down=Launch(warps=4, stages=4, programs=3, registers=168),
            outputs=128,
        ),
        Tile(
            rows=64,
            gate_and_up=Launch(warps=8, stages=5, programs=1),
            down=Launch(warps=8, stages=5, programs=1),
            outputs=256,
        ),
        Tile(
            rows=128,
            gate_and_up=Launch(warps=8, stages=4, programs=1),
            down=Launch(warps=8, stages=4, programs=1),
            outputs=256,
        ),
    )
}
"""By their rows."""


def choose_tiles(rows: int, top_k: int, experts: int) -> tuple[Tile, Tile | None]:
    """Tiles of a step of R rows, of which each goes to top_k of ``experts``, and those of what is left of an expert.

    The latter are None where an expert's rows seldom fill more than one tile.
    """
    average = rows * top_k / experts
    for largest, tile, tail in ((9, 16, 0), (20, 32, 0), (48, 64, 0), (96, 64, 32)):
        if average <= largest:
            return TILES[tile], TILES[tail] if tail else None
    return TILES[128], TILES[32]
