"""Cases of ``linear_f8``, ``linear_f8_pair``, ``grouped_linear`` and ``shared_expert`` at the released model's widths.

The library's part multiplies unquantised rows by weights in BF16, which take twice the memory. "BF16 held": ours, with
weights in BF16 at hand, which steps of many rows multiply by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.operator import Operator
from octavo.kernels.torch_backend.dequantise import bf16_tiles
from octavo.runtime.bench_kernels.case import KernelCase, Prepared, call_copy, copies_for

_HIDDEN, _INNER, _LIMIT = 5120, 2304, 10.0
_HEADS, _HEAD_DIM, _GROUPS, _RANK = 64, 512, 8, 1024
_SHAPES = ((5120, 1280), (1280, 32768), (8192, 5120), (5120, 512))
"""Inputs and outputs: query down and up, output projection, latent."""
_PAIR = {"a": 1280, "b": 512}
"""Outputs by weight: query down and latent, both of the hidden rows."""
_ROWS = (1, 16, 64, 128, 512, 2048, 8192)
_MOST_COPIES = 32

Inputs = Sequence[Mapping[str, Any]]


def linear_cases() -> Iterator[KernelCase]:
    for inputs, outputs in _SHAPES:
        for rows in _ROWS:
            yield KernelCase(f"{inputs} to {outputs}, {rows} rows", functools.partial(_linear, rows, inputs, outputs))


def linear_pair_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_pair, rows))


def grouped_linear_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_grouped, rows))


def shared_expert_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_shared, rows))


@torch.no_grad()
def _linear(rows: int, inputs: int, outputs: int) -> Prepared:
    copies = copies_for(float(inputs * outputs), _MOST_COPIES)
    given: Inputs = [{"x": _rows(rows, inputs), **_weight("weight", "scale", outputs, inputs)} for _ in range(copies)]
    wide = [bf16_tiles(one["weight"], one["scale"]) for one in given]

    def library(number: int) -> Tensor:
        x: Tensor = given[number]["x"]
        return torch.mm(x, wide[number].t())

    held = [{**one, "weight_bf16": each} for one, each in zip(given, wide, strict=True)]
    return _prepared(kernels.linear_f8, given, held, library, rows, [(outputs, inputs)], inputs + outputs)


@torch.no_grad()
def _pair(rows: int) -> Prepared:
    """Against the two operators that it stands for, and one product of the library with both weights."""
    given: list[dict[str, Any]] = []
    for _ in range(copies_for(float(_HIDDEN * sum(_PAIR.values())), _MOST_COPIES)):
        given.append({"x": _rows(rows, _HIDDEN)})
        for name, outputs in _PAIR.items():
            given[-1] |= _weight(f"weight_{name}", f"scale_{name}", outputs, _HIDDEN)
    wide = [torch.cat([bf16_tiles(one[f"weight_{n}"], one[f"scale_{n}"]) for n in _PAIR]) for one in given]
    alone = kernels.linear_f8.backends["triton"].overload

    def two(number: int) -> object:
        one = given[number]
        return tuple(alone(one["x"], one[f"weight_{name}"], one[f"scale_{name}"]) for name in _PAIR)

    def library(number: int) -> Tensor:
        x: Tensor = given[number]["x"]
        return torch.mm(x, wide[number].t())

    weights = _HIDDEN * sum(_PAIR.values())
    return Prepared(
        variants={
            "triton": functools.partial(call_copy, kernels.linear_f8_pair.backends["triton"].overload, given),
            "two operators": two,
            "cuBLAS, BF16": library,
        },
        copies=len(given),
        operations=2.0 * rows * weights,
        bytes=_bytes(weights, rows, _HIDDEN + sum(_PAIR.values())),
    )


@torch.no_grad()
def _grouped(rows: int) -> Prepared:
    outputs, inputs = _GROUPS * _RANK, _HEADS * _HEAD_DIM // _GROUPS
    given: Inputs = [
        {"x": _rows(rows, _HEADS, _HEAD_DIM), **_weight("weight", "scale", outputs, inputs), "groups": _GROUPS}
        for _ in range(copies_for(float(inputs * outputs), _MOST_COPIES))
    ]
    held = [{**one, "weight_bf16": bf16_tiles(one["weight"], one["scale"])} for one in given]
    wide = [one["weight_bf16"].unflatten(0, (_GROUPS, -1)).transpose(1, 2) for one in held]

    def library(number: int) -> Tensor:
        return torch.bmm(given[number]["x"].view(rows, _GROUPS, inputs).transpose(0, 1), wide[number])

    moved = inputs * _GROUPS + outputs
    return _prepared(kernels.grouped_linear, given, held, library, rows, [(outputs, inputs)], moved)


@torch.no_grad()
def _shared(rows: int) -> Prepared:
    shapes = {"1": (_INNER, _HIDDEN), "2": (_HIDDEN, _INNER), "3": (_INNER, _HIDDEN)}
    given: list[dict[str, Any]] = []
    for _ in range(copies_for(3.0 * _HIDDEN * _INNER, _MOST_COPIES)):
        given.append({"x": _rows(rows, _HIDDEN), "limit": _LIMIT})
        for name, shape in shapes.items():
            given[-1] |= _weight(f"w{name}", f"s{name}", *shape)
    wide = [{n: bf16_tiles(one[f"w{n}"], one[f"s{n}"]) for n in shapes} for one in given]
    held = [
        {**one, "both_bf16": torch.cat([each["1"], each["3"]]), "w2_bf16": each["2"]}
        for one, each in zip(given, wide, strict=True)
    ]

    def library(number: int) -> Tensor:
        """Products alone."""
        x: Tensor = given[number]["x"]
        torch.mm(x, wide[number]["1"].t())
        return torch.mm(torch.mm(x, wide[number]["3"].t()), wide[number]["2"].t())

    return _prepared(kernels.shared_expert, given, held, library, rows, list(shapes.values()), 2 * _HIDDEN)


def _prepared(
    operator: Operator[..., Any],
    given: Inputs,
    held: Inputs,
    library: Callable[[int], Tensor],
    rows: int,
    shapes: list[tuple[int, int]],
    channels: int,
) -> Prepared:
    """``channels`` BF16 numbers of a row are read or written; weights of all ``shapes`` and their scales are read."""
    weights = sum(outputs * inputs for outputs, inputs in shapes)
    triton, plain = (operator.backends[name].overload for name in ("triton", "torch"))
    ours = {
        "triton": functools.partial(call_copy, triton, given),
        "triton, BF16 held": functools.partial(call_copy, triton, held),
        "torch": functools.partial(call_copy, plain, given),
    }
    return Prepared(
        variants={**ours, "cuBLAS, BF16": library},
        copies=len(given),
        operations=2.0 * rows * weights,
        bytes=_bytes(weights, rows, channels),
    )


def _bytes(weights: int, rows: int, channels: int) -> float:
    """Of so many weights in F8 with their scales, and of rows of so many channels in BF16."""
    return weights * (1 + 1 / 1024) + 2.0 * rows * channels


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _weight(weight: str, scale: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    codes = torch.randn(outputs, inputs, device="cuda") * 64 * inputs**-0.5
    tiles = torch.randint(119, 124, (-(-outputs // 32), -(-inputs // 32)), device="cuda")
    return {weight: codes.to(torch.float8_e4m3fn), scale: tiles.to(torch.uint8)}
