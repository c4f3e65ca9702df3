"""Backend ``triton`` of ``attend`` and ``commit_window`` on a device, against the reference and the backend ``torch``.

Shapes of small models run through the general kernel, 64 heads of 512 channels through those for Hopper: 67 rows or
more, of layers that select, whole, fewer in parts. A failure says where the error lies: by row, by block of heads and
by block of channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.rope import plain_frequencies
from octavo.kernels.storage import packed_entry_bytes
from tests.gpu.test_capturable_state import STEPS, waits
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.calls import Outcome, assert_same, call, mutated, same_bits
from tests.kernels.cases import CASES, Arguments, Case
from tests.kernels.draw import MINI, TRUE, WIDE, Size
from tests.kernels.test_torch_backend_state import ATTENTION_TOLERANCE
from tests.kernels.torch_calls import arguments_of, call_torch, on_device, poisoned

RELEASED = dataclasses.replace(TRUE, name="released", heads=64)
ONE_OF_EIGHT = dataclasses.replace(TRUE, name="one rank of eight", heads=8)
NANO = dataclasses.replace(MINI, name="nano", heads=8, head_dim=96, window=64, top_k=64)
SIZES = (MINI, WIDE, NANO, ONE_OF_EIGHT, RELEASED)
ROWS = {"query", "latents", "slots", "positions", "write_slots", "write_positions", "write_starts", "selected"}
SAME_SUMS = 2e-3
"""Relative L2 of a row in parts against the whole: probabilities round to 8 bits against other maxima."""

every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name.replace(" ", "_"))
every_storage = pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))


def cases(*operators: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [c for c in CASES if c.operator in operators], ids=lambda case: case.name)


def call_triton(case: Case, arguments: Arguments) -> Outcome:
    state = {name: arguments[name].clone() for name in mutated(case.operator)}
    result = case.operator.backends["triton"].overload(**{**arguments, **state})
    return Outcome(() if result is None else (result,), state)


def assert_near(actual: Tensor, expected: Tensor, live: Tensor, tolerance: float, what: str) -> None:
    """Every live row within the tolerance, and dead rows zero. Both [R, H, C]."""
    difference, exact = (actual - expected).double(), expected.double()
    errors = difference.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1).clamp_min(1e-30)
    errors = torch.where(live, errors, 0.0).nan_to_num(torch.inf)
    row = int(errors.argmax())
    if float(errors[row]) > tolerance:
        heads, channels = max(1, actual.shape[1] // 4), max(1, actual.shape[2] // 8)
        size = exact[row].norm() / 2
        parts = [
            f"heads {[f'{float(part.norm() / size):.1e}' for part in difference[row].split(heads, 0)]}",
            f"channels {[f'{float(part.norm() / size):.1e}' for part in difference[row].split(channels, 1)]}",
            f"NaN {int(actual.isnan().sum())} of {actual.numel()}",
            f"sizes {float(actual[row].norm()):.3g} for {float(exact[row].norm()):.3g}",
            f"{int((errors > tolerance).sum())} of {int(live.sum())} live rows",
        ]
        pytest.fail(f"{what}: row {row} off by {float(errors[row]):.1e}: " + "; ".join(parts), pytrace=False)
    assert same_bits(actual[~live], torch.zeros_like(actual[~live])), f"{what}: dead rows are not zero"


def whole_rows(given: Arguments) -> Tensor:
    """By the kernel for Hopper that does not divide rows, however few they are."""
    from octavo.kernels.triton_backend import attend
    from octavo.kernels.triton_backend.tuning import HOPPER

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel under test is Hopper's")
    return attend.run(HOPPER, **given, splits=1)


def peaked(given: Arguments) -> Arguments:
    """Scores of several units, and a head whose sink takes nothing."""
    given["query"] = 4 * given["query"]
    given["sink"][0] = -torch.inf
    return given


@cases(kernels.attend)
@every_size
@every_storage
def test_attention_is_the_references(case: Case, size: Size, packed: bool) -> None:
    """From one row in many parts to more rows than the device holds at once."""
    for rows in (1, 7, 61, 150) if size.head_dim < 512 else (1, 7, 150, 240):
        given = on_device(peaked(arguments_of(case, random_batch(rows, seed=rows), size, packed)), "cuda")
        actual, expected = call_triton(case, given).results[0], call(case.operator, given).results[0]
        assert_near(actual, expected, given["positions"] >= 0, ATTENTION_TOLERANCE, f"{rows} rows")


@cases(kernels.attend)
@every_storage
def test_a_request_longer_than_its_window(case: Case, packed: bool) -> None:
    batch = Batch((Request(3, 5, 170), Request(1, 0, 1), Request(6, 62, 4)), dead=9)
    given = on_device(peaked(arguments_of(case, batch, RELEASED, packed)), "cuda")
    actual, expected = call_triton(case, given).results[0], call(case.operator, given).results[0]
    assert_near(actual, expected, given["positions"] >= 0, ATTENTION_TOLERANCE, "window")


@every_storage
@pytest.mark.parametrize("heads", (8, 64))
@pytest.mark.parametrize("rows", (1, 16, 300))
def test_far_positions_in_large_pools(rows: int, heads: int, packed: bool) -> None:
    """Up to a million tokens, 512 entries each, in pages behind the 2^31-th element of their pool; holes among them."""
    given = far(rows, heads, packed)
    actual, expected = kernels.attend.backends["triton"].overload(**given), kernels.attend(**given)
    assert_near(actual, expected, given["positions"] >= 0, ATTENTION_TOLERANCE, f"{rows} rows")


def far(rows: int, heads: int, packed: bool) -> Arguments:
    """Every row a request of its own, so that its own latent is the only one of this step in its window."""
    cuda: Any = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(rows)}
    channels = 512
    width = packed_entry_bytes(channels) if packed else channels
    pages = 2**31 // (64 * width) + 64
    pool = torch.empty(pages, 64, width, dtype=torch.uint8 if packed else torch.bfloat16, device="cuda")
    used = torch.cat((torch.arange(64, device="cuda"), torch.arange(pages - 64, pages, device="cuda")))
    if packed:
        codes = torch.randint(0, 256, (128, 64, channels // 2), **cuda)
        scales = torch.randint(8, 72, (128, 64, channels // 16), **cuda)  # E4M3 from 2^-6 to 2^2
        pool[used] = torch.cat((codes, scales), dim=2).to(torch.uint8)
    else:
        pool[used] = torch.randn(128, 64, channels, **cuda).to(torch.bfloat16)
    slot = torch.arange(rows, dtype=torch.int32, device="cuda")
    position = torch.randint(2**19, 2**20, (rows,), **cuda).int()
    position[0] = 2**20 - 1
    selected = torch.randint(0, 2**19, (rows, 512), **cuda).sort(1).values.int()
    selected[:, 5] = -1
    if rows > 1:
        selected[-1] = -1
    return {
        "query": torch.randn(rows, heads, channels, **cuda).to(torch.bfloat16),
        "latents": torch.randn(rows, channels, **cuda).to(torch.bfloat16),
        "ring": torch.randn(rows, 128, channels, **cuda).to(torch.bfloat16),
        "sink": torch.randn(heads, **cuda),
        "frequencies": plain_frequencies(64, 160000.0).cuda(),
        "slots": slot,
        "positions": position,
        "write_slots": slot,
        "write_positions": position,
        "write_starts": position,
        "page_table": used[torch.randint(0, 128, (rows, 2**14), **cuda)].int(),
        "entries": pool,
        "selected": selected,
    }


@cases(kernels.attend)
@every_size
@every_storage
def test_what_no_row_reads_may_hold_anything(case: Case, size: Size, packed: bool) -> None:
    """To the bit: dead rows, ring places out of reach and entries that nobody selected, all NaN."""
    batch = Batch((Request(2, 36, 5), Request(5, 0, 3), Request(1, 9, 1)), dead=4)
    given = arguments_of(case, batch, size, packed)
    soiled = poisoned(case, given, 2)
    ring = torch.full_like(given["ring"], torch.nan)
    for request in batch.requests:
        for position in range(max(0, request.start - size.window + 1), request.start):
            ring[request.slot, position % size.window] = given["ring"][request.slot, position % size.window]
    soiled["ring"] = ring
    if given["entries"] is not None:
        pool = torch.full_like(given["entries"], 255 if packed else torch.nan)
        for slot, chosen in zip(given["slots"].tolist(), given["selected"].tolist(), strict=True):
            for entry in (entry for entry in chosen if entry >= 0 and slot >= 0):
                page, place = divmod(entry, pool.shape[1])
                address = given["page_table"][slot, page].long(), place
                pool[address] = given["entries"][address]
        soiled["entries"] = pool
    on_cuda = [on_device(arguments, "cuda") for arguments in (given, soiled)]
    clean, actual = (call_triton(case, arguments) for arguments in on_cuda)
    assert_same(actual, clean, case.name)
    if size is RELEASED and torch.cuda.get_device_capability() == (9, 0):
        clean_whole, actual_whole = (whole_rows(arguments) for arguments in on_cuda)
        assert same_bits(actual_whole, clean_whole), "whole rows"


@pytest.mark.parametrize("turning", (1, 37, 256))
@pytest.mark.parametrize("heads", (8, 64))
def test_any_rotary_width(heads: int, turning: int) -> None:
    """One pair of channels, some that fill no block of 64 channels, and all; in parts and whole."""
    case = next(case for case in CASES if case.name == "attend_pairs")
    size = dataclasses.replace(RELEASED, heads=heads, rotary=2 * turning)
    for rows in (3, 150):
        given = on_device(peaked(arguments_of(case, random_batch(rows, seed=rows), size)), "cuda")
        actual, expected = call_triton(case, given).results[0], call(case.operator, given).results[0]
        assert_near(actual, expected, given["positions"] >= 0, ATTENTION_TOLERANCE, f"{rows} rows")


@cases(kernels.attend)
@every_storage
def test_parts_make_the_whole(case: Case, packed: bool) -> None:
    from octavo.kernels.triton_backend import attend
    from octavo.kernels.triton_backend.tuning import choose_attend_form

    for size in (WIDE, RELEASED):
        given = on_device(peaked(arguments_of(case, random_batch(29, seed=8), size, packed)), "cuda")
        hopper = torch.cuda.get_device_capability() == (9, 0)
        form = choose_attend_form(size.heads, size.head_dim, hopper)
        whole = attend.run(form, **given, splits=1)
        for splits in (2, 3, 7, 10):
            united = attend.run(form, **given, splits=splits)
            assert_near(united, whole, given["positions"] >= 0, SAME_SUMS, f"{size.name}, {splits} parts")


@cases(kernels.attend)
def test_rows_dealt_to_ranks(case: Case) -> None:
    """Local rows of one of three ranks, and rows in another order: what all rows give, to the bit at as many parts."""
    from octavo.kernels.triton_backend import attend
    from octavo.kernels.triton_backend.tuning import HOPPER

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel under test is Hopper's")
    given = on_device(arguments_of(case, random_batch(30, seed=9), RELEASED, packed=True), "cuda")
    whole = attend.run(HOPPER, **given, splits=2)
    for rows in (torch.arange(1, 30, 3), torch.arange(29, -1, -1), torch.tensor([17])):
        part = {name: given[name][rows.cuda()] for name in ("query", "slots", "positions")}
        if given["selected"] is not None:
            part["selected"] = given["selected"][rows.cuda()]
        assert same_bits(attend.run(HOPPER, **given | part, splits=2), whole[rows.cuda()])


@every_storage
def test_whole_rows_have_the_same_bits_whatever_their_neighbours(packed: bool) -> None:
    """Some of 300 rows, in another order and dealt to programs otherwise; a few, most programs without a row."""
    given = far(300, 64, packed)
    expected = whole_rows(given)
    for rows in (torch.arange(299, -1, -1), torch.arange(0, 300, 2), torch.tensor([7, 299, 31])):
        part = {name: given[name][rows.cuda()] for name in ("query", "slots", "positions", "selected")}
        assert same_bits(whole_rows(given | part), expected[rows.cuda()]), f"{len(rows)} rows"


@every_storage
@pytest.mark.parametrize("top_k", (64, 320))
def test_whole_rows_of_an_odd_number_of_tiles(top_k: int, packed: bool) -> None:
    """Against the same rows in parts, by another kernel."""
    from octavo.kernels.triton_backend import attend
    from octavo.kernels.triton_backend.tuning import HOPPER

    given = far(240, 64, packed)
    given["selected"] = given["selected"][:, :top_k].contiguous()
    whole, parts = whole_rows(given), attend.run(HOPPER, **given, splits=3)
    assert_near(whole, parts, given["positions"] >= 0, ATTENTION_TOLERANCE, f"{top_k} selected")


@cases(kernels.attend)
@every_storage
def test_whole_rows_replayed_on_other_inputs_equal_eager(case: Case, packed: bool) -> None:
    """To the bit: programs of several rows, a row of one tile of keys beside one of five, and no live row."""
    static = on_device(arguments_of(case, random_batch(240, seed=1), RELEASED, packed), "cuda")
    whole_rows(static)  # compiles
    with waits("error"):
        whole_rows(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = whole_rows(static)
    for seed, batch in enumerate((random_batch(240, seed=2), Batch((Request(7, 0, 240),)), Batch((), dead=240))):
        given = on_device(arguments_of(case, batch, RELEASED, packed, seed=seed), "cuda")
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        assert same_bits(result, whole_rows(given)), f"step {seed}"


@cases(kernels.attend, kernels.commit_window)
@every_storage
@pytest.mark.parametrize("size", (MINI, RELEASED), ids=lambda size: size.name)
def test_replay_on_other_inputs_equals_eager(case: Case, size: Size, packed: bool) -> None:
    """Results and state, to the bit; and nothing waits for the device."""
    overload = case.operator.backends["triton"].overload
    static = on_device(arguments_of(case, random_batch(29, seed=1), size, packed), "cuda")
    call_triton(case, static)  # compiles
    with waits("error"):
        overload(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = overload(**static)
    results = () if result is None else (result,)
    for seed, batch in enumerate(STEPS):
        given = on_device(arguments_of(case, batch, size, packed, seed=seed), "cuda")
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        expected = call_triton(case, given)
        assert_same(Outcome(results, {name: static[name] for name in expected.state}), expected, f"step {seed}")


@cases(kernels.commit_window)
def test_windows_are_the_references(case: Case) -> None:
    for size in (MINI, WIDE, RELEASED):
        long = Batch((Request(3, 5, 2 * size.window + 3), Request(1, 0, size.window), Request(6, 7, 1)), dead=50)
        for batch in (random_batch(1, 1), random_batch(29, 2), random_batch(240, 3), long, Batch((), dead=5)):
            given = poisoned(case, arguments_of(case, batch, size), 3)
            on_cuda = on_device(given, "cuda")
            assert_same(call_triton(case, on_cuda), call_torch(case, on_cuda), f"{size.name}, {batch.rows} rows")


@cases(kernels.attend, kernels.commit_window)
def test_what_is_registered(case: Case) -> None:
    backend = case.operator.backends["triton"]
    assert backend.capturable == backend.devices == {"cuda"}
    given = on_device(arguments_of(case, random_batch(7, seed=1)), "cuda")
    done = torch.library.opcheck(backend.overload, (), given)
    assert set(done.values()) == {"SUCCESS"}
    empty = {name: value[:0] if name in ROWS and value is not None else value for name, value in given.items()}
    for result in call_triton(case, empty).results:
        assert result.shape[0] == 0
