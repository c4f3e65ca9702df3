"""Triton's interpreter runs ``attend`` and ``commit_window``: python -m tests.kernels.interpreted_attend, with
TRITON_INTERPRET=1.

In F32, since it cannot multiply BF16 and truncates where F32 becomes BF16: indices, masks, tiles, parts and unpacking
are those of the GPU. Prints the largest error of every kind of case, or raises.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import torch
import triton.language as tl

from octavo import kernels
from octavo.kernels.rope import plain_frequencies
from octavo.kernels.storage import packed_entry_bytes, store_entries
from octavo.kernels.triton_backend import attend, attend_kernels, key_places, window
from octavo.kernels.triton_backend.tuning import AttendForm
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import same_bits
from tests.kernels.cases import CASES, Arguments
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.run_interpreted import launch_one_after_another, pretend_to_have_processors

TOLERANCE = 2e-5
"""Of outputs of size one: exponentials and some hundred additions in F32, in another order."""
FORM = AttendForm(hopper=False, heads=16, keys=16, warps=4, stages=1, resident=1)
"""Small tiles: a small model has several, and three heads of it one program or more."""


def main(long_form: bool) -> None:
    key_places._SEARCHED = tl.constexpr(8)  # so that a search takes several rounds here too
    pretend_to_have_processors(40)
    launch_one_after_another((attend_kernels, window), {attend: ("unite_parts",), window: ("commit_rows",)})
    for size, name, rows in (
        (MINI, "attend_window", (1, 19) if long_form else (19,)),
        (MINI, "attend_pairs", (1, 19) if long_form else (1,)),
        (MINI, "attend_tokens", (7,)),
        (WIDE, "attend_pairs", (5,)),
    ):
        errors = [error for given in steps_of(name, size, rows) for error in compare(given)]
        print(f"{size.name} {name}: {len(errors)} calls, {max(errors):.1e}", flush=True)
    check_rows_dealt_to_ranks()
    check_words_of_keys()
    check_far_positions()
    check_rotary_widths(((64, 1), (64, 19), (64, 32), (48, 1), (48, 19), (48, 24)) if long_form else ((48, 19),))
    check_windows()
    print("rows of ranks, far positions and windows agree")


def steps_of(name: str, size: Size, rows: tuple[int, ...]) -> Iterator[Arguments]:
    """Random and ragged steps, no live row, and a mini request longer than a window; with dead rows soiled."""
    case = next(case for case in CASES if case.name == name)
    batches = [random_batch(count, count) for count in rows]
    if size is MINI:
        long = Batch((Request(3, 5, size.window + 3), Request(1, 0, 1), Request(6, 62, 4)), dead=2)
        batches += [long, Batch((), dead=3)]
    for seed, batch in enumerate(batches):
        given = case.arguments(batch, size, torch.float32, seed)
        dead = ~batch.live
        for what in ("query", "latents"):
            given[what][dead] = torch.nan
        given["slots"] = torch.where(dead, -99, given["slots"]).int()
        given["write_slots"] = torch.where(dead, 3, given["write_slots"]).int()
        given["sink"][0] = -torch.inf
        yield given


def compare(given: Arguments) -> Iterator[float]:
    """The largest difference from the reference, whole and in parts, with plain and with packed entries."""
    for arguments in (given, packed(given)) if given["entries"] is not None else (given,):
        expected = kernels.attend(**arguments)
        for splits in (1, 3):
            actual = attend.run(FORM, **arguments, splits=splits)
            error = float((actual - expected).abs().max())
            assert error <= TOLERANCE, f"{splits} parts: off by {error}"
            yield error


def packed(given: Arguments) -> Arguments:
    entries = given["entries"]
    pages, places, channels = entries.shape
    pool = entries.new_zeros(pages, places, packed_entry_bytes(channels), dtype=torch.uint8)
    address = torch.arange(pages).repeat_interleave(places), torch.arange(places).repeat(pages)
    store_entries(pool, *address, entries.flatten(0, 1))
    return given | {"entries": pool}


def check_rows_dealt_to_ranks() -> None:
    """A rank's rows are every third of all; rows in another order are found by a search."""
    given = next(steps_of("attend_pairs", MINI, (19,)))
    whole = attend.run(FORM, **given)
    for rows in (torch.arange(1, 19, 3), torch.arange(18, -1, -1), torch.tensor([17])):
        part = {name: given[name][rows] for name in ("query", "slots", "positions", "selected")}
        torch.testing.assert_close(attend.run(FORM, **given | part), whole[rows], rtol=0, atol=TOLERANCE)


