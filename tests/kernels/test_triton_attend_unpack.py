"""Pieces of PTX that unpack entries for ``attend``, carried out on the CPU: every code, every scale, to the bit."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from octavo.kernels.quantise import dequantise_q4nv, unpack_codes
from tests.kernels.carried_out_ptx import bf16_bits, bf16_values

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
if find_spec("triton") is not None:
    from octavo.kernels.triton_backend import attend_rows_keys

_INSTRUCTION = re.compile(r"(\w[\w.]*) ([$\w]+), ([^;]+);")
_WORD = 2**32 - 1


def test_every_code_of_every_scale() -> None:
    """Bytes of codes at each place of a word, scales in either byte of a pair, all that E4M3 has from zero on."""
    scales = torch.arange(127).view(-1, 1)
    codes = torch.arange(256)
    words = codes | codes.flip(0) << 8 | codes.roll(7) << 16 | (codes ^ 85) << 24
    packed = torch.stack([(words >> 8 * byte) & 255 for byte in range(4)], dim=-1).to(torch.uint8)
    groups = unpack_codes(packed).repeat(1, 2).expand(127, 256, 16).flatten(1)
    each = scales.to(torch.uint8).view(torch.float8_e4m3fn).expand(127, 256)
    expected = dequantise_q4nv(groups, each.contiguous()).view(127, 256, 16)[..., :8].to(torch.bfloat16)
    for pair, selector in ((scales | 0x5500, 0x4040), (scales << 8 | 0x55, 0x4141)):
        factor = carried_out(attend_rows_keys._TO_FACTOR.value, {1: pair, 2: torch.tensor(selector)})[0]
        results = carried_out(attend_rows_keys._TO_VALUES.value, {4: words, 5: factor})
        halves = [half for word in range(4) for half in (results[word] & 0xFFFF, results[word] >> 16)]
        actual = bf16_values(torch.stack(halves, dim=-1)).to(torch.bfloat16)
        assert torch.equal(actual, expected)


def carried_out(ptx: str, operands: dict[int, Tensor]) -> dict[int, Tensor]:
    """Bits of each operand at the end, int64, by number; what is written is not read before."""
    values = {f"${number}": bits for number, bits in operands.items()}
    for name, target, listed in _INSTRUCTION.findall(re.sub(r"\.reg[^;]*;", "", ptx)):
        read = [operand.strip() for operand in listed.split(",")]
        values[target] = _result(name, *[values[one] if one in values else torch.tensor(int(one, 0)) for one in read])
    return {int(name[1:]): bits for name, bits in values.items() if name.startswith("$")}


def _result(name: str, *given: Tensor) -> Tensor:
    match name:
        case "mov.b32":
            return given[0]
        case "and.b32":
            return given[0] & given[1]
        case "shl.b32":
            return (given[0] << given[1]) & _WORD
        case "shr.u32":
            return given[0] >> given[1]
        case "mad.lo.u32":
            return (given[0] * given[1] + given[2]) & _WORD
        case "mul.rn.bf16x2":
            low, high = ([bits & 0xFFFF for bits in given], [bits >> 16 for bits in given])
            return _product(*low) | _product(*high) << 16
        case "prmt.b32":
            return _permuted(*given)
    raise AssertionError(f"{name}: an instruction that this module does not know")


def _product(left: Tensor, right: Tensor) -> Tensor:
    return bf16_bits(bf16_values(left) * bf16_values(right))


def _permuted(first: Tensor, second: Tensor, selector: Tensor) -> Tensor:
    """Four of eight bytes by the selector's nibbles, of which a set high bit repeats the byte's own."""
    shape = torch.broadcast_shapes(first.shape, second.shape, selector.shape)
    of_both = torch.stack([((first if i < 4 else second) >> 8 * (i % 4) & 255).expand(shape) for i in range(8)])
    result = torch.zeros(shape, dtype=torch.int64)
    for i in range(4):
        nibble = (selector >> 4 * i & 15).expand(shape)
        byte = of_both.gather(0, (nibble & 7)[None])[0]
        result = result | torch.where(nibble >= 8, (byte >> 7) * 255, byte) << 8 * i
    return result
