"""How the indexer's kernels are launched: reviewed values for a device of 132 processors with 227 KB of shared memory.

Nothing here changes a result.
"""

from __future__ import annotations

import triton

KEYS = 64
"""Keys of a tile. With 256 columns (8 rows of 32 heads) the sums of a product take 128 registers of each of 128
threads; two such programs share a processor, so that one multiplies while the other weighs and appends. Whole pages of
entries fill a tile: 64 is what a page holds at ratio 1."""
WARPS = 4
ROW_REGISTERS = 168
"""Of a thread that scores one row: three programs a processor, as its 32 columns keep the tensor cores less busy than
unpacking keeps the rest. Where blocks are listed too, 255, so that none spills."""
ROWS_AT_ONCE = 4096
"""Rows whose lists are in memory together: 50 MB of lists of entries, 100 MB of blocks, two waves of programs."""
LIST_LENGTHS = 4
"""Length of a list of entries by that of the choice. The longer, the rarer it is shortened: at 2048 places of 512 twice
up to 32,000 entries, and once more each time that there are four times as many."""
BLOCK_LIST_LENGTHS = 2
MOST_ENTRIES = 4096
"""That a row may choose: its list has 16,384 places then, which one program shortens at once."""
MOST_BLOCKS = 8192
"""The same of blocks."""
LEAST_TILES = 8
"""Tiles that are worth a program of their own."""
FAN = 16
"""Lists that are united at once, where their places do not exceed ``UNITED``."""
UNITED = 16384

_SPLITS = ((4096, 1), (2048, 2), (1024, 4), (256, 8), (64, 16), (32, 32), (16, 64), (1, 128))


def splits_for(rows: int, tiles: int) -> int:
    """Programs that share a row's keys, a power of two: about a thousand in all, of contexts of up to ``tiles``."""
    wanted = next(splits for least, splits in _SPLITS if rows >= least)
    worthwhile: int = triton.next_power_of_2(-(-max(tiles, 1) // LEAST_TILES))
    return min(wanted, worthwhile)
