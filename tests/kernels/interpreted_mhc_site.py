"""Triton's interpreter runs ``mhc_site``: python -m tests.kernels.interpreted_mhc_site, with TRITON_INTERPRET=1.

It has no PTX and no products of BF16: streams stay F32 here, so that nothing is rounded, and a few functions are
replaced by what they mean. Parts, masks and sums are those of the kernels. Prints the largest error of every shape
against the reference, or raises.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.triton_backend import mhc_kernels, mhc_site, mhc_site_kernels
from octavo.kernels.triton_backend.mhc_tuning import choose_site_form
from tests.kernels.interpreted_mhc import split_bf16
from tests.kernels.run_interpreted import launch_one_after_another

LARGEST = 3e-6
"""Of coefficients of about one and rows of size one: a few F32 steps, of 20 Sinkhorn rounds and of a norm. One channel
left out gives 5e-3."""


def main(long_form: bool) -> None:
    replace_what_the_interpreter_lacks()
    torch.manual_seed(0)
    for rows, width, like in (
        (3, 200, 1),
        (19, 96, 64),
        (65, 37, 128),
        (5, 1100, 512),
        *(((1, 5120, 1), (40, 128, 16), (130, 256, 256), (600, 40, 8192)) if long_form else ()),
    ):
        error = compare(rows, width, like)
        print(f"{rows} rows of {width} channels, cut as {like} rows: {error:.1e}", flush=True)
    print("sites agree")


def compare(rows: int, width: int, like: int) -> float:
    """The largest error; raises where it is too large, or where anything of a dead row reaches another."""
    form = choose_site_form(like)
    few_parts = None if form is None else dataclasses.replace(form, programs=3)
    vars(mhc_site).update(choose_site_form=lambda rows: few_parts)
    given = arguments(rows, width)
    found = mhc_site.run(**given)
    errors = [(a - b).abs().max() for a, b in zip(found, kernels.mhc_site.reference(**given), strict=True)]
    assert all(error <= LARGEST for error in errors), (rows, width, errors)

    dead = torch.arange(rows) % 3 == 1
    soiled = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    for name in ("streams", "y", "post", "comb", "pre"):
        soiled[name][dead] = torch.nan
    again = mhc_site.run(**given | soiled)
    assert all(torch.equal(a[~dead], b[~dead]) for a, b in zip(found, again, strict=True)), (rows, width)
    return float(max(errors))


def arguments(rows: int, width: int) -> dict[str, Any]:
    streams, mixes, channels = 4, 24, 4 * width
    return {
        "streams": torch.randn(rows, streams, width),
        "y": torch.randn(rows, width),
        "post": torch.rand(rows, streams),
        "comb": torch.rand(rows, streams, streams).softmax(1),
        "pre": torch.rand(rows, streams),
        "weight": torch.rand(width),
        "collapse_epsilon": 1e-6,
        "fn": torch.randn(mixes, channels) * channels**-0.5,
        "scale": torch.randn(3),
        "base": torch.randn(mixes),
        "iterations": 20,
        "epsilon": 1e-6,
        "norm_epsilon": 1e-6,
    }


def replace_what_the_interpreter_lacks() -> None:
    vars(mhc_kernels).update(split_bf16=split_bf16, reciprocal=lambda value: 1.0 / value)
    vars(mhc_site_kernels).update(split_bf16=split_bf16, kept=lambda x: x)
    names = ("expand_and_multiply", "finish_site", "expand_and_collapse")
    launch_one_after_another((mhc_site_kernels,), {mhc_site: names})


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
