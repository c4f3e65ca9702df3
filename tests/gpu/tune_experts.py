"""Times ways to cut the products of ``experts`` on this device, for ``octavo/kernels/triton_backend/expert_tiles.py``.

    python -m tests.gpu.tune_experts [rows ...]

Compiles everything first, on all processors. Not a test: nothing here passes or fails. One line a candidate, the best
first; ``*`` marks what the table has.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch
from torch import Tensor

from octavo.kernels.torch_backend.f32_product import f32_product
from octavo.kernels.triton_backend import experts as steps
from octavo.kernels.triton_backend.expert_tiles import WIDE_TILES, Narrow, Tile, Wide, choose_tiles
from octavo.kernels.triton_backend.expert_wide import round_pairs_in_order
from tests.gpu.test_triton_experts import true_shapes
from tests.kernels.cases import Arguments
from tests.kernels.compiled_launches import launches_compiled

RESIDENT = 48
WIDTHS = 5120, 2304
REPEATS = 12
WEIGHTS = 3
"""Sets of weights in turn, 0.9 GB each: none waits in a cache."""


def candidates(rows: int) -> list[Narrow | Wide]:
    """What the table has, and other tiles; both products are cut in the same way, and some will not fit."""
    chosen = choose_tiles(rows, 6, 384, WIDTHS, hopper=True)
    assert not isinstance(chosen, Tile), "true widths are whole"
    return list(dict.fromkeys([chosen, *_wide_candidates(), *_narrow_candidates()]))


def _wide_candidates() -> Iterator[Wide]:
    for _, form in WIDE_TILES:
        for stages in range(2, form.stages + 1):
            for registers in (form.registers - 8, form.registers, form.registers + 8):
                yield Wide(rows=form.rows, stages=stages, registers=registers)


def _narrow_candidates() -> Iterator[Narrow]:
    """As many programs at once as shared memory and registers have room for."""
    for rows in (8, 16):
        for outputs, warps in ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8)):
            for stages in (2, 3, 4, 6):
                bytes_held = stages * (outputs * 136 + rows * 512)
                for registers in (None, 72, 80):
                    yield Narrow(
                        rows=rows,
                        outputs=outputs,
                        warps=warps,
                        stages=stages,
                        programs=min(228 * 1024 // (bytes_held + 1024), 65536 // (warps * 32 * (registers or 128))),
                        registers=registers,
                    )


def compile_one(rows: int, tile: Narrow | Wide) -> str:
    """In a process without the device; what it compiles stays in Triton's cache."""
    given = {"w1": (2304, 2560), "s1": (2304, 160), "w3": (2304, 2560), "s3": (2304, 160)}
    matrices = {name: torch.empty(RESIDENT, *shape, dtype=torch.uint8) for name, shape in given.items()}
    w2 = torch.empty(RESIDENT, 5120, 1152, dtype=torch.uint8)
    s2 = torch.empty(RESIDENT, 5120, 72, dtype=torch.uint8)
    order, tiles, totals = (torch.empty(*shape, dtype=torch.int32) for shape in ((rows * 6,), (RESIDENT, 3), (2,)))
    work = steps.Work(tile, order, tiles, totals)
    with launches_compiled() as launched:
        try:
            rounded, weights = torch.empty(rows * 6, 5120, dtype=torch.bfloat16), torch.empty(rows, 6)
            hidden = steps.multiply_gate_and_up(rounded, weights, work, **matrices, limit=10.0)
            steps.multiply_down(hidden, work, w2, s2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return " ".join(f"{one.kernel} {one.registers} registers {one.stack_bytes} spilled" for one in launched)


def main(counts: list[int]) -> None:
    start = time.perf_counter()
    wanted = {(counts[0], tile) for rows in counts for tile in candidates(rows)}
    context = get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        done = {pool.submit(compile_one, *one): one for one in wanted}
        failed = sum("Error" in one.result() for one in as_completed(done))
    print(f"{len(wanted)} tiles compiled in {time.perf_counter() - start:.0f} s, {failed} failed", flush=True)
    for rows in counts:
        try:
            tune(rows)
        except Exception as error:
            print(f"{rows} rows: {type(error).__name__}: {error}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


def tune(rows: int) -> None:
    sets = [true_shapes(rows, RESIDENT, seed) for seed in range(WEIGHTS)]
    given = sets[0]
    given["live"].fill_(True)
    rounded, counts = steps.round_inputs(given["x"], RESIDENT)
    routing = given["live"], given["image"], given["bias"], given["bias_vl"]
    chosen, weights = steps.choose(f32_product(given["x"], given["gate"]), *routing, counts, 0, 6, 1.5)
    pairs = int((chosen >= 0).sum())
    bytes_read = int((counts > 0).sum()) * 2304 * 5120 * (0.5 + 1 / 32)
    table = choose_tiles(rows, 6, 384, WIDTHS, hopper=True)
    print(f"{rows} rows, {pairs} pairs here, {int(counts.max())} of one expert at most")
    for product, matrices in (("gate_and_up", 2), ("down", 1)):
        times: list[tuple[float, Narrow | Wide]] = []
        for tile in candidates(rows):
            work = steps.place(chosen, counts, tile)
            hidden = rounded.new_zeros(rows * 6, 2304)
            ordered = isinstance(tile, Wide)
            given_rows = round_pairs_in_order(given["x"], work.order, work.totals) if ordered else rounded
            try:
                times.append((timed(_product(product, given_rows, weights, work, hidden, sets)), tile))
            except Exception as error:
                print(f"  {product} {tile}: {type(error).__name__}: {str(error)[:90]}")
        times.sort(key=lambda entry: entry[0])
        for number, (seconds, tile) in enumerate(times):
            if number < 4 or tile == table:
                print(
                    f"{'*' if tile == table else ' '} {product} {seconds * 1e6:7.1f} us "
                    f"{matrices * bytes_read / seconds / 1e12:5.2f} TB/s "
                    f"{2 * matrices * pairs * 5120 * 2304 / seconds / 1e12:5.0f} TFLOP/s  {tile}",
                    flush=True,
                )


def _product(
    product: str, rounded: Tensor, weights: Tensor, work: steps.Work, hidden: Tensor, sets: list[Arguments]
) -> Callable[[int], object]:
    def call(turn: int) -> object:
        w = sets[turn % WEIGHTS]
        if product == "down":
            return steps.multiply_down(hidden, work, w["w2"], w["s2"])
        return steps.multiply_gate_and_up(rounded, weights, work, w["w1"], w["s1"], w["w3"], w["s3"], 10.0)

    return call


def timed(call: Callable[[int], object]) -> float:
    """Median seconds of a call on the device."""
    call(0)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(5_000_000)  # the host runs ahead, so that launches cost nothing
    for turn, (before, after) in enumerate(events):
        before.record()
        call(turn)
        after.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [before.elapsed_time(after) for before, after in events]
    return statistics.median(milliseconds) / 1e3


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [128, 512, 2048, 8192])
