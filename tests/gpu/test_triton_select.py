"""Backend ``triton`` of ``select``, ``select_candidates`` and ``publish`` on a device.

Choices are compared where every score has one answer, so that they must agree to the bit; else loosely.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.choice import choose_backends
from octavo.kernels.quantise import round_q4mx
from octavo.kernels.storage import packed_key_bytes, store_keys
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, call, mutated, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, TRUE, WIDE, Size
from tests.kernels.torch_calls import arguments_of, exactly_scored, on_device, poisoned
from tests.kernels.written_places import assert_nothing_written_beside

if torch.cuda.is_available():  # elsewhere these tests are skipped, and the backend is not to be registered
    from octavo.kernels.triton_backend.publish import publish_triton
    from octavo.kernels.triton_backend.select import select_candidates_triton, select_triton

SELECTING = [case for case in CASES if case.operator in (kernels.select, kernels.select_candidates)]
PUBLISHING = [case for case in CASES if case.operator is kernels.publish]
BATCHES = {
    "mixed": random_batch(96, seed=4),
    "one prompt": Batch((Request(3, 37, 150),), dead=3),
    "one row each": Batch(tuple(Request(slot, 25 * slot + 3, 1) for slot in (4, 0, 6, 1, 7, 3, 2, 5)), dead=3),
    "one row": Batch((Request(5, 250, 1),)),
    "dead": Batch((), dead=9),
    "none": Batch(()),
}
SHARE_THAT_DIFFERS = 0.01
"""Of choices: sums in another order move a score by a BF16 step, and one in some hundred lies at the edge."""
every_shape = pytest.mark.parametrize(
    ("size", "packed"),
    ((MINI, True), (WIDE, False), (WIDE, True), (TRUE, False), (TRUE, True)),
    ids=lambda value: value.name if isinstance(value, Size) else "packed" if value else "plain",
)
every_storage = pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))


def results_of(case: Case, given: Arguments) -> tuple[Tensor, ...]:
    results = case.operator.backends["triton"].overload(**given)
    return results if isinstance(results, tuple) else (results,)


def test_it_is_what_runs() -> None:
    chosen = choose_backends("fast", "cuda")
    assert {chosen[name] for name in ("select", "select_candidates", "publish")} == {"triton"}


@pytest.mark.parametrize("case", SELECTING, ids=lambda case: case.name)
@every_shape
def test_choices_are_the_references(case: Case, size: Size, packed: bool) -> None:
    for name, batch in BATCHES.items():
        given = exactly_scored(arguments_of(case, batch, size, packed))
        actual = Outcome(tuple(r.cpu() for r in results_of(case, on_device(given, "cuda"))), {})
        assert_same(actual, call(case.operator, given), name)


@pytest.mark.parametrize("case", SELECTING, ids=lambda case: case.name)
def test_dead_rows_and_foreign_keys_may_hold_anything(case: Case) -> None:
    batch = Batch((Request(5, 70, 9), Request(2, 0, 6), Request(1, 33, 2)), dead=9)
    given = exactly_scored(arguments_of(case, batch, WIDE))
    keys, table = given["keys"], given["page_table"]
    soiled = torch.full_like(keys, torch.nan)
    for request in batch.requests:
        for entry in range((request.start + request.count) * keys.shape[1] // 64):
            place = table[request.slot, entry // keys.shape[1]].long(), entry % keys.shape[1]
            soiled[place] = keys[place]
    expected = call(case.operator, given).results
    for slot in (-99, 5):
        changed = on_device(poisoned(case, given | {"keys": soiled}, slot), "cuda")
        assert_same(
            Outcome(tuple(r.cpu() for r in results_of(case, changed)), {}), Outcome(expected, {}), f"slot {slot}"
        )


def indexer(positions: list[int], slots: list[int], ratio: int, seed: int, exact: bool = True) -> dict[str, Any]:
    """The released indexer on packed keys, a request in each slot, contexts as long as the positions say."""
    random = torch.Generator("cuda").manual_seed(seed)
    rows, entries = len(positions), 64 // ratio
    requests = max(slots) + 1
    pages = -(-(max(positions) + 1) // 64)
    table = torch.randperm(requests * pages, device="cuda", generator=random).view(requests, pages).int()
    keys = torch.empty(requests * pages, entries, packed_key_bytes(128), dtype=torch.uint8, device="cuda")
    number = torch.arange(entries, device="cuda")
    for low in range(0, requests * pages, 2048):
        page = torch.arange(low, min(low + 2048, requests * pages), device="cuda")
        values = torch.randn(page.shape[0] * entries, 128, device="cuda", generator=random).to(torch.bfloat16)
        store_keys(keys, page.repeat_interleave(entries), number.repeat(page.shape[0]), values)
    query = torch.randn(rows, 32, 128, device="cuda", generator=random).to(torch.bfloat16)
    weights = torch.randn(rows, 32, device="cuda", generator=random).to(torch.bfloat16)
    given = {
        "query": round_q4mx(query),
        "weights": weights,
        "keys": keys,
        "page_table": table,
        "slots": torch.tensor(slots, dtype=torch.int32, device="cuda"),
        "positions": torch.tensor(positions, dtype=torch.int32, device="cuda"),
        "scale": 64**-1,
    }
    return exactly_scored(given) if exact else given


LONG: dict[str, tuple[list[int], list[int], int]] = {
    "decode": ([3, 600, 5000, 33_333, 0, 511, 512, 20_479, 65_535], list(range(9)), 1),
    "prefill": (list(range(40_000, 40_061)), [0] * 61, 1),
    "prefill of pairs": (list(range(70_001, 70_042)), [0] * 41, 2),
    "two prompts that meet in a group": ([*range(30_000, 30_013), *range(511, 530)], [0] * 13 + [1] * 19, 1),
    "a million": ([1_000_001], [0], 1),
}


@pytest.mark.parametrize("name", LONG)
def test_long_contexts(name: str) -> None:
    """To the bit as the backend torch; then within the candidate blocks of this very call."""
    positions, slots, ratio = LONG[name]
    given = indexer(positions, slots, ratio, seed=len(name))
    chosen = select_candidates_triton(**given, top_k=512, top_blocks=2048, block_size=8)
    expected = kernels.select_candidates.backends["torch"].overload(**given, top_k=512, top_blocks=2048, block_size=8)
    for what, actual, wanted in zip(("entries", "blocks"), chosen, expected, strict=True):
        wrong = (actual != wanted).any(1).nonzero().flatten().tolist()
        assert not wrong, f"{what} of rows {wrong[:9]}: {difference(actual[wrong[0]], wanted[wrong[0]])}"
    rest: Arguments = {"top_k": 512, "block_size": 8}
    for candidates in (expected[1], None):
        actual = select_triton(**given, candidates=candidates, **rest)
        wanted = kernels.select.backends["torch"].overload(**given, candidates=candidates, **rest)
        wrong = (actual != wanted).any(1).nonzero().flatten().tolist()
        assert not wrong, (
            f"within {candidates is not None}: {wrong[:9]}: {difference(actual[wrong[0]], wanted[wrong[0]])}"
        )


def difference(actual: Tensor, expected: Tensor) -> str:
    mine, theirs = set(actual.tolist()), set(expected.tolist())
    more, less = sorted(mine - theirs), sorted(theirs - mine)
    return f"{len(more)} too many {more[:5]}, {len(less)} missing {less[:5]}"


def test_scores_of_any_size() -> None:
    """Not exact: nearly all choices are the backend torch's."""
    given = indexer([*range(20_000, 20_040), 9_000, 17_000], [0] * 40 + [1, 2], 1, seed=3, exact=False)
    actual = select_triton(**given, candidates=None, top_k=512, block_size=8)
    expected = kernels.select.backends["torch"].overload(**given, candidates=None, top_k=512, block_size=8)
    differing = sum(len(set(a) - set(b)) for a, b in zip(actual.tolist(), expected.tolist(), strict=True))
    assert differing <= SHARE_THAT_DIFFERS * actual.numel(), f"{differing} of {actual.numel()}"


