"""The Triton backend of linear layers with F8 weights on a device: its steps, then the operators that they make up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.operator import Operator
from octavo.kernels.quantise import round_q8
from octavo.kernels.torch_backend.dequantise import bf16_tiles
from tests.gpu.test_capturable_state import waits
from tests.kernels.batches import random_batch
from tests.kernels.calls import Outcome, assert_same, call
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.tolerances import assert_near
from tests.kernels.torch_calls import on_device

if torch.cuda.is_available():  # elsewhere these tests are skipped, and the backend is not to be registered
    from octavo.kernels.triton_backend import linear_products as steps
    from octavo.kernels.triton_backend.linear_tiles import FOR_NARROW, FOR_TWO, FOR_WIDE
    from tests.kernels.interpreted_linear import in_channel_order

OPERATORS: tuple[Operator[..., Any], ...] = (
    kernels.linear_f8,
    kernels.linear_f8_pair,
    kernels.grouped_linear,
    kernels.shared_expert,
)
CASES_OF_LINEAR = [case for case in CASES if case.operator in OPERATORS]
ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 200, 513)
FEW_AND_MANY = (1, 16, 33, 64, 100, 200, 600)
NANO = dataclasses.replace(MINI, name="nano", hidden=256, heads=8, head_dim=96, rank=64, inner=128)
ODD = dataclasses.replace(WIDE, name="odd", hidden=288, heads=6, head_dim=20, rank=33, inner=96)
every_case = pytest.mark.parametrize("case", CASES_OF_LINEAR, ids=lambda case: case.name)
every_size = pytest.mark.parametrize("size", (MINI, WIDE, NANO, ODD), ids=lambda size: size.name)


def test_rounding_is_the_references() -> None:
    """Groups of all sizes, also such that leave the range of their scale."""
    random = torch.Generator("cuda").manual_seed(0)
    for rows, channels in ((1, 32), (3, 160), (17, 5120), (64, 2304)):
        exponents = torch.randn(rows, channels // 32, device="cuda", generator=random) * 30
        exponents = exponents.clamp(-120, 120)
        x = torch.randn(rows, channels, device="cuda", generator=random)
        x = (x * torch.exp2(exponents).repeat_interleave(32, 1)).to(torch.bfloat16)
        x[0, :32] = 0.0
        expected = round_q8(x)
        assert torch.equal(steps.prepared_rows(x, quantised=True, fragments=False), expected), (rows, channels)
        ordered = steps.prepared_rows(x, quantised=True, fragments=True)
        found = in_channel_order(ordered)
        assert torch.equal(found[:, :channels], expected) and not found[:, channels:].any(), (rows, channels)
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    x = every.new_zeros(every.shape[0], 32)
    x[:, 0], x[:, 7] = every, 448.0
    assert torch.equal(steps.prepared_rows(x, quantised=True, fragments=False), round_q8(x))


def test_weights_in_bf16_are_the_torch_backends() -> None:
    """Every code but NaN, in every place of a word, with every scale that is not refused: a row of tiles for each."""
    every_byte = torch.arange(3, 135, device="cuda")
    place = torch.arange(32 * len(every_byte), device="cuda")[:, None] + torch.arange(256, device="cuda")
    codes = place.bitwise_and(255).to(torch.uint8)
    codes[codes & 127 == 127] = 0
    weight = codes.view(torch.float8_e4m3fn)
    scale = every_byte.to(torch.uint8)[:, None].repeat(1, 8)
    assert torch.equal(steps.bf16_weight(weight, scale), bf16_tiles(weight, scale))
    for outputs, inputs in ((5120, 1280), (33, 32), (70, 160)):
        weight, scale = drawn(outputs, inputs)
        assert torch.equal(steps.bf16_weight(weight, scale), bf16_tiles(weight, scale)), (outputs, inputs)


@every_case
@every_size
def test_the_device_is_near_the_reference_of_the_host(case: Case, size: Size) -> None:
    nobody = case.arguments(random_batch(0, seed=0), size, torch.bfloat16)
    assert_same(on_host(triton(case.operator, on_device(nobody, "cuda"))), call(case.operator, nobody), "no rows")
    for rows in ROWS:
        given = case.arguments(random_batch(rows, seed=rows), size, torch.bfloat16)
        actual = on_host(triton(case.operator, on_device(given, "cuda")))
        assert_near(case.operator.name, actual, call(case.operator, given), f"{rows} rows")


@pytest.mark.parametrize(
    ("outputs", "inputs", "steps_of"),
    [
        (1280, 5120, FEW_AND_MANY),
        (512, 5120, FEW_AND_MANY),
        (32768, 1280, FEW_AND_MANY),
        (5120, 8192, FEW_AND_MANY),
        (25600, 6144, (200, 257)),
        (4096, 1280, (3,)),
    ],
)
def test_true_shapes_are_near_exact_products(outputs: int, inputs: int, steps_of: tuple[int, ...]) -> None:
    weight, scale = drawn(outputs, inputs)
    for rows in steps_of:
        x = normal(rows, inputs).to(torch.bfloat16)
        given = {"x": x, "weight": weight, "scale": scale}
        check(kernels.linear_f8, given)


def test_the_other_true_shapes_are_near_exact_products() -> None:
    weight, scale = drawn(8192, 4096)
    (w1, s1), (w2, s2), (w3, s3) = drawn(2304, 5120), drawn(5120, 2304), drawn(2304, 5120)
    for rows in FEW_AND_MANY:
        given: Arguments = {
            "x": normal(rows, 64, 512).to(torch.bfloat16),
            "weight": weight,
            "scale": scale,
            "groups": 8,
        }
        check(kernels.grouped_linear, given)
        x = normal(rows, 5120).to(torch.bfloat16)
        given = {"x": x, "w1": w1, "s1": s1, "w2": w2, "s2": s2, "w3": w3, "s3": s3, "limit": 1.0}
        check(kernels.shared_expert, given)


def test_every_launch_of_the_tables_is_near_the_others() -> None:
    """Whatever the number of rows would choose."""
    weight, scale = drawn(1000, 1056)
    other, other_scale = drawn(203, 1056)
    for rows in (1, 70):
        x = normal(rows, 1056).to(torch.bfloat16)
        expected = call(kernels.linear_f8_pair, pair_of(x, (weight, scale), (other, other_scale)))
        for launch in dict.fromkeys(one for table in (FOR_NARROW, FOR_WIDE, FOR_TWO) for _, one in table):
            for prepared in {launch.prepared, True}:
                mine = dataclasses.replace(launch, prepared=prepared)
                alone = Outcome((steps.multiply_few(mine, x, weight, scale, 1, True),), {})
                assert_near("linear_f8", alone, Outcome(expected.results[:1], {}), f"{rows} rows, {mine}")
                pair = Outcome(steps.multiply_pair_few(mine, x, weight, scale, other, other_scale), {})
                assert_near("linear_f8_pair", pair, expected, f"{rows} rows, {mine}")


def test_a_pair_has_the_bits_of_its_products_where_inputs_are_split_alike() -> None:
    """Every program of these gets the fewest inputs that it may, of one matrix and of two: the sums have one order."""
    for inputs in (256, 1056):
        first, second = drawn(200, inputs), drawn(71, inputs)
        for rows in (*range(1, 130), 512):
            x = normal(rows, inputs).to(torch.bfloat16)
            assert_same(
                triton(kernels.linear_f8_pair, pair_of(x, first, second)), apart(x, first, second), f"{rows} rows"
            )
        for launch in dict.fromkeys(one for table in (FOR_NARROW, FOR_WIDE, FOR_TWO) for _, one in table):
            for rows in (1, 70, 129):
                x = normal(rows, inputs).to(torch.bfloat16)
                pair = Outcome(steps.multiply_pair_few(launch, x, *first, *second), {})
                alone = [steps.multiply_few(launch, x, *weight, groups=1, quantised=True) for weight in (first, second)]
                assert_same(pair, Outcome(tuple(alone), {}), f"{rows} rows, {launch}")


def test_pairs_of_true_shapes_are_near_exact_products() -> None:
    """Of query down and latent; where the library multiplies, with the bits of two products."""
    first, second = drawn(1280, 5120), drawn(512, 5120)
    for rows in (*FEW_AND_MANY, 128, 129, 512):
        x = normal(rows, 5120).to(torch.bfloat16)
        check(kernels.linear_f8_pair, pair_of(x, first, second))
        if rows > 128:
            assert_same(
                triton(kernels.linear_f8_pair, pair_of(x, first, second)), apart(x, first, second), f"{rows} rows"
            )


@pytest.mark.parametrize("byte", (20, 90, 134))
def test_extreme_scales(byte: int) -> None:
    weight, scale = drawn(96, 256)
    scale.fill_(byte)
    for rows in (3, 300):
        x = normal(rows, 256).to(torch.bfloat16)
        given = {"x": x, "weight": weight, "scale": scale}
        check(kernels.linear_f8, given)


@every_case
def test_rows_of_nan_reach_no_other_row(case: Case) -> None:
    for rows in (29, 90, 300):
        given = on_device(case.arguments(random_batch(rows, seed=3), WIDE, torch.bfloat16), "cuda")
        clean = triton(case.operator, given)
        soiled = torch.arange(rows, device="cuda") % 3 == 1
        given["x"][soiled] = torch.nan
        found = triton(case.operator, given)
        assert_same(rows_of(found, ~soiled), rows_of(clean, ~soiled), f"{rows} rows")
        assert all(bool(result.isnan().all()) for result in rows_of(found, soiled).results)


@every_case
@pytest.mark.parametrize("layout", ("transposed", "offset"))
def test_memory_layout_changes_no_bit(case: Case, layout: str) -> None:
    for rows in (29, 300):
        given = on_device(case.arguments(random_batch(rows, seed=3), WIDE, torch.bfloat16), "cuda")
        x = given["x"]
        offset = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
        other = x.movedim(0, -1).contiguous().movedim(-1, 0) if layout == "transposed" else offset
        assert_same(triton(case.operator, given | {"x": other}), triton(case.operator, given), f"{rows} rows")


@every_case
def test_nothing_waits(case: Case) -> None:
    for rows in (1, 29, 300):
        given = on_device(case.arguments(random_batch(rows, seed=3), MINI, torch.bfloat16), "cuda")
        triton(case.operator, given)  # compiles
        with waits("error"):
            triton(case.operator, given)


@every_case
def test_replay_on_other_inputs_equals_eager(case: Case) -> None:
    """To the bit: rows and weights change between replays, and calls repeat themselves."""
    for rows in (1, 16, 70, 300):
        static = on_device(case.arguments(random_batch(rows, seed=1), WIDE, torch.bfloat16), "cuda")
        triton(case.operator, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = triton(case.operator, static)
        for seed in range(3):
            given = on_device(case.arguments(random_batch(rows, seed=1), WIDE, torch.bfloat16, seed + 5), "cuda")
            for name, value in given.items():
                if isinstance(value, Tensor):
                    static[name].copy_(value)
            for _ in range(2):
                graph.replay()
                eager = triton(case.operator, given)
                assert_same(captured, eager, f"{rows} rows, step {seed}")
                assert all(bool(result.any()) for result in eager.results), f"{rows} rows, step {seed}"


def triton(operator: Operator[..., Any], arguments: Arguments) -> Outcome:
    given = operator.backends["triton"].overload(**arguments)
    results = given if isinstance(given, tuple) else (given,)
    assert all(isinstance(result, Tensor) and result.is_contiguous() for result in results)
    return Outcome(results, {})


def check(operator: Operator[..., Any], given: Arguments) -> None:
    assert_near(operator.name, triton(operator, given), call(operator, given), f"{given['x'].shape[0]} rows")


def pair_of(x: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Arguments:
    """Arguments of ``linear_f8_pair``; weights come with their scales."""
    names = ("weight_a", "scale_a", "weight_b", "scale_b")
    return {"x": x, **dict(zip(names, (*first, *second), strict=True))}


def apart(x: Tensor, *weights: tuple[Tensor, Tensor]) -> Outcome:
    """By ``linear_f8``, one after the other."""
    results = [
        triton(kernels.linear_f8, {"x": x, "weight": weight, "scale": scale}).results for weight, scale in weights
    ]
    return Outcome(tuple(result for (result,) in results), {})


def on_host(outcome: Outcome) -> Outcome:
    return Outcome(tuple(result.cpu() for result in outcome.results), {})


def rows_of(outcome: Outcome, chosen: Tensor) -> Outcome:
    return Outcome(tuple(result[chosen] for result in outcome.results), {})


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(shape[0]))


def drawn(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """F8 weight that keeps the size of its input, and its tile scales."""
    random = torch.Generator("cuda").manual_seed(outputs)
    codes = torch.randn(outputs, inputs, device="cuda", generator=random) * inputs**-0.5 * 64
    scale = torch.randint(119, 124, (-(-outputs // 32), -(-inputs // 32)), device="cuda", generator=random)
    return codes.to(torch.float8_e4m3fn), scale.to(torch.uint8)


def test_weights_held_in_bf16_change_no_bit_but_the_order_of_sums() -> None:
    """Few rows do not read them, many multiply by them instead of making them. Rows between change from the one way to
    the other, but for a pair."""
    (w1, s1), (w2, s2), (w3, s3) = drawn(2304, 5120), drawn(5120, 2304), drawn(2304, 5120)
    grouped, other, query = drawn(8192, 4096), drawn(512, 5120), drawn(32768, 1280)
    wide = [bf16_tiles(*pair) for pair in ((w1, s1), (w2, s2), (w3, s3), grouped, other, query)]
    both = torch.cat([wide[0], wide[2]])
    for rows in (1, 64, 65, 100, 200, 300, 700):
        x, heads = normal(rows, 5120).to(torch.bfloat16), normal(rows, 64, 512).to(torch.bfloat16)
        for operator, given, held in (
            (kernels.linear_f8, (x, w1, s1), (wide[0],)),
            (kernels.linear_f8, (x[:, :1280].contiguous(), *query), (wide[5],)),
            (kernels.linear_f8_pair, (x, w1, s1, *other), (wide[0], wide[4])),
            (kernels.grouped_linear, (heads, *grouped, 8), (wide[3],)),
            (kernels.shared_expert, (x, w1, s1, w2, s2, w3, s3, 10.0), (both, wide[1])),
        ):
            call: Any = operator.backends["triton"].overload
            plain, found = call(*given), call(*given, *held)
            pairs = list(zip(plain, found, strict=True)) if isinstance(plain, tuple) else [(plain, found)]
            case = f"{operator.name}, {rows} rows"
            if operator is kernels.linear_f8_pair or not 64 < rows <= 256:
                assert all(torch.equal(one, another) for one, another in pairs), case
            else:
                one, another = (Outcome(results, {}) for results in zip(*pairs, strict=True))
                assert_near(operator.name, another, one, case)
