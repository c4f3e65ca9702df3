"""Triton's interpreter runs ``select``, ``select_candidates`` and ``publish``, with TRITON_INTERPRET=1:
python -m tests.kernels.interpreted_select.

In F32, since it cannot multiply BF16 and truncates where F32 becomes BF16. It has no PTX, so three functions are
replaced by what they mean; indices, masks, lists, splits, ties and quantisers are those of the GPU. Prints what agrees,
or raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from octavo import kernels
from octavo.kernels.numerics import largest
from octavo.kernels.paging import ratio_of
from octavo.kernels.select import best_blocks, candidate_mask, entry_scores, visible_entries
from octavo.kernels.storage import packed_entry_bytes, packed_key_bytes, store_keys
from octavo.kernels.triton_backend import index_products, ranked_lists, select_tuning
from octavo.kernels.triton_backend.publish import publish_triton
from octavo.kernels.triton_backend.select import run
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import call, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, WIDE
from tests.kernels.torch_calls import exactly_scored
from tests.kernels.written_places import assert_nothing_written_beside

BATCHES = (
    random_batch(9, seed=4),
    Batch((Request(3, 37, 9), Request(2, 0, 1)), dead=2),
    Batch((Request(5, 248, 3), Request(0, 190, 1))),
    Batch((), dead=2),
    Batch(()),
)
F32_STEPS = 2e-6
"""Of values of size one: sums, exponentials and turns in F32, in another order."""


def main(long_form: bool) -> None:
    vars(index_products).update(unpack_words=unpack_words, weigh=weigh)
    vars(ranked_lists).update(store_taken=store_taken)
    for lists, least_tiles, fan, batches in (
        ("one list", 8, 16, BATCHES if long_form else BATCHES[1:]),
        ("several lists", 1, 2, BATCHES[2:3]),
    ):
        with mock.patch.multiple(select_tuning, LEAST_TILES=least_tiles, FAN=fan):
            calls = sum(check(case, given) for case, given in arguments(batches))
        print(f"select, {lists} a row: {calls} calls agree", flush=True)
    check_long_contexts()
    print("lists that are shortened agree")
    check_publish()
    print("publish agrees")


def unpack_words(word: Any, exponent: Any) -> Any:
    """Bits of a code, put on the lowest exponent bits of F32, mean 2^126 times less."""
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    codes = [word >> (4 * nibble) for nibble in (0, 4, 1, 5, 2, 6, 3, 7)]
    bits = [((code & 7) << 22) | ((code & 8) << 28) for code in codes]
    return tuple(value.to(tl.float32, bitcast=True) * factor for value in bits)


def weigh(products: Any, w: Any) -> Any:
    """Without the rounding to BF16."""
    return tl.maximum(products, 0.0) * w[None, :]


def store_taken(codes: Any, numbers: Any, at: Any, code: Any, number: Any, taken: Any) -> None:
    tl.store(codes + at, code.to(tl.uint16), mask=taken)
    tl.store(numbers + at, tl.broadcast_to(number[:, None], code.shape), mask=taken)


def arguments(batches: tuple[Batch, ...]) -> Iterator[tuple[Case, Arguments]]:
    for case in CASES:
        if case.operator in (kernels.select, kernels.select_candidates):
            for batch in batches:
                yield case, prepared(case.arguments(batch, MINI, torch.float32), packed=True)
                if batch is BATCHES[1]:
                    yield case, prepared(case.arguments(batch, MINI, torch.float32), packed=False)
                    yield case, prepared(case.arguments(batch, WIDE, torch.float32), packed=True)


def prepared(given: Arguments, packed: bool) -> Arguments:
    """The same with scores that F32 holds exactly, in F32, and keys of one or of a packed pool."""
    short = {n: v.bfloat16() if n in ("query", "weights", "keys") else v for n, v in given.items()}
    exact = exactly_scored(short)
    keys = exact["keys"].float()
    if packed:
        pages, places, channels = keys.shape
        pool = torch.zeros(pages, places, packed_key_bytes(channels), dtype=torch.uint8)
        store_keys(
            pool, torch.arange(pages).repeat_interleave(places), torch.arange(places).repeat(pages), keys.flatten(0, 1)
        )
        keys = pool
    return given | {
        "query": exact["query"].float(),
        "weights": exact["weights"].float(),
        "keys": keys,
        "scale": exact["scale"],
    }


def check(case: Case, given: Arguments) -> int:
    absent: Arguments = {"candidates": None, "top_blocks": 0}
    results = run(**absent | given)
    wanted = judged(given) if "top_blocks" in given else judged(given)[:1]
    for number, (actual, expected) in enumerate(zip(results, wanted, strict=False)):
        assert same_bits(actual, expected), (
            f"{case.name}, {given['query'].shape}: result {number}:\n{actual}\n{expected}"
        )
    return 1


def judged(given: Arguments) -> tuple[Tensor, ...]:
    """Choices by scores that are rounded once: the kernels round to BF16 between steps, in F32 they do not."""
    weights = given["weights"] * given["scale"]
    rest = (given[name] for name in ("keys", "page_table", "slots", "positions"))
    scores = entry_scores(given["query"], weights, *rest).bfloat16().float()
    visible = visible_entries(given["positions"], ratio_of(given["keys"]))
    candidates = given.get("candidates")
    blocks = best_blocks(scores, visible, given.get("top_blocks", 1), given["block_size"])
    if candidates is not None:
        scores = scores.masked_fill(~candidate_mask(candidates, given["block_size"], scores.shape[1]), -torch.inf)
    best = largest(scores, given["top_k"])
    none = torch.iinfo(torch.int32).max
    chosen = best.masked_fill(scores.gather(1, best) == -torch.inf, none).sort(dim=1).values
    chosen = torch.nn.functional.pad(chosen, (0, given["top_k"] - chosen.shape[1]), value=none)
    return chosen.masked_fill(chosen == none, -1).int(), blocks


def check_long_contexts() -> None:
    """Contexts several lists long whose later entries are better, equal or mixed, of both signs; rows alone and
    together, with blocks and within them."""
    pages, heads, channels = 12, 2, 32
    random = torch.Generator().manual_seed(5)
    table = torch.randperm(2 * pages, generator=random).view(2, pages).int()
    entries = torch.arange(pages * 64)
    courses = ((entries // 8, 8), (torch.zeros(pages * 64), 3), ((entries * 37) % 90 - 45, 3))
    positions = torch.tensor([761, 762, -1, 63, 64, 700, -1, -1, 767], dtype=torch.int32)
    slots = torch.tensor([1, 1, -7, 1, 1, 1, 0, 0, 0], dtype=torch.int32)
    for course, least_tiles in courses:
        keys = torch.zeros(2 * pages, 64, channels)
        keys[:, :, 0] = 1.0
        for slot in (0, 1):
            keys[table[slot].long(), :, 1] = course.float().view(pages, 64)
        query = torch.zeros(positions.shape[0], heads, channels)
        query[:, 0, 1], query[:, 1, 1] = 1.0, -1.0
        weights = torch.tensor([[1.0, -1.0]]).repeat(positions.shape[0], 1)
        given: Arguments = {
            "query": query,
            "weights": weights,
            "keys": keys,
            "page_table": table,
            "slots": slots,
            "positions": positions,
            "scale": 1.0,
            "top_k": 12,
            "block_size": 8,
        }
        with mock.patch.object(select_tuning, "LEAST_TILES", least_tiles):
            chosen = run(**given, candidates=None, top_blocks=24)
            for actual, expected in zip(chosen, judged(given | {"top_blocks": 24}), strict=True):
                assert same_bits(actual, expected), (course[:9], actual, expected)
            within = given | {"candidates": chosen[1]}
            actual, _ = run(**within, top_blocks=0)
            assert same_bits(actual, judged(within)[0]), (course[:9], actual)


def check_publish() -> None:
    """F32 values: stored as they are, or in packed pools, where every code must be the reference's."""
    batches = (
        random_batch(29, seed=4),
        Batch((Request(3, 37, 18), Request(1, 5, 2), Request(2, 7, 1)), dead=1),
        Batch((Request(5, 0, 1),)),
        Batch((), dead=3),
        Batch(()),
    )
    for case in (case for case in CASES if case.operator is kernels.publish):
        for size, packed in ((MINI, False), (WIDE, False), (WIDE, True)):
            for batch in batches:
                given = case.arguments(batch, size, torch.float32)
                if packed and given["pending"] is not None:
                    continue  # the reference rounds pairs to BF16 for a packed pool
                if packed:
                    for name, width in (("entries", packed_entry_bytes), ("keys", packed_key_bytes)):
                        pages, places, channels = given[name].shape
                        given[name] = torch.zeros(pages, places, width(channels), dtype=torch.uint8)
                expected = call(case.operator, given).state
                actual: Arguments = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
                publish_triton(**actual)
                assert_nothing_written_beside(batch, given, actual, case.name)
                for name, value in expected.items():
                    if packed or name == "pending":
                        assert same_bits(actual[name], value), (case.name, name)
                    else:
                        torch.testing.assert_close(actual[name], value, rtol=F32_STEPS, atol=F32_STEPS)


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