def check_words_of_keys() -> None:
    """Full tiles, holes, and a last tile that places do not fill; words behind the tiles are zero."""
    random = torch.Generator().manual_seed(3)
    for tiles, places in ((4, 128 + 40), (4, 192), (16, 640)):
        held = torch.rand(5, places, generator=random) < torch.tensor([[0.0], [0.5], [0.98], [1.0], [1.0]])
        distances = torch.where(held, torch.randint(-(2**40), 2**40, held.shape, generator=random), -(2**63))
        words = torch.full((5, tiles), 7)
        key_places.key_words[(5,)](distances, words, places, KEYS=64, TILES=tiles)
        bits = torch.nn.functional.pad(held, (0, tiles * 64 - places)).view(5, tiles, 64).long()
        assert torch.equal(words, (bits << torch.arange(64)).sum(2))
        assert words[3:, : places // 64].eq(-1).all()


def check_far_positions() -> None:
    """A million tokens in, with holes in the selection, and a request without rows in this step."""
    size, position = MINI, 2**20 - 3
    random = torch.Generator().manual_seed(0)
    entries = torch.randn(3, 64, size.head_dim, generator=random)
    pages = torch.full((8, 2**14), 1, dtype=torch.int32)
    pages[5, -1] = 2
    chosen = torch.tensor([[0, -1, position, 7, position - 64, -1, 63, -1]] * 2, dtype=torch.int32)
    arguments: Arguments = {
        "query": torch.randn(2, size.heads, size.head_dim, generator=random),
        "latents": torch.randn(2, size.head_dim, generator=random),
        "ring": torch.randn(8, size.window, size.head_dim, generator=random),
        "sink": torch.zeros(size.heads),
        "frequencies": plain_frequencies(size.rotary, 10000.0),
        "slots": torch.tensor([5, 2], dtype=torch.int32),
        "positions": torch.tensor([position, 9], dtype=torch.int32),
        "write_slots": torch.tensor([5, 5], dtype=torch.int32),
        "write_positions": torch.tensor([position - 1, position], dtype=torch.int32),
        "write_starts": torch.tensor([position - 1, position - 1], dtype=torch.int32),
        "page_table": pages,
        "entries": entries,
        "selected": chosen,
    }
    expected = kernels.attend(**arguments)
    for splits in (1, 2):
        torch.testing.assert_close(attend.run(FORM, **arguments, splits=splits), expected, rtol=0, atol=TOLERANCE)


def check_rotary_widths(widths: tuple[tuple[int, int], ...]) -> None:
    """Channels and how many pairs of them turn. 48 channels are padded to 64."""
    random = torch.Generator().manual_seed(1)
    for channels, turning in widths:
        size = dataclasses.replace(MINI, head_dim=channels, rotary=2 * turning)
        for given in steps_of("attend_pairs", size, (5,)):
            given["frequencies"] = torch.rand(turning, generator=random)
            for _ in compare(given):
                pass


def check_windows() -> None:
    """To the bit, of latents and of token classes, of several windows at once and with dead rows."""
    for name in ("commit_window", "commit_history"):
        case = next(case for case in CASES if case.name == name)
        for size in (MINI, WIDE):
            long = Batch((Request(3, 5, 2 * size.window + 3), Request(1, 0, size.window), Request(6, 7, 1)), dead=30)
            for batch in (random_batch(1, 1), random_batch(29, 2), long, Batch((), dead=5)):
                given = case.arguments(batch, size, torch.float32)
                given["write_slots"][~batch.live] = 3
                expected, actual = given["ring"].clone(), given["ring"].clone()
                kernels.commit_window(**given | {"ring": expected})
                window.commit_window_triton(**given | {"ring": actual})
                assert same_bits(actual, expected), (name, size.name, batch.rows)


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
