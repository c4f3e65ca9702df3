"""Backend ``triton`` of what stands before the body, and of ``window_latent``, on a device, against the references.

Lookups and hashes must agree to the bit. Latents are compared with the reference of the host, whose squares are added
in another order.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.choice import choose_backends
from octavo.kernels.engram import DEAD_CLASS
from octavo.kernels.quantise import round_q8
from octavo.kernels.rope import plain_frequencies
from tests.gpu.test_capturable_state import waits
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, laid_out, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, TRUE, WIDE, Size
from tests.kernels.tolerances import assert_near
from tests.kernels.torch_calls import on_device, poisoned

if torch.cuda.is_available():  # elsewhere these tests are skipped, and the backend is not to be registered
    from octavo.kernels import triton_backend

    assert triton_backend.__all__

EXACT = (kernels.embed_tokens, kernels.token_classes, kernels.engram_hash, kernels.engram_lookup)
EXACT_CASES = [case for case in CASES if case.operator in EXACT]
LATENTS = next(case for case in CASES if case.operator is kernels.window_latent)
EVERY = [*EXACT_CASES, LATENTS]
ROWS = (1, 2, 17, 300, 4096)
NANO = dataclasses.replace(MINI, name="nano", head_dim=96)
BATCHES = (
    *(random_batch(rows, seed=rows) for rows in ROWS),
    Batch(tuple(Request(slot, start, 1) for slot, start in enumerate((0, 1, 2, 3, 4, 5, 6, 250))), dead=3),
    Batch((Request(3, 37, 18), Request(1, 0, 2), Request(2, 1, 1), Request(6, 2, 40)), dead=1),
    Batch((), dead=2),
    Batch(()),
)
every_case = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
every_exact_case = pytest.mark.parametrize("case", EXACT_CASES, ids=lambda case: case.name)


def triton(case: Case, given: Arguments) -> Outcome:
    result = case.operator.backends["triton"].overload(**given)
    assert isinstance(result, Tensor) and result.is_contiguous()
    return Outcome((result,), {})


def reference(case: Case, given: Arguments) -> Outcome:
    result = case.operator.reference(**given)
    assert isinstance(result, Tensor)
    return Outcome((result,), {})


def test_it_is_what_runs() -> None:
    chosen = choose_backends("fast", "cuda")
    assert {chosen[case.operator.name] for case in EVERY} == {"triton"}


@every_exact_case
@pytest.mark.parametrize("size", (MINI, WIDE, TRUE), ids=lambda size: size.name)
def test_results_are_the_references(case: Case, size: Size) -> None:
    """In BF16 and in F32; and whatever the memory layout of rows."""
    for batch in BATCHES:
        for dtype in (torch.bfloat16, torch.float32):
            given = on_device(case.arguments(batch, size, dtype), "cuda")
            expected = reference(case, given)
            assert_same(triton(case, given), expected, f"{batch.rows} rows")
            for layout in ("transposed", "padded") if batch.rows == 17 else ():
                assert_same(triton(case, laid_out(case.operator, given, layout)), expected, layout)


def test_every_code_at_every_scale() -> None:
    """NaN is NaN, whatever its bits."""
    table = torch.arange(256, device="cuda").repeat(256, 1).to(torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.arange(256, device="cuda").to(torch.uint8).unsqueeze(1).expand(-1, 8).contiguous()
    rows = torch.arange(256, device="cuda").unsqueeze(1)
    for dtype in (torch.float32, torch.bfloat16):
        expected = kernels.engram_lookup.reference(table, scale, rows, dtype)
        found = kernels.engram_lookup.backends["triton"].overload(table, scale, rows, dtype)
        nan = expected.isnan()
        assert torch.equal(found.isnan(), nan) and int(nan.sum()) == 255 * 2 + 256
        assert same_bits(found[~nan], expected[~nan])


def test_tables_of_more_bytes_than_an_int32_counts() -> None:
    table = torch.zeros(9_000_000, 256, dtype=torch.uint8, device="cuda")
    scale = torch.full((9_000_000, 8), 127, dtype=torch.uint8, device="cuda")
    rows = torch.tensor([[0, 8_388_607], [8_388_608, 8_999_999]], device="cuda")
    table[rows.flatten()] = torch.arange(1024, device="cuda").remainder(120).to(torch.uint8).view(4, 256)
    codes = table.view(torch.float8_e4m3fn)
    expected = codes[rows.flatten()].float().view(2, 512)
    found = kernels.engram_lookup.backends["triton"].overload(codes, scale, rows, torch.float32)
    assert torch.equal(found, expected) and bool(found.any(1).all())


def test_remainders() -> None:
    """Products that leave int64 wrap around, and remainders of negative numbers are not negative."""
    batch = random_batch(300, seed=9)
    random = torch.Generator().manual_seed(1)
    given = next(case for case in CASES if case.operator is kernels.engram_hash).arguments(batch, TRUE, torch.bfloat16)
    columns = given["primes"].shape[0]
    given["classes"] = given["classes"].masked_fill(torch.arange(batch.rows) % 7 == 0, DEAD_CLASS)
    given["primes"] = torch.randint(2**33, 2**34, (columns,), generator=random)
    given["multipliers"] = torch.randint(2**60, 2**62, given["multipliers"].shape, generator=random)
    given = on_device(given, "cuda")
    found = kernels.engram_hash.backends["triton"].overload(**given)
    assert same_bits(found, kernels.engram_hash.reference(**given))


def test_dead_rows_are_hashed_as_pads_whatever_they_hold() -> None:
    case = next(case for case in CASES if case.operator is kernels.engram_hash)
    for batch in BATCHES:
        given = case.arguments(batch, MINI, torch.bfloat16)
        expected = reference(case, on_device(given, "cuda"))
        for slot in (-99, 5):
            changed = on_device(poisoned(case, given, slot), "cuda")
            assert_same(triton(case, changed), expected, f"{batch.rows} rows, slot {slot}")


def test_tables_in_host_memory_are_served_as_by_the_reference() -> None:
    """The call waits: it stands between captured segments."""
    case = next(case for case in CASES if case.operator is kernels.engram_lookup)
    given = case.arguments(random_batch(17, seed=1), WIDE, torch.bfloat16)
    expected = reference(case, given)
    found = triton(case, given | {"rows": given["rows"].cuda()})
    assert found.results[0].is_cuda
    assert_same(Outcome((found.results[0].cpu(),), {}), expected, "host")


@pytest.mark.parametrize("size", (MINI, NANO, WIDE, TRUE), ids=lambda size: size.name)
def test_latents_are_near_the_reference_of_the_host(size: Size) -> None:
    for rows in (1, 2, 17, 300):
        batch = random_batch(rows, seed=rows)
        for gain in (1.0, 2.0**30, 2.0**-30):
            given = LATENTS.arguments(batch, size, torch.bfloat16)
            given["x"] *= gain
            actual = triton(LATENTS, on_device(given, "cuda")).results[0].cpu()
            assert torch.equal(round_q8(actual), actual)
            assert_near("window_latent", Outcome((actual,), {}), reference(LATENTS, given), f"{rows} rows of {gain:g}")


def test_a_row_of_latents_is_the_same_among_others() -> None:
    """And in any layout of memory, far along in a context, where angles reach a million."""
    given = on_device(LATENTS.arguments(random_batch(4096, seed=3), TRUE, torch.bfloat16), "cuda")
    given["positions"] = given["positions"] + 1_000_000
    whole = triton(LATENTS, given)
    for rows in (1, 7, 133):
        part = given | {name: given[name][:rows] for name in ("x", "positions")}
        assert_same(triton(LATENTS, part), Outcome((whole.results[0][:rows],), {}), f"{rows} rows")
    for layout in ("transposed", "padded"):
        assert_same(triton(LATENTS, laid_out(kernels.window_latent, given, layout)), whole, layout)
    given["frequencies"] = plain_frequencies(TRUE.rotary, 10000.0).cuda()
    host = reference(LATENTS, on_device(given, "cpu"))
    near = Outcome((triton(LATENTS, given).results[0].cpu(),), {})
    assert_near("window_latent", near, host, "far along")


@every_case
def test_nothing_waits(case: Case) -> None:
    for rows in (1, 300):
        given = on_device(case.arguments(random_batch(rows, seed=3), WIDE, torch.bfloat16), "cuda")
        triton(case, given)  # compiles
        with waits("error"):
            triton(case, given)


@every_case
@pytest.mark.parametrize("rows", ROWS)
def test_replay_on_other_inputs_equals_eager(case: Case, rows: int) -> None:
    static = on_device(case.arguments(random_batch(rows, seed=1), TRUE, torch.bfloat16), "cuda")
    triton(case, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton(case, static)
    for seed, batch in enumerate((random_batch(rows, seed=2), random_batch(rows, seed=5), Batch((), dead=rows))):
        given = on_device(case.arguments(batch, TRUE, torch.bfloat16, seed), "cuda")
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        expected = triton(case, given) if case is LATENTS else reference(case, given)
        assert_same(captured, expected, f"step {seed}")
