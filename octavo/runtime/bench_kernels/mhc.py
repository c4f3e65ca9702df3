"""Cases of mHC at the released model's widths, and of the products that the model does in F32.

What compilers may fuse is measured as Inductor makes it, for any number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.operator import Operator
from octavo.runtime.bench_kernels.case import Call, KernelCase, Prepared, call_copy, copies_for

_HIDDEN, _STREAMS, _MIXES, _EPSILON = 5120, 4, 24, 1e-6
_ROWS = (1, 16, 64, 128, 512, 2048, 8192)
_HEAD_ROWS = (1, 16, 128, 512)
"""Requests, not tokens."""
_OUTPUTS = {"router": 384, "compressor": 512, "head": 129280}
_MOST_COPIES = 32

Inputs = Sequence[Mapping[str, Any]]


def site_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_prepare_site, rows))


def mix_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_prepare_mix, rows))


def collapse_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_prepare_collapse, rows))


def expand_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_prepare_expand, rows))


def linear_f32_cases() -> Iterator[KernelCase]:
    for name, outputs in _OUTPUTS.items():
        for rows in _HEAD_ROWS if name == "head" else _ROWS:
            yield KernelCase(f"{name}, {rows} rows", functools.partial(_prepare_linear_f32, rows, outputs))


@torch.no_grad()
def _prepare_site(rows: int) -> Prepared:
    """Against the three operators that it stands for, each as the engine would run it."""
    moved = 2.0 * rows * 2 * (_STREAMS + 1) * _HIDDEN + 4.0 * _MIXES * _STREAMS * _HIDDEN + 8.0 * rows * _MIXES
    weights = [_mix_weights() for _ in range(copies_for(moved, _MOST_COPIES))]
    inputs = [
        {
            **_expand_inputs(rows),
            "pre": torch.rand(rows, _STREAMS, device="cuda"),
            "weight": torch.ones(_HIDDEN, dtype=torch.bfloat16, device="cuda"),
            "collapse_epsilon": _EPSILON,
            **own,
        }
        for own in weights
    ]
    expand = _compiled(kernels.mhc_expand, "reference")
    collapse = _compiled(kernels.mhc_collapse, "reference")
    mix = kernels.mhc_mix.backends["triton"].overload

    def three(number: int) -> object:
        given = inputs[number]
        streams = expand(*(given[name] for name in ("streams", "y", "post", "comb")))
        mixed = mix(streams, **weights[number])
        return streams, collapse(streams, given["pre"], given["weight"], _EPSILON), mixed

    return Prepared(
        variants={
            "triton": functools.partial(call_copy, kernels.mhc_site.backends["triton"].overload, inputs),
            "three operators": three,
        },
        copies=len(inputs),
        operations=2.0 * rows * (_MIXES + 2 + _STREAMS) * _STREAMS * _HIDDEN,
        bytes=moved,
    )


@torch.no_grad()
def _prepare_mix(rows: int) -> Prepared:
    moved = 2.0 * rows * _STREAMS * _HIDDEN + 4.0 * _MIXES * _STREAMS * _HIDDEN + 4.0 * rows * _MIXES
    inputs = [{"streams": _streams(rows), **_mix_weights()} for _ in range(copies_for(moved, _MOST_COPIES))]
    return Prepared(
        variants={
            "triton": functools.partial(call_copy, kernels.mhc_mix.backends["triton"].overload, inputs),
            "torch, Inductor": _by_inductor(kernels.mhc_mix, "torch", inputs),
        },
        copies=len(inputs),
        operations=2.0 * rows * _MIXES * _STREAMS * _HIDDEN,
        bytes=moved,
    )


@torch.no_grad()
def _prepare_collapse(rows: int) -> Prepared:
    moved = 2.0 * rows * (_STREAMS + 1) * _HIDDEN
    inputs = [
        {
            "streams": _streams(rows),
            "pre": torch.rand(rows, _STREAMS, device="cuda"),
            "weight": torch.ones(_HIDDEN, dtype=torch.bfloat16, device="cuda"),
            "epsilon": _EPSILON,
        }
        for _ in range(copies_for(moved, _MOST_COPIES))
    ]
    return _by_inductor_alone(kernels.mhc_collapse, inputs, 2.0 * rows * _STREAMS * _HIDDEN, moved)


@torch.no_grad()
def _prepare_expand(rows: int) -> Prepared:
    moved = 2.0 * rows * (2 * _STREAMS + 1) * _HIDDEN
    inputs = [_expand_inputs(rows) for _ in range(copies_for(moved, _MOST_COPIES))]
    return _by_inductor_alone(kernels.mhc_expand, inputs, 2.0 * rows * _STREAMS * (_STREAMS + 1) * _HIDDEN, moved)


@torch.no_grad()
def _prepare_linear_f32(rows: int, outputs: int) -> Prepared:
    """Against the product of promoted values: F32, without TF32."""
    moved = 2.0 * outputs * _HIDDEN + 2.0 * rows * _HIDDEN + 4.0 * rows * outputs
    inputs = [
        {
            "x": torch.randn(rows, _HIDDEN, device="cuda").to(torch.bfloat16),
            "weight": (torch.randn(outputs, _HIDDEN, device="cuda") * _HIDDEN**-0.5).to(torch.bfloat16),
        }
        for _ in range(copies_for(moved, _MOST_COPIES))
    ]
    promoted = [{name: value.float() for name, value in given.items()} for given in inputs]

    def f32(number: int) -> Tensor:
        return torch.mm(promoted[number]["x"], promoted[number]["weight"].t())

    return Prepared(
        variants={
            "torch": functools.partial(call_copy, kernels.linear_f32.backends["torch"].overload, inputs),
            "torch, Inductor": _by_inductor(kernels.linear_f32, "torch", inputs),
            "torch, F32": f32,
        },
        copies=len(inputs),
        operations=2.0 * rows * outputs * _HIDDEN,
        bytes=moved,
    )


def _expand_inputs(rows: int) -> dict[str, Any]:
    return {
        "streams": _streams(rows),
        "y": torch.randn(rows, _HIDDEN, device="cuda").to(torch.bfloat16),
        "post": torch.rand(rows, _STREAMS, device="cuda"),
        "comb": torch.rand(rows, _STREAMS, _STREAMS, device="cuda"),
    }


def _mix_weights() -> dict[str, Any]:
    return {
        "fn": torch.randn(_MIXES, _STREAMS * _HIDDEN, device="cuda") * (_STREAMS * _HIDDEN) ** -0.5,
        "scale": torch.ones(3, device="cuda"),
        "base": torch.randn(_MIXES, device="cuda"),
        "iterations": 20,
        "epsilon": _EPSILON,
        "norm_epsilon": _EPSILON,
    }


def _streams(rows: int) -> Tensor:
    return torch.randn(rows, _STREAMS, _HIDDEN, device="cuda").to(torch.bfloat16)


def _by_inductor_alone(operator: Operator[..., object], inputs: Inputs, operations: float, moved: float) -> Prepared:
    return Prepared(
        variants={"reference, Inductor": _by_inductor(operator, "reference", inputs)},
        copies=len(inputs),
        operations=operations,
        bytes=moved,
    )


def _by_inductor(operator: Operator[..., object], backend: str, inputs: Inputs) -> Call:
    return functools.partial(call_copy, _compiled(operator, backend), inputs)


def _compiled(operator: Operator[..., object], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(operator.backends[backend].function, dynamic=True, fullgraph=True)
    return compiled
