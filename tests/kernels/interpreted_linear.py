"""Triton's interpreter runs ``linear_f8``, also in pairs, ``grouped_linear`` and ``shared_expert`` with F8 weights:
python -m tests.kernels.interpreted_linear, with TRITON_INTERPRET=1.

It has no PTX and no products of BF16, and truncates where F32 becomes BF16. These few functions are replaced by what
they mean; indices, masks, permutations and the order of sums are those of the kernels. Prints the largest relative
error against the reference.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octavo.kernels.quantise import round_q8
from octavo.kernels.torch_backend.dequantise import bf16_tiles
from octavo.kernels.triton_backend import linear, linear_kernels, linear_products, linear_steps, shared_expert
from octavo.kernels.triton_backend.expert_routing import round_q8_groups
from octavo.kernels.triton_backend.linear_tiles import Launch
from tests.kernels.batches import random_batch
from tests.kernels.cases import CASES
from tests.kernels.draw import MINI, WIDE, Draw, Size
from tests.kernels.run_interpreted import launch_one_after_another, pretend_to_have_processors

NEAR = {"linear_f8": 0.01, "linear_f8_pair": 0.01, "grouped_linear": 0.01, "shared_expert": 0.03}
"""Results are truncated to BF16 here, so that every value may be off by a step, which is 2^-7 of it at most. So are the
hidden rows of ``shared_expert``, whose codes then move by a step of E4M3, an eighth."""
ODD = dataclasses.replace(WIDE, name="odd", hidden=288, heads=6, head_dim=20, rank=33, inner=96)
_SMALL = Launch(rows=16, outputs=64, warps=4, stages=2, programs=1, prepared=False)
_LARGE = Launch(rows=32, outputs=128, warps=8, blocks=2, stages=2, programs=2, prepared=True)


def main(long_form: bool) -> None:
    replace_what_the_interpreter_lacks()
    for size, rows in ((MINI, 1), (ODD, 40), *(((WIDE, 21),) if long_form else ())):
        for launch in (_SMALL, dataclasses.replace(_SMALL, prepared=True), _LARGE):
            vars(linear).update(choose_launch=lambda *shape, launch=launch: launch)
            vars(shared_expert).update(
                choose_launch=lambda *shape, launch=launch: launch,
                choose_launch_of_two=lambda *shape, launch=launch: launch,
            )
            # Pairs once unsplit with rows as they are, and once split with prepared ones.
            paired = (size, launch) in ((MINI, _SMALL), (ODD, _LARGE)) or long_form
            for name in (name for name in NEAR if paired or name != "linear_f8_pair"):
                compare(size, name, rows, f"tiles of {launch.rows}{', prepared' if launch.prepared else ''}")
        check_weights_and_rows(size)
    print("weights and rows: as the torch backend's", flush=True)


def compare(size: Size, name: str, rows: int, what: str) -> None:
    """Raises if a row is far from the reference."""
    case = next(case for case in CASES if case.name == name)
    given = case.arguments(random_batch(rows, seed=rows), size, torch.bfloat16)
    expected = case.operator.reference(**given)
    triton: dict[str, Any] = {
        "linear_f8": linear.linear_f8_triton,
        "linear_f8_pair": linear.linear_f8_pair_triton,
        "grouped_linear": linear.grouped_linear_triton,
        "shared_expert": shared_expert.shared_expert_triton,
    }
    both = zip(several(triton[name](**given)), several(expected), strict=True)
    relative = torch.stack([errors(found, wanted) for found, wanted in both])
    assert (relative <= NEAR[name]).all(), (size.name, name, rows, what, relative)
    print(f"{size.name} {name}, {rows} rows, {what}: {float(relative.max()):.1e}", flush=True)


def several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Of every row, relative."""
    error = torch.linalg.vector_norm((actual - expected).double(), dim=1)
    relative: Tensor = error / torch.linalg.vector_norm(expected.double(), dim=1).clamp_min(1e-30)
    return relative


def check_weights_and_rows(size: Size) -> None:
    draw = Draw(random_batch(7, seed=1), size, torch.bfloat16, 0)
    weight, scale = draw.tiled(size.inner + 3, size.hidden)
    assert torch.equal(linear_products.bf16_weight(weight, scale), bf16_tiles(weight, scale))
    x = draw.rows(size.hidden)
    assert torch.equal(linear_products.prepared_rows(x, True, False), round_q8(x))
    ordered = in_channel_order(linear_products.prepared_rows(x, True, True))
    assert torch.equal(ordered[:, : size.hidden], round_q8(x)) and not ordered[:, size.hidden :].any()


def in_channel_order(fragments: Tensor) -> Tensor:
    """Out of fragment order, as ``linear_kernels`` defines it channel by channel: [..., C], C a multiple of 64."""
    place = torch.empty(64, dtype=torch.int64)
    for channel in range(64):
        q, w, p, a = channel // 16, channel // 4 % 4, channel // 2 % 2, channel % 2
        place[channel] = 16 * w + 8 * a + 2 * q + p
    return torch.unflatten(fragments, -1, (-1, 64))[..., place].flatten(-2)


def replace_what_the_interpreter_lacks() -> None:
    vars(linear_kernels).update(decode_words=decode_words, add_product=add_product, round_rows_q8=round_rows_q8)
    vars(linear_steps).update(decode_words=decode_words, round_rows_q8=round_rows_q8)
    launch_one_after_another(
        (linear_kernels, linear_steps),
        {
            linear_products: (
                *("multiply", "multiply_pair", "multiply_two"),
                *("sum_parts", "sum_parts_of_pair", "prepare_rows"),
            ),
            shared_expert: ("gate_parts",),
        },
    )
    # So many that the inputs of some products of every kind are split.
    pretend_to_have_processors(4)


def add_product(total: Any, weights: Any, x: Any) -> Any:
    return tl.dot(weights.to(tl.float32), x.to(tl.float32), total)


def round_rows_q8(x: Any) -> Any:
    rows, columns = x.shape
    groups = tl.reshape(x.to(tl.float32), [rows * (columns // 32), 32, 1])
    return tl.reshape(round_q8_groups(groups), [rows, columns])


def decode_words(words: Any, factors: Any) -> Any:
    """Bytes 0 and 2 of a word, then 1 and 3, times a BF16 factor, in F32."""
    factor = (factors << 16).to(tl.float32, bitcast=True)
    values = [_value((words >> (8 * byte)) & 255) * factor for byte in range(4)]
    return tl.join(values[0], values[2]), tl.join(values[1], values[3])


def _value(code: Any) -> Any:
    """2^-120 of the value of the code."""
    exponent, mantissa = (code >> 3) & 15, (code & 7) * 0.125
    power = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    value = tl.where(exponent > 0, 1.0 + mantissa, mantissa) * power
    return tl.where(code >= 128, -value, value)


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
