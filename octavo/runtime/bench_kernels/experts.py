"""Cases of ``experts`` at the released model's widths: the share of one GPU among eight, 48 of 384 experts.

R rows give about 6R/8 pairs here. The products are also measured alone, against a library's on weights in BF16.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.torch_backend.dequantise import bf16_rows
from octavo.kernels.torch_backend.f32_product import f32_product
from octavo.runtime.bench_kernels.case import KernelCase, Prepared, call_copy

_HIDDEN, _INNER, _EXPERTS, _RESIDENT, _TOP_K, _LIMIT = 5120, 2304, 384, 48, 6, 10.0
_COPIES = 3
"""Of the weights, 0.9 GB each."""
_ROWS = (1, 16, 128, 512, 1024, 2048, 8192)
_MATRIX_BYTES = _HIDDEN * _INNER * (1 / 2 + 1 / 32)


def experts_cases() -> Iterator[KernelCase]:
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows", functools.partial(_prepare, rows))
    for rows in _ROWS:
        yield KernelCase(f"{rows} rows, products", functools.partial(_prepare_products, rows))


@torch.no_grad()
def _prepare(rows: int) -> Prepared:
    """Everything: the router, the order of the pairs, three products, the sum."""
    inputs = _inputs(rows)
    counts = _pairs_of_experts(inputs[0])
    return Prepared(
        variants={
            name: functools.partial(call_copy, kernels.experts.backends[name].overload, inputs)
            for name in ("triton", "torch")
        },
        copies=_COPIES,
        operations=6.0 * _HIDDEN * _INNER * float(counts.sum()) + 2.0 * rows * _HIDDEN * _EXPERTS,
        bytes=3 * _MATRIX_BYTES * float((counts > 0).sum()) + 2.0 * _HIDDEN * _EXPERTS + 6.0 * rows * _HIDDEN,
    )


@torch.no_grad()
def _prepare_products(rows: int) -> Prepared:
    """From rounded rows to the outputs of the pairs. The library gets rows in order and weights in BF16."""
    from octavo.kernels.triton_backend import experts as steps
    from octavo.kernels.triton_backend.device import is_hopper
    from octavo.kernels.triton_backend.expert_tiles import Wide, choose_tiles
    from octavo.kernels.triton_backend.expert_wide import round_pairs_in_order

    inputs = _inputs(rows)
    given = inputs[0]
    rounded, counts = steps.round_inputs(given["x"], _RESIDENT)
    routing = given["live"], given["image"], given["bias"], given["bias_vl"]
    chosen, weights = steps.choose(f32_product(given["x"], given["gate"]), *routing, counts, 0, _TOP_K, 1.5)
    work = steps.place(
        chosen, counts, choose_tiles(rows, _TOP_K, _EXPERTS, (_HIDDEN, _INNER), is_hopper(chosen.device))
    )
    if isinstance(work.tile, Wide):
        rounded = round_pairs_in_order(given["x"], work.order, work.totals)
    pairs = int(counts.sum())
    ends = counts.cumsum(0).int()
    ordered = given["x"][work.order[:pairs].long() // _TOP_K]
    wide = [bf16_rows(given[f"w{n}"], given[f"s{n}"]).transpose(1, 2) for n in (1, 3, 2)]

    def ours(number: int) -> Tensor:
        w = inputs[number]
        hidden = steps.multiply_gate_and_up(rounded, weights, work, w["w1"], w["s1"], w["w3"], w["s3"], _LIMIT)
        return steps.multiply_down(hidden, work, w["w2"], w["s2"])

    def library(number: int) -> Tensor:
        gate, up = (torch.nn.functional.grouped_mm(ordered, matrix, offs=ends) for matrix in wide[:2])
        return torch.nn.functional.grouped_mm(gate + up, wide[2], offs=ends)

    return Prepared(
        variants={"triton": ours, "grouped_mm, BF16": library},
        copies=_COPIES,
        operations=6.0 * _HIDDEN * _INNER * pairs,
        bytes=3 * _MATRIX_BYTES * float((counts > 0).sum()) + 4.0 * pairs * (_HIDDEN + _INNER),
    )


def _pairs_of_experts(given: dict[str, Any]) -> Tensor:
    from octavo.kernels.triton_backend import experts as steps

    _, counts = steps.round_inputs(given["x"], _RESIDENT)
    routing = given["live"], given["image"], given["bias"], given["bias_vl"]
    steps.choose(f32_product(given["x"], given["gate"]), *routing, counts, 0, _TOP_K, 1.5)
    return counts


def _inputs(rows: int) -> list[dict[str, Any]]:
    """Rows are the same in every copy. A single row goes to one of the experts here."""
    random = torch.Generator("cuda").manual_seed(rows)
    cuda: Any = {"device": "cuda", "generator": random}
    bias = torch.zeros(_EXPERTS, device="cuda")  # rows are dealt evenly, as a trained bias does
    if rows == 1:
        bias[1:_RESIDENT] -= 9.0
        bias[0] += 9.0
    shared = {
        "x": torch.randn(rows, _HIDDEN, **cuda).to(torch.bfloat16),
        "live": torch.ones(rows, dtype=torch.bool, device="cuda"),
        "image": torch.zeros(rows, dtype=torch.bool, device="cuda"),
        "gate": (torch.randn(_EXPERTS, _HIDDEN, **cuda) * _HIDDEN**-0.5).to(torch.bfloat16),
        "bias": bias,
        "bias_vl": None,
        "first_expert": 0,
        "top_k": _TOP_K,
        "route_scale": 1.5,
        "limit": _LIMIT,
    }
    return [shared | _weights(random) for _ in range(_COPIES)]


def _weights(random: torch.Generator) -> dict[str, Tensor]:
    def codes(*shape: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (_RESIDENT, *shape), device="cuda", generator=random, dtype=torch.uint8)

    shapes = {"1": (_INNER, _HIDDEN), "2": (_HIDDEN, _INNER), "3": (_INNER, _HIDDEN)}
    matrices = {f"w{n}": codes(outputs, inputs // 2, low=0, high=256) for n, (outputs, inputs) in shapes.items()}
    scales = {f"s{n}": codes(outputs, inputs // 32, low=116, high=120) for n, (outputs, inputs) in shapes.items()}
    return matrices | scales
