"""What can be known of the Triton kernels of ``experts`` without a GPU: their indices, orders and sums, and how they
decode weights.

Products on tensor cores, rounding to BF16 by the hardware and the router's logarithms are judged on the device
(``tests/gpu/test_triton_experts.py``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from octavo.kernels.quantise import dequantise_f4_rows
from tests.conftest import ReportCount

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import expert_products
    from octavo.kernels.triton_backend.expert_tiles import TILES, choose_tiles

_WORDS = 2**32


@pytest.mark.timeout(300)
def test_kernels_agree_with_the_reference_in_the_interpreter(report_count: ReportCount) -> None:
    """Rounding, routing and order to the bit, results as near as truncation lets them be."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_experts"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("ties: lower numbers first\n")
    report_count("steps of experts in the interpreter", done.stdout.count("\n"))


def test_every_code_is_exact_at_every_scale_from_59_to_192(report_count: ReportCount) -> None:
    """The PTX itself, carried out in torch: each of the 16 codes in each of the 8 places of a word."""
    words = torch.tensor([code << (4 * place) for code in range(16) for place in range(8)])
    words = words.repeat(256, 1) ^ 0x5A5A5A5A
    scales = torch.arange(256).unsqueeze(1)
    factors = ((scales + 62).clamp_max(255) << 7) * 0x00010001
    parts = carried_out(words, factors.expand_as(words))
    found = torch.empty(256, 128, 8)
    for n, part in enumerate(parts):
        found[..., n], found[..., n + 4] = bf16_values(part & 0xFFFF), bf16_values(part >> 16)
    packed = torch.stack([(words >> (8 * byte)) & 255 for byte in range(4)], dim=-1).to(torch.uint8)
    groups = packed.flatten(1).unflatten(1, (-1, 16))
    expected = dequantise_f4_rows(groups, scales[:, None].expand(256, groups.shape[1], 1).to(torch.uint8))
    expected = expected.view(256, 128, 8)
    exact = slice(59, 193)
    assert torch.equal(found[exact] * 2.0**64, expected[exact])
    assert not found[193:].isfinite().all(-1).any(), "larger scales give no finite number"
    small = slice(0, 59)
    assert ((found[small] * 2.0**64 - expected[small]).abs() <= 2.0**-68).all()
    report_count("weights decoded by PTX", found.numel())


def test_tiles_follow_the_rows_of_an_expert() -> None:
    """Few rows: one small tile an expert; many: large ones, and small ones for what is left."""
    cuts = [choose_tiles(rows, 6, 384) for rows in (1, 128, 512, 1024, 2048, 4096, 8192, 16384)]
    assert [(tile.rows, tail.rows if tail else 0) for tile, tail in cuts] == [
        *((16, 0), (16, 0), (16, 0), (32, 0), (64, 0), (64, 32), (128, 32), (128, 32)),
    ]
    assert all(tail is None or tail.rows < tile.rows for tile, tail in cuts)
    assert all(tile.rows == rows for rows, tile in TILES.items())


def carried_out(words: Tensor, factors: Tensor) -> list[Tensor]:
    """The four words that the PTX of ``decode_words`` makes of each word and factor."""
    values = {"$4": words, "$5": factors}
    for name, target, *sources in re.findall(
        r"([a-z0-9.]+)\s+([$\w]+), ([$\w]+), ([$\w]+);", expert_products._DECODE.value
    ):
        left, right = (values[source] if source in values else torch.tensor(int(source, 0)) for source in sources)
        match name:
            case "shr.u32":
                result = left >> right
            case "and.b32":
                result = left & right
            case "mul.lo.u32":
                result = left * right % _WORDS
            case "mul.bf16x2":
                result = multiplied(left & 0xFFFF, right & 0xFFFF) | multiplied(left >> 16, right >> 16) << 16
            case _:
                raise AssertionError(f"{name}: an instruction that this test does not know")
        values[target] = result
    return [values[f"${n}"] for n in range(4)]


def multiplied(left: Tensor, right: Tensor) -> Tensor:
    product = (bf16_values(left) * bf16_values(right)).to(torch.bfloat16)
    return product.view(torch.int16).long() & 0xFFFF


def bf16_values(bits: Tensor) -> Tensor:
    return (bits << 16).to(torch.int32).view(torch.float32)