def test_equal_scores_go_to_the_lower_entry() -> None:
    given = indexer([*range(30_000, 30_016), 29_999], [0] * 16 + [1], 1, seed=4)
    given["query"].zero_()
    selected, blocks = select_candidates_triton(**given, top_k=512, top_blocks=2048, block_size=8)
    assert (selected == torch.arange(512, device="cuda")).all()
    newest = given["positions"] // 8
    assert (blocks[:, :-1] == torch.arange(2047, device="cuda")).all() and (blocks[:, -1] == newest).all()


def test_replay_on_other_inputs_equals_eager() -> None:
    """Of choices at other positions, slots and queries, none of them live in one step."""
    steps = [
        indexer([*range(9_000, 9_016), 4000, 100], [0] * 16 + [1, 2], 1, seed=1),
        indexer(
            [3, 600, 5000, 8_999, 0, 511, 512, 20, *[8_000] * 10], [2, 1, 0, 1, 2, 0, 1, 2, *[0, 1] * 5], 1, seed=2
        ),
    ]
    steps.append(steps[0] | {"positions": torch.full_like(steps[0]["positions"], -1)})
    static: Arguments = {n: v.clone() if isinstance(v, Tensor) else v for n, v in steps[0].items()}
    for step in steps:  # pools of one size
        step["keys"] = steps[0]["keys"]
        step["page_table"] = steps[0]["page_table"]
    rest: Arguments = {"top_k": 512, "top_blocks": 300, "block_size": 8}
    select_candidates_triton(**static, **rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = select_candidates_triton(**static, **rest)
    for number, step in enumerate(steps):
        for name, value in step.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        expected = select_candidates_triton(**step, **rest)
        for actual, wanted in zip(chosen, expected, strict=True):
            assert same_bits(actual, wanted), f"step {number}"


@pytest.mark.parametrize("case", PUBLISHING, ids=lambda case: case.name)
@every_shape
def test_publish_is_nearly_the_references(case: Case, size: Size, packed: bool) -> None:
    """A sum in another order moves a rounding now and then: as the backend torch, one number in a hundred at most."""
    for name, batch in BATCHES.items():
        given = arguments_of(case, batch, size, packed)
        expected = call(case.operator, given).state
        copies = on_device(given, "cuda")
        actual: Arguments = {n: v.clone() if isinstance(v, Tensor) else v for n, v in copies.items()}
        publish_triton(**actual)
        for pool, value in expected.items():
            written = int((value != given[pool]).sum())
            wrong = int((actual[pool].cpu() != value).sum())
            assert wrong <= written / 100, f"{name}: {pool}: {wrong} of {written}"
        if given["pending"] is not None:
            assert same_bits(actual["pending"].cpu(), expected["pending"]), name


@pytest.mark.parametrize("case", PUBLISHING, ids=lambda case: case.name)
@every_storage
def test_publish_replays_and_writes_nothing_for_dead_rows(case: Case, packed: bool) -> None:
    steps = (random_batch(29, seed=2), Batch((Request(7, 63, 29),)), Batch((), dead=29), random_batch(29, seed=5))
    static = on_device(poisoned(case, arguments_of(case, steps[0], packed=packed), -99), "cuda")
    warm: Arguments = {n: v.clone() if isinstance(v, Tensor) else v for n, v in static.items()}
    publish_triton(**warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        publish_triton(**static)
    for seed, batch in enumerate(steps):
        given = on_device(poisoned(case, arguments_of(case, batch, packed=packed, seed=seed), -99), "cuda")
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        eager: Arguments = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
        publish_triton(**eager)
        for name in mutated(case.operator):
            if given[name] is not None:
                assert same_bits(static[name], eager[name]), f"step {seed}: {name}"
        assert_nothing_written_beside(batch, given, eager, f"step {seed}")
