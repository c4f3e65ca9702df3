"""Times ways to cut the products with F8 weights on this device, for ``octavo/kernels/triton_backend/linear_tiles.py``.

    python -m tests.gpu.tune_linear [rows ...]

Compiles everything first, on all processors. Not a test: nothing here passes or fails. One line a candidate, the best
first; ``*`` marks what the table has, ``library`` what comes beyond it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.triton_backend import linear_products as steps
from octavo.kernels.triton_backend.linear_tiles import Launch, choose_launch, choose_launch_of_two
from octavo.runtime.bench_kernels.case import copies_for
from tests.kernels.compiled_launches import launches_compiled

PRODUCTS = {
    "q_a": (1280, 5120, 1),
    "kv": (512, 5120, 1),
    "q_b": (32768, 1280, 1),
    "o_a": (8192, 4096, 8),
    "o_b": (5120, 8192, 1),
    "down": (5120, 2304, 1),
    "gate and up": (2304, 5120, 1),
}
"""Outputs, inputs and groups."""
SHOWN = 3


def candidates(name: str, rows: int) -> Iterator[Launch]:
    """Some will not fit."""
    heights: tuple[int, ...] = (16 if rows <= 16 else 32,) if rows <= 32 else (64,) if rows <= 64 else (64, 128)
    cuts: tuple[tuple[int, int, int, int, int], ...]
    if rows <= 32:
        cuts = (
            *((64, 4, 1, 4, 4), (64, 4, 1, 6, 3), (64, 4, 1, 6, 1), (64, 4, 2, 3, 3)),
            *((128, 8, 1, 3, 2), (128, 8, 1, 4, 2), (256, 8, 1, 3, 1), (256, 8, 1, 4, 1)),
        )
    else:
        cuts = (
            *((64, 4, 1, 4, 2), (64, 4, 1, 4, 1), (128, 8, 1, 3, 2), (128, 8, 1, 4, 1)),
            *((256, 8, 1, 3, 1), (256, 8, 1, 4, 1)),
        )
    for height in heights:
        for outputs, warps, blocks, stages, programs in cuts:
            for prepared in (True, False) if rows <= 32 and name != "down" else (True,):
                if height * outputs <= (64 if name == "gate and up" else 128) * 256:
                    yield Launch(
                        rows=height,
                        outputs=outputs,
                        warps=warps,
                        blocks=blocks,
                        stages=stages,
                        programs=programs,
                        prepared=prepared,
                    )


def call(name: str, launch: Launch | None, x: Tensor, weights: list[Tensor]) -> object:
    """One product, with what stands before and behind it, but for the rows that ``down`` gets prepared."""
    _, inputs, groups = PRODUCTS[name]
    weight, scale = weights[:2]
    if launch is None:
        source = steps.prepared_rows(x, True, False) if groups == 1 and name != "down" else x
        return torch.mm(source[:, :inputs], steps.bf16_weight(weight, scale).t()) if groups == 1 else None
    if name == "gate and up":
        source, kind = steps.prepare(launch, x, True)
        return steps.multiply_both(launch, source, kind, *weights)
    if name == "down":
        return steps.multiply_prepared(launch, x, "prepared", weight, scale, 1)
    return steps.multiply_few(launch, x, weight, scale, groups, groups == 1)


def inputs_of(name: str, rows: int, device: str) -> tuple[Tensor, list[Tensor]]:
    outputs, inputs, groups = PRODUCTS[name]
    weights = []
    for _ in range(2 if name == "gate and up" else 1):
        weights.append(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=device))
        weights.append(torch.empty(-(-outputs // 32), inputs // 32, dtype=torch.uint8, device=device))
        if device != "cpu":
            weights[-2].copy_(torch.randn(outputs, inputs, device=device))
            weights[-1].fill_(118)
    x = torch.empty(rows, inputs * groups, dtype=torch.bfloat16, device=device)
    return x if device == "cpu" else x.normal_(), weights


def compile_one(name: str, rows: int, launch: Launch) -> str:
    """In a process without the device; what it compiles stays in Triton's cache."""
    with launches_compiled() as launched:
        try:
            call(name, launch, *inputs_of(name, rows, "cpu"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return " ".join(f"{one.kernel} {one.registers} registers {one.stack_bytes} spilled" for one in launched)


def main(counts: list[int]) -> None:
    start = time.perf_counter()
    wanted: dict[Any, tuple[str, int, Launch]] = {}
    for rows in counts:
        for name in PRODUCTS:
            for launch in candidates(name, rows):
                wanted.setdefault((name, launch), (name, rows, launch))
    context = get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        done = [pool.submit(compile_one, *one) for one in wanted.values()]
        failed = [one.result() for one in as_completed(done) if "Error" in one.result()]
    print(f"{len(wanted)} launches compiled in {time.perf_counter() - start:.0f} s, {len(failed)} failed", flush=True)
    print("\n".join(sorted({line[:150] for line in failed})[:5]))
    for rows in counts:
        for name in PRODUCTS:
            tune(name, rows)
    print(f"{time.perf_counter() - start:.0f} s")


def tune(name: str, rows: int) -> None:
    outputs, inputs, groups = PRODUCTS[name]
    moved = float(outputs * inputs) * (2 if name == "gate and up" else 1)
    sets = [inputs_of(name, rows, "cuda") for _ in range(copies_for(moved, 32))]
    mine = choose_launch_of_two(rows) if name == "gate and up" else choose_launch(rows, outputs)
    times: list[tuple[float, Launch | None]] = []
    library = [None] if groups == 1 and rows >= 64 else []
    for launch in [*library, *candidates(name, rows)]:
        try:
            times.append((timed(lambda number: call(name, launch, *sets[number]), len(sets)), launch))  # noqa: B023
        except Exception as error:
            print(f"  {name} {launch}: {type(error).__name__}: {str(error)[:90]}")
            torch.cuda.synchronize()
    times.sort(key=lambda entry: entry[0])
    print(f"{name}, {rows} rows")
    for number, (seconds, launch) in enumerate(times):
        if number < SHOWN or launch == mine or launch is None:
            print(
                f"{'*' if launch == mine else ' '} {seconds * 1e6:7.1f} us {moved / seconds / 1e12:5.2f} TB/s "
                f"{2 * moved * rows / seconds / 1e12:4.0f} TFLOP/s  {_name(launch)}",
                flush=True,
            )


def timed(once: Callable[[int], object], copies: int) -> float:
    """Least seconds of a call, in graphs that go around all copies."""
    calls = -(-8 // copies) * copies
    once(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            once(number % copies)
    found = []
    for _ in range(5):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        found.append(float(before.elapsed_time(after)))
    return min(found) / 1e3 / calls


def _name(launch: Launch | None) -> str:
    if launch is None:
        return "library"
    return (
        f"{launch.rows} rows outputs {launch.outputs} warps {launch.warps} blocks {launch.blocks} "
        f"stages {launch.stages} programs {launch.programs}{' prepared' if launch.prepared else ''}"
    )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [1, 16, 32, 64, 128, 256])
