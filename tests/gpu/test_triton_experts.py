"""The Triton backend of ``experts`` on a device, from its first kernel to its last, then as the operator that it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.experts import choose_experts
from octavo.kernels.quantise import round_q8
from octavo.kernels.torch_backend.f32_product import f32_product
from tests.gpu.test_capturable_state import waits
from tests.kernels.batches import Batch, random_batch
from tests.kernels.calls import Outcome, call, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.tolerances import LARGEST, TYPICAL, assert_near
from tests.kernels.torch_calls import on_device

if torch.cuda.is_available():  # elsewhere these tests are skipped, and the backend is not to be registered
    from octavo.kernels.triton_backend import experts as steps
    from octavo.kernels.triton_backend.expert_tiles import NARROW, TILES, WIDE_TILES, Narrow, Tile, Wide
    from octavo.kernels.triton_backend.expert_wide import round_pairs_in_order
    from tests.kernels.interpreted_experts import check_order, in_channel_order

CASES_OF_EXPERTS = [case for case in CASES if case.operator is kernels.experts]
every_case = pytest.mark.parametrize("case", CASES_OF_EXPERTS, ids=lambda case: case.name)
ODD = dataclasses.replace(WIDE, name="odd", hidden=384, inner=128)
EVEN = dataclasses.replace(WIDE, name="even", hidden=512, inner=256)
"""Widths of whole blocks of 128, which narrow tiles take; odd numbers of them, and even ones."""
every_size = pytest.mark.parametrize("size", (MINI, WIDE, ODD, EVEN), ids=lambda size: size.name)
ragged_and_whole = pytest.mark.parametrize("size", (WIDE, EVEN), ids=lambda size: size.name)
every_tile = pytest.mark.parametrize("tile_rows", (16, 32, 64, 128))
every_narrow_tile = pytest.mark.parametrize("number", range(3))
every_wide_tile = pytest.mark.parametrize("number", range(2))
"""Of the tables, whose length ``test_triton_experts_sm_90`` holds."""


def test_rounding_is_the_references_to_the_bit() -> None:
    random = torch.Generator("cuda").manual_seed(0)
    for rows, channels in ((1, 32), (3, 160), (17, 5120), (64, 2304)):
        exponents = torch.randn(rows, channels // 32, device="cuda", generator=random) * 9
        x = torch.randn(rows, channels, device="cuda", generator=random)
        x = (x * torch.exp2(exponents).repeat_interleave(32, 1)).to(torch.bfloat16)
        x[0, :32] = 0.0
        rounded, counts = steps.round_inputs(x, 5)
        assert not counts.any()
        expected = round_q8(x).float() * 2.0**64
        found = in_channel_order(rounded.float())
        assert torch.equal(found[:, :channels], expected) and not found[:, channels:].any(), (rows, channels)


@pytest.mark.parametrize(("experts", "top_k"), [(384, 6), (8, 2), (300, 5)])
def test_choices_and_weights_are_torchs_to_the_bit(experts: int, top_k: int) -> None:
    """Ordinary logits, equal ones, and such that leave the range of the logarithm."""
    random = torch.Generator("cuda").manual_seed(1)
    for rows in (1, 2, 127, 2048):
        ordinary = torch.randn(rows, experts, device="cuda", generator=random)
        bias, bias_vl = torch.randn(2, experts, device="cuda", generator=random) * 0.1
        live = torch.rand(rows, device="cuda", generator=random) > 0.1
        image = torch.rand(rows, device="cuda", generator=random) > 0.5
        for logits in (ordinary, ordinary * 30, (ordinary * 2).round(), ordinary * 0 - 100.0):
            for vision in (bias_vl, None):
                counts = torch.zeros(3, dtype=torch.int32, device="cuda")
                routing = live, image, bias, vision
                chosen, weights = steps.choose(logits, *routing, counts, 2, top_k, 1.5)
                expected, expected_weights = choose_experts(logits, *routing, top_k, 1.5)
                local = torch.where((expected >= 2) & (expected < 5) & live[:, None], expected - 2, -1)
                wrong = (chosen != local).any(1)
                assert not wrong.any(), f"{rows} rows: {int(wrong.sum())} differ, first {wrong.nonzero()[0].item()}"
                differ = (weights != expected_weights) & live[:, None]
                assert not differ.any(), f"{rows} rows: weights {weights[differ][:4]}, {expected_weights[differ][:4]}"
                assert torch.equal(counts.long(), torch.stack([(local == e).sum() for e in range(3)]))
                # Two halves are exact. Without counting, nothing is counted.
                halves = torch.stack([logits * 0.5, logits * 0.5])
                again = steps.choose(halves, *routing, counts.zero_(), 2, top_k, 1.5, count=False)
                assert torch.equal(again[0], chosen) and torch.equal(again[1], weights), f"{rows} rows"
                assert not counts.any()


@pytest.mark.parametrize(("hidden", "experts"), [(5120, 384), (160, 12)])
def test_few_rows_are_rounded_and_scored_at_once(hidden: int, experts: int) -> None:
    """Rounded to the bit, scored as near as F32 sums in another order are."""
    random = torch.Generator("cuda").manual_seed(3)
    gate = (torch.randn(experts, hidden, device="cuda", generator=random) * hidden**-0.5).to(torch.bfloat16)
    for rows in (1, 5, 16, 17, 128):
        x = torch.randn(rows, hidden, device="cuda", generator=random).to(torch.bfloat16)
        rounded, parts, counts = steps.round_and_score(x, gate, 7)
        assert torch.equal(rounded, steps.round_inputs(x, 7)[0]) and not counts.any(), f"{rows} rows"
        torch.testing.assert_close(parts.sum(0).double(), x.double() @ gate.double().t(), rtol=1e-5, atol=2e-5)


@every_tile
def test_the_order_holds_every_pair_once(tile_rows: int) -> None:
    order_is_right(TILES[tile_rows])


@every_narrow_tile
def test_the_order_of_narrow_tiles_too(number: int) -> None:
    order_is_right(NARROW[number][1])


@every_wide_tile
def test_the_order_of_wide_tiles_too(number: int) -> None:
    order_is_right(WIDE_TILES[number][1])


def order_is_right(tile: Narrow | Wide | Tile) -> None:
    random = torch.Generator("cuda").manual_seed(2)
    for rows, resident in ((1, 1), (1, 384), (77, 3), (1000, 48), (5000, 7)):
        chosen = torch.randint(-1, resident, (rows, 6), device="cuda", generator=random, dtype=torch.int32)
        counts = torch.stack([(chosen == e).sum() for e in range(resident)]).int()
        work = steps.place(chosen, counts, tile)
        work = steps.Work(tile, work.order.cpu(), work.tiles.cpu(), work.totals.cpu())
        check_order(work, chosen.cpu().long())


@every_case
@every_size
def test_the_device_is_near_the_reference_of_the_host(case: Case, size: Size) -> None:
    for rows in (1, 2, 3, 7, 13, 16, 17, 96, 700):
        given = case.arguments(random_batch(rows, seed=rows), size, torch.bfloat16)
        actual = triton(on_device(given, "cuda")).cpu()
        assert_near("experts", Outcome((actual,), {}), call(case.operator, given), f"{rows} rows")


@every_tile
@every_size
def test_every_tile_is_near_the_reference_of_the_host(tile_rows: int, size: Size) -> None:
    """Whatever the table would choose."""
    is_near_the_reference(TILES[tile_rows], size, 300)


@every_narrow_tile
@pytest.mark.parametrize("size", (ODD, EVEN), ids=lambda size: size.name)
def test_every_narrow_tile_is_near_the_reference_of_the_host(number: int, size: Size) -> None:
    for rows in (1, 50, 300):
        is_near_the_reference(NARROW[number][1], size, rows)


@every_wide_tile
def test_wide_tiles_are_near_the_reference_of_the_host(number: int) -> None:
    for rows in (1, 50, 300, 700):
        is_near_the_reference(WIDE_TILES[number][1], EVEN, rows)


def is_near_the_reference(tile: Narrow | Wide | Tile, size: Size, rows: int) -> None:
    case = next(case for case in CASES_OF_EXPERTS if case.name == "experts_all")
    host = case.arguments(random_batch(rows, seed=8), size, torch.bfloat16)
    actual = in_tiles(on_device(host, "cuda"), size.experts, tile).cpu()
    assert_near("experts", Outcome((actual,), {}), call(case.operator, host), f"{rows} rows")


@every_narrow_tile
def test_narrow_tiles_have_the_bits_of_others_at_true_shapes(number: int) -> None:
    """Products are summed in the same order, sixteen inputs at a time."""
    for rows in (3, 70, 700):
        given = true_shapes(rows, resident=48)
        narrow = in_tiles(given, 48, NARROW[number][1])
        assert same_bits(narrow, in_tiles(given, 48, TILES[16])), f"{rows} rows"


@every_wide_tile
def test_wide_tiles_have_the_bits_of_others_at_true_shapes(number: int) -> None:
    """In every width that a tile has; the second time three experts have nearly all rows, and many tiles."""
    for rows in (3, 700, 3000, 5000, 9000):
        given = true_shapes(rows, resident=48)
        for crowded in (False, True):
            if crowded:
                given["bias"][:3] += 0.5
            wide = in_tiles(given, 48, WIDE_TILES[number][1])
            assert same_bits(wide, in_tiles(given, 48, TILES[64])), f"{rows} rows, crowded: {crowded}"


def in_tiles(given: Arguments, resident: int, tile: Narrow | Wide | Tile) -> Tensor:
    """The operator with other tiles than the table would choose."""
    rounded, counts = steps.round_inputs(given["x"], resident)
    routing = given["live"], given["image"], given["bias"], given["bias_vl"]
    logits = f32_product(given["x"], given["gate"])
    chosen, weights = steps.choose(logits, *routing, counts, 0, given["top_k"], 1.5)
    work = steps.place(chosen, counts, tile)
    if isinstance(tile, Wide):
        rounded = round_pairs_in_order(given["x"], work.order, work.totals)
    matrices = given["w1"], given["s1"], given["w3"], given["s3"]
    hidden = steps.multiply_gate_and_up(rounded, weights, work, *matrices, given["limit"])
    return steps.sum_results(chosen, steps.multiply_down(hidden, work, given["w2"], given["s2"]))


@pytest.mark.parametrize("rows", (1, 2, 4, 7, 16, 32, 128, 130, 512, 1024, 2048, 4096, 8192))
def test_true_shapes_are_near_the_torch_backend(rows: int) -> None:
    """Six of 384 experts a row, 48 resident; the second time nearly all rows choose the same ones."""
    given = true_shapes(rows, resident=48)
    for crowded in (False, True):
        if crowded:
            given["bias"][:4] += 0.5
        actual, expected = triton(given), kernels.experts.backends["torch"].overload(**given)
        size = torch.linalg.vector_norm(expected, dim=1)
        error = torch.linalg.vector_norm(actual - expected, dim=1)
        beyond = error > LARGEST["experts"] * size
        assert not beyond.any(), f"{int(beyond.sum())} rows, worst {error.max():.2e}"
        served = size > 0
        assert served.any() or rows <= 2
        relative = (error / size)[served]
        assert not served.any() or relative.median() <= TYPICAL, f"median {relative.median():.2e}"


@every_case
@ragged_and_whole
@pytest.mark.parametrize("rows", (4, 7, 13, 29, 200))
def test_dead_rows_are_zero_and_reach_nothing(case: Case, size: Size, rows: int) -> None:
    batch = random_batch(rows, seed=3)
    given = on_device(case.arguments(batch, size, torch.bfloat16), "cuda")
    given["live"][rows // 2] = False
    clean = triton(given)
    dead = ~given["live"]
    given["x"][dead] = torch.nan
    assert same_bits(triton(given), clean)
    assert dead.any() and same_bits(clean[dead], torch.zeros_like(clean[dead]))
    nobody = on_device(case.arguments(Batch((), dead=rows), size, torch.bfloat16), "cuda")
    assert same_bits(triton(nobody), torch.zeros_like(clean))


def test_rows_of_nan_reach_no_other() -> None:
    """Live ones, among rows that chose the same experts: as many columns of a tile as there are rows, and parts."""
    for rows in (2, 4, 8, 16, 29, 1500, 6000):
        given = true_shapes(rows, resident=48)
        given["live"].fill_(True)
        given["bias"][:4] += 5.0
        given["bias_vl"][:4] += 5.0
        clean = triton(given)
        given["x"][1] = torch.nan
        others = torch.arange(rows, device="cuda") != 1
        assert same_bits(triton(given)[others], clean[others]), f"{rows} rows"


@pytest.mark.parametrize("rows", (1, 4, 13, 29))
@pytest.mark.parametrize("layout", ("transposed", "offset"))
@ragged_and_whole
def test_memory_layout_changes_no_bit(size: Size, layout: str, rows: int) -> None:
    given = on_device(CASES_OF_EXPERTS[0].arguments(random_batch(rows, seed=3), size, torch.bfloat16), "cuda")
    x = given["x"]
    offset = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    other = x.t().contiguous().t() if layout == "transposed" else offset
    assert same_bits(triton(given | {"x": other}), triton(given))


@ragged_and_whole
def test_nothing_waits(size: Size) -> None:
    for rows in (1, 7, 29, 200):
        given = on_device(CASES_OF_EXPERTS[0].arguments(random_batch(rows, seed=3), size, torch.bfloat16), "cuda")
        triton(given)  # compiles
        with waits("error"):
            triton(given)


@pytest.mark.parametrize("rows", (2, 16, 257, 1500, 6000))
def test_replay_on_other_inputs_equals_eager(rows: int) -> None:
    """To the bit: rows, routes, dead rows and weights change between replays; calls repeat themselves."""
    static = true_shapes(rows, resident=16)
    triton(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton(static)
    for seed in range(4):
        given = true_shapes(rows, resident=16, seed=seed + 1)
        given["live"].fill_(seed == 2)
        given["bias"][:4] += 5.0
        given["bias_vl"][:4] += 5.0
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        eager = triton(given)
        assert same_bits(captured, eager) and same_bits(triton(given), eager), f"step {seed}"
        assert bool(eager.any()) == (seed == 2)


def triton(arguments: Arguments) -> Tensor:
    result = kernels.experts.backends["triton"].overload(**arguments)
    assert isinstance(result, Tensor)
    return result


def true_shapes(rows: int, resident: int, seed: int = 0) -> Arguments:
    random = torch.Generator("cuda").manual_seed(seed)

    def codes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=random, dtype=torch.uint8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=random)

    hidden, inner = 5120, 2304
    return {
        "x": normal(rows, hidden).to(torch.bfloat16),
        "live": torch.rand(rows, device="cuda", generator=random) > 0.05,
        "image": torch.rand(rows, device="cuda", generator=random) > 0.8,
        "gate": (normal(384, hidden) * hidden**-0.5).to(torch.bfloat16),
        "bias": normal(384) * 0.1,
        "bias_vl": normal(384) * 0.1,
        "w1": codes(resident, inner, hidden // 2),
        "s1": codes(resident, inner, hidden // 32, low=116, high=120),
        "w2": codes(resident, hidden, inner // 2),
        "s2": codes(resident, hidden, inner // 32, low=116, high=120),
        "w3": codes(resident, inner, hidden // 2),
        "s3": codes(resident, inner, hidden // 32, low=116, high=120),
        "first_expert": 0,
        "top_k": 6,
        "route_scale": 1.5,
        "limit": 10.0,
    }
