"""The indexer: golden scores, choices and blocks, and its rules one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.rope import yarn_frequencies
from octavo.kernels.select import best_blocks, candidate_mask, entry_scores, visible_entries
from tests.conftest import ReportCount
from tests.kernels.batches import Batch, Request, page_table, random_batch
from tests.kernels.calls import call, same_bits
from tests.kernels.cases import CASES, EPSILON, Arguments, Case
from tests.kernels.draw import MINI, Draw
from tests.kernels.goldens import mini_pair, mini_weights, tensors

UNIT = tensors("kernels")
STAGE = {name.removeprefix("p37."): t for name, t in tensors("prefill_ref").items() if name.startswith("p37.")}
SELECTING = [case for case in CASES if case.operator in (kernels.select, kernels.select_candidates)]
every_case = pytest.mark.parametrize("case", SELECTING, ids=lambda case: case.name)
MINI_SCALE = (64 * 8) ** -0.5


def test_golden_candidate_blocks() -> None:
    """Three blocks of four; the newest block counts whatever its score."""
    blocks = best_blocks(UNIT["candidates.scores"], UNIT["candidates.visible"], 3, 4)
    assert blocks[0].tolist() == [0, -1, -1]
    assert same_bits(candidate_mask(blocks, 4, 23), UNIT["candidates.mask_k3_b4"])


@pytest.mark.parametrize(("layer", "source"), [(2, 2), (4, 4), (6, 6), (8, 6)])
def test_golden_scores_and_choices(layer: int, source: int) -> None:
    """Every index source of the mini model, from its golden attention input and the golden keys of its KV source."""
    query, weights = index_inputs(layer)
    pool, table = one_request(STAGE[f"index_k.{source}"], 32 if source < 6 else 64)
    positions, slots = torch.arange(37, dtype=torch.int32), torch.zeros(37, dtype=torch.int32)
    scores = entry_scores(query, weights * MINI_SCALE, pool, table, slots, positions)
    expected = STAGE[f"index.{layer}.score"]
    seen = expected > -torch.inf
    assert same_bits(scores[seen], expected[seen])
    assert layer == 8 or bool((scores[~seen] == -torch.inf).all())

    rest = (pool, table, slots, positions)
    if layer == 6:
        selected, candidates = kernels.select_candidates(query, weights, *rest, MINI_SCALE, 8, 3, 4)
        assert same_bits(candidate_mask(candidates, 4, 37), STAGE["candidate.6.mask"])
    else:
        restriction = blocks_of(STAGE["candidate.6.mask"], 3, 4) if layer == 8 else None
        selected = kernels.select(query, weights, *rest, restriction, MINI_SCALE, 8, 4)
    assert same_bits(selected, STAGE[f"index.{layer}.selected"])


@pytest.mark.parametrize("ratio", (1, 2))
def test_entries_are_visible_when_their_group_is_complete(ratio: int) -> None:
    """Ratio 2: positions 0 to 4 see 0, 1, 1, 2, 2 entries. Fewer than ``top_k``: all of them are chosen, then -1."""
    positions = torch.arange(-1, 130, dtype=torch.int32)
    visible = visible_entries(positions, ratio).tolist()
    assert visible[:6] == {1: [0, 1, 2, 3, 4, 5], 2: [0, 0, 1, 1, 2, 2]}[ratio]
    draw = Draw(Batch(()), MINI, torch.bfloat16, seed=2)
    rows = positions.shape[0]
    query, weights = draw.normal(rows, 8, 64, dtype=torch.bfloat16), draw.normal(rows, 8, dtype=torch.bfloat16)
    slots = torch.full((rows,), 3, dtype=torch.int32)
    selected = kernels.select(query, weights, draw.pool(ratio, 64), page_table(), slots, positions, None, 0.1, 140, 4)
    for row, count in zip(selected.tolist(), visible, strict=True):
        assert row == [*range(count), *[-1] * (140 - count)]


def test_ties_go_to_the_lower_entry() -> None:
    """A zero query scores every entry alike, and so do its blocks: the first ones are taken, and the newest block."""
    draw = Draw(Batch((Request(1, 90, 1),)), MINI, torch.bfloat16, seed=2)
    query, weights = torch.zeros(1, 8, 64, dtype=torch.bfloat16), draw.rows(8)
    rest = (draw.pool(1, 64), page_table(), draw.batch.slots, draw.batch.positions)
    selected, candidates = kernels.select_candidates(query, weights, *rest, 0.1, 5, 3, 8)
    assert selected.tolist() == [[0, 1, 2, 3, 4]]
    assert candidates.tolist() == [[0, 1, 11]]
    allowed = torch.tensor([[2, 5, -1]], dtype=torch.int32)
    selected = kernels.select(query, weights, *rest, allowed, 0.1, 10, 8)
    assert selected.tolist() == [[16, 17, 18, 19, 20, 21, 22, 23, 40, 41]]


def test_newest_block_is_forced_in() -> None:
    """Entries 0 to 19 score by place, highest first; entry 20, alone in block 5, scores least and still counts."""
    scores = torch.arange(21, 0, -1.0).view(1, 21)
    assert best_blocks(scores, torch.tensor([21]), 2, 4).tolist() == [[0, 5]]
    assert best_blocks(scores[:, :20], torch.tensor([20]), 2, 4).tolist() == [[0, 4]]
    assert best_blocks(scores, torch.tensor([21]), 9, 4).tolist() == [[0, 1, 2, 3, 4, 5, -1, -1, -1]]
    nothing = torch.full((1, 21), -torch.inf)
    assert best_blocks(nothing, torch.tensor([0]), 2, 4).tolist() == [[-1, -1]]


def test_choice_is_restricted_to_candidates() -> None:
    """Fewer visible candidate entries than ``top_k``: -1, never an entry outside (spec/model.md 7)."""
    arguments = arguments_of("select_restricted", random_batch(96, seed=4))
    selected = kernels.select(**arguments)
    for row, blocks, position in zip(
        selected.tolist(), arguments["candidates"].tolist(), arguments["positions"].tolist(), strict=True
    ):
        entries = {4 * b + i for b in blocks if b >= 0 for i in range(4)} & set(range(position + 1))
        chosen = [entry for entry in row if entry >= 0]
        assert set(chosen) <= entries
        assert len(chosen) == min(8, len(entries))


@every_case
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("reference", "plain"))
def test_against_a_judge_row_by_row(case: Case, dtype: torch.dtype, report_count: ReportCount) -> None:
    """Exact sums rounded at the named places, entries and blocks sorted by (score, lower index).

    ``plain`` compares the same way: its F32 rounding of an exact product has one answer too.
    """
    arguments = case.arguments(random_batch(24, seed=7), MINI, dtype)
    scored = (arguments["query"], arguments["weights"] * arguments["scale"])
    scores = entry_scores(*scored, *(arguments[name] for name in ("keys", "page_table", "slots", "positions")))
    results = call(case.operator, arguments).results
    for row in range(24):
        expected = judged_scores(arguments, row)
        assert scores[row].tolist() == expected + [-math.inf] * (scores.shape[1] - len(expected))
        choices = judged_choices(arguments, row, expected)
        assert [result[row].tolist() for result in results] == choices[: len(results)]
    report_count("rows of the indexer against the judge", 24)


@every_case
def test_keys_that_no_row_may_see_can_hold_anything(case: Case) -> None:
    """Pages of others and entries past every visible one are full of NaN."""
    batch = Batch((Request(5, 70, 9), Request(2, 0, 6), Request(1, 33, 2)), dead=2)
    arguments = case.arguments(batch, MINI, torch.bfloat16)
    keys, table = arguments["keys"], arguments["page_table"]
    soiled = torch.full_like(keys, torch.nan)
    for request in batch.requests:
        for entry in range((request.start + request.count) * keys.shape[1] // 64):
            page, place = table[request.slot, entry // keys.shape[1]].long(), entry % keys.shape[1]
            soiled[page, place] = keys[page, place]
    for a, b in zip(
        call(case.operator, arguments | {"keys": soiled}).results, call(case.operator, arguments).results, strict=True
    ):
        assert same_bits(a, b)


def index_inputs(layer: int) -> tuple[Tensor, Tensor]:
    """Quantised index queries [37, 8, 64] and unscaled head weights [37, 8] of a mini layer."""
    name, x = f"layers.{layer}.attn", STAGE[f"attn_in.{layer}"]
    low = kernels.linear_f8(x, *mini_pair(f"{name}.wq_a"))
    low = kernels.rms_norm(low, mini_weights()[f"{name}.q_norm.weight"], EPSILON)
    query = kernels.linear_f8(low, *mini_pair(f"{name}.indexer.wq_b")).view(37, 8, 64)
    query = kernels.index_query(query, torch.arange(37), yarn_frequencies(32, 160000.0, 16.0, 32.0, 1.0, 4096))
    return query, kernels.linear(x, mini_weights()[f"{name}.indexer.weights_proj.weight"])


def one_request(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """A pool whose pages 2, 0, ... hold the entries of slot 0, and the page table."""
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    pool = torch.full((3, page, keys.shape[1]), torch.nan, dtype=keys.dtype)
    for number, part in enumerate(keys.split(page)):
        pool[table[0, number].long(), : part.shape[0]] = part
    return pool, table


def blocks_of(mask: Tensor, count: int, size: int) -> Tensor:
    """Candidate blocks [R, count] int32 of a golden mask over entries."""
    rows = [sorted({entry // size for entry in row.nonzero().flatten().tolist()}) for row in mask]
    return torch.tensor([row + [-1] * (count - len(row)) for row in rows], dtype=torch.int32)


def arguments_of(name: str, batch: Batch) -> Arguments:
    return next(case for case in SELECTING if case.name == name).arguments(batch, MINI, torch.bfloat16)


def judged_scores(arguments: Arguments, row: int) -> list[float]:
    """Scores of the visible entries of one row."""
    keys, table, query = arguments["keys"], arguments["page_table"], arguments["query"][row]
    weights = arguments["weights"][row] * arguments["scale"]
    scores = []
    for entry in range((int(arguments["positions"][row]) + 1) * keys.shape[1] // 64):
        page = table[int(arguments["slots"][row]), entry // keys.shape[1]].long()
        terms = query.double() * keys[page, entry % keys.shape[1]].double()
        products = torch.tensor([math.fsum(head) for head in terms.tolist()], dtype=torch.float64).to(query.dtype)
        weighted = products.relu() * weights
        scores.append(float(torch.tensor(math.fsum(weighted.tolist()), dtype=torch.float64).to(query.dtype)))
    return scores


def judged_choices(arguments: Arguments, row: int, scores: list[float]) -> list[list[int]]:
    """Selected entries and candidate blocks of one row."""
    size, candidates = arguments["block_size"], arguments.get("candidates")
    blocks = {b: max(scores[b * size : (b + 1) * size]) for b in range(-(-len(scores) // size))}
    if blocks:
        blocks[(len(scores) - 1) // size] = math.inf
    allowed = dict(enumerate(scores))
    if candidates is not None:
        allowed = {entry: score for entry, score in allowed.items() if entry // size in candidates[row].tolist()}
    return [best(allowed, arguments["top_k"]), best(blocks, arguments.get("top_blocks", 0))]


def best(scores: dict[int, float], count: int) -> list[int]:
    chosen = sorted(sorted(scores, key=lambda number: (-scores[number], number))[:count])
    return chosen + [-1] * (count - len(chosen))
