"""How the products of ``experts`` are cut on an H200, by the rows that an expert gets on average.

Few rows are a matter of memory: an expert's weights are read once if its rows fit into one tile, and many loads must be
on their way. Of a few rows, one or two experts' weights are all that is read, and tiles must be so small that these
occupy the whole device. Many rows are a matter of tensor cores, which must not wait while weights are decoded.

Narrow tiles (``expert_narrow_kernel``) take widths of whole blocks of 128 alone, wide ones (``expert_wide_kernel``)
those that are multiples of 256 too; for others there are the tiles of ``expert_products``.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """A wide tile: two forms of a kernel, by its rows."""

    rows: int
    stages: int
    """Blocks of 128 columns: on their way, or in use."""
    registers: int
    """Of a thread that multiplies; twice this for 128 rows, four times for 64, leave some of 512."""


WIDE_TILES = (
    (84, Wide(rows=64, stages=5, registers=112)),
    (float("inf"), Wide(rows=128, stages=3, registers=232)),
)
"""The most rows of an expert on average, and their tiles."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow:
    """A narrow tile, and how both of its products run."""

    rows: int
    outputs: int
    """Of a tile, at least 16 for each warp."""
    warps: int
    stages: int
    """Steps of 256 columns: on their way, or in use."""
    programs: int
    """At once on a multiprocessor: registers and shared memory suffice for so many."""
    registers: int | None = None
    """The most that a thread may have, where that makes room for another program."""


WHOLE = 128
"""Columns of a block (``expert_routing``): widths of narrow tiles are multiples of it, of wide ones of twice that."""
NARROW = (
    (0.125, Narrow(rows=8, outputs=32, warps=2, stages=4, programs=6)),
    (4, Narrow(rows=8, outputs=64, warps=4, stages=2, programs=7, registers=72)),
    (13, Narrow(rows=16, outputs=64, warps=2, stages=2, programs=6)),
)
"""The most rows of an expert on average, and their tiles. Of very few rows, few experts' weights are read at all: small
tiles occupy the device, and more of each is on its way."""
MOST_SCORED = 128
"""Rows of a step up to which the router's product is one kernel with the rounding of rows. Beyond, and with wide tiles,
it is a library's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FewRows:
    """How the products of a few rows run (``expert_few_kernels``): nearly all of it is waiting for weights."""

    rows: int
    """The most of a step. A tile has 16 columns, some for each part: of one row in 8 parts half of them are empty."""
    gate_and_up: int
    """Parts that the inputs of a tile are split into; times ``rows`` no more than 16, the columns of a tile."""
    down: int
    """The same of the second product, where each row stands for itself."""


PLACES = 64
"""Weight rows of a tile: channels times parts. 16 for each of four warps."""
FEW = Launch(warps=4, stages=3, programs=3)
"""Of the products of a few rows; that of ``down_and_sum`` has a program for each tile, however many fit."""
FEW_ROWS = (
    FewRows(rows=1, gate_and_up=8, down=4),
    FewRows(rows=4, gate_and_up=4, down=4),
)
"""More rows are put in order of their experts."""


def choose_few(rows: int) -> FewRows | None:
    """None where R rows are not few."""
    return next((form for form in FEW_ROWS if rows <= form.rows), None)


def choose_tiles(rows: int, top_k: int, experts: int, widths: tuple[int, int], hopper: bool) -> Narrow | Wide | Tile:
    """Tiles of a step of R rows, of which each goes to top_k of ``experts``; widths of a row and of an expert's inner
    one. Wide tiles need Hopper itself, not a newer GPU."""
    average = rows * top_k / experts
    if not any(width % WHOLE for width in widths):
        for most, narrow in NARROW:
            if average <= most:
                return narrow
        if hopper and not any(width % (2 * WHOLE) for width in widths):
            return next(wide for most, wide in WIDE_TILES if average <= most)
    return next((TILES[tile] for most, tile in ((9, 16), (20, 32), (96, 64)) if average <= most), TILES[128])
