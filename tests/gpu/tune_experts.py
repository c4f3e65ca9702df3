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
from octavo.kernels.triton_backend.expert_tiles import TILES, Launch, Narrow, Tile, choose_tiles
from tests.gpu.test_triton_experts import true_shapes
from tests.kernels.cases import Arguments
from tests.kernels.compiled_launches import launches_compiled

RESIDENT = 48
REPEATS = 12
WEIGHTS = 3
"""Sets of weights in turn, 0.9 GB each: none waits in a cache."""


def candidates(rows: int) -> list[Narrow | Tile]:
    """Tiles of about the height of the table's, both products cut in the same way; some will not fit."""
    chosen, _ = choose_tiles(rows, 6, 384, whole=True)
    if isinstance(chosen, Narrow):
        return list(dict.fromkeys([chosen, *_narrow_candidates(chosen.rows)]))
    heights = {64: (32, 64), 128: (64, 128)}[chosen.rows]
    found: list[Narrow | Tile] = [TILES[height] for height in heights]
    for height in heights:
        launches = (
            [Launch(warps=8, blocks=2, stages=s, programs=2, registers=128) for s in (2, 3)]
            + [Launch(warps=8, stages=s, programs=2, registers=128) for s in (4, 5)]
            + [Launch(warps=4, stages=s, programs=p, registers=r) for s, p, r in ((3, 3, 168), (4, 2, None))]
            if height <= 32
            else [Launch(warps=8, stages=s, programs=1) for s in (3, 4, 6)]
            + [Launch(warps=8, blocks=2, stages=3, programs=1)]
        )
        for launch in launches:
            for outputs in (128, 256):
                found.append(Tile(rows=height, gate_and_up=launch, down=launch, outputs=outputs))
    return list(dict.fromkeys(found))


def _narrow_candidates(height: int) -> Iterator[Narrow]:
    """As many programs at once as shared memory and registers have room for."""
    for rows in {8: (8, 16), 16: (8, 16, 32), 32: (16, 32)}[height]:
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


def tails(tile: Narrow | Tile) -> list[Tile | None]:
    return [None, *(TILES[rows] for rows in (16, 32) if isinstance(tile, Tile) and tile.rows >= 64)]


def compile_one(rows: int, tile: Narrow | Tile) -> str:
    """In a process without the device; what it compiles stays in Triton's cache."""
    given = {"w1": (2304, 2560), "s1": (2304, 160), "w3": (2304, 2560), "s3": (2304, 160)}
    matrices = {name: torch.empty(RESIDENT, *shape, dtype=torch.uint8) for name, shape in given.items()}
    w2 = torch.empty(RESIDENT, 5120, 1152, dtype=torch.uint8)
    s2 = torch.empty(RESIDENT, 5120, 72, dtype=torch.uint8)
    table, count = torch.empty(RESIDENT, 3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    work = steps.Work(torch.empty(rows * 6, dtype=torch.int32), [(tile, table, count)])
    with launches_compiled() as launched:
        try:
            rounded, weights = torch.empty(rows, 5120, dtype=torch.bfloat16), torch.empty(rows, 6)
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
    chosen_tile, chosen_tail = choose_tiles(rows, 6, 384, whole=True)
    print(f"{rows} rows, {pairs} pairs here, {int(counts.max())} of one expert at most")
    for product, matrices in (("gate_and_up", 2), ("down", 1)):
        times: list[tuple[float, Narrow | Tile, Tile | None]] = []
        for tile, tail in _different(product, rows):
            work = steps.place(chosen, counts, tile, tail)
            hidden = rounded.new_zeros(rows * 6, 2304)
            try:
                times.append((timed(_product(product, rounded, weights, work, hidden, sets)), tile, tail))
            except Exception as error:
                print(f"  {product} {_name(product, tile, tail)}: {type(error).__name__}: {str(error)[:90]}")
        times.sort(key=lambda entry: entry[0])
        for number, (seconds, tile, tail) in enumerate(times):
            mine = _name(product, tile, tail) == _name(product, chosen_tile, chosen_tail)
            if number < 4 or mine:
                print(
                    f"{'*' if mine else ' '} {product} {seconds * 1e6:7.1f} us "
                    f"{matrices * bytes_read / seconds / 1e12:5.2f} TB/s "
                    f"{2 * matrices * pairs * 5120 * 2304 / seconds / 1e12:5.0f} TFLOP/s  {_name(product, tile, tail)}",
                    flush=True,
                )


def _different(product: str, rows: int) -> list[tuple[Narrow | Tile, Tile | None]]:
    """Candidates that differ in this product."""
    pairs = [(tile, tail) for tile in candidates(rows) for tail in tails(tile)]
    return list({_name(product, tile, tail): (tile, tail) for tile, tail in pairs}.values())


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


def _name(product: str, tile: Narrow | Tile, tail: Tile | None) -> str:
    if isinstance(tile, Narrow):
        return (
            f"narrow, {tile.rows} rows outputs {tile.outputs} warps {tile.warps} stages {tile.stages} "
            f"programs {tile.programs} registers {tile.registers}"
        )
    launch = tile.down if product == "down" else tile.gate_and_up
    outputs = f" outputs {tile.outputs}" if product == "down" else ""
    return (
        f"{tile.rows}+{tail.rows if tail else 0} rows{outputs} warps {launch.warps} blocks {launch.blocks} "
        f"stages {launch.stages} programs {launch.programs} registers {launch.registers}"
    )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [128, 512, 2048, 8192])
