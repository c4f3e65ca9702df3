"""Pieces of PTX, carried out in torch instruction by instruction: what a CPU can tell of assembly."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from octavo.kernels.quantise import dequantise_f4_rows

_WORDS = 2**32
_HALF = 0xFFFF
_INSTRUCTION = re.compile(r"([a-z][a-z0-9.]+)\s+(\{[^}]*\}|[$\w]+), ([^;]+);")


def carried_out(ptx: str, **registers: Tensor) -> dict[str, Tensor]:
    """Bits of every register at the end, int64, by name: ``r8`` is the operand ``$8``.

    registers: operands by such names, bits int64. Of 32-bit registers and, as parts of a ``mov``, of 16-bit ones.
    """
    values = {f"${name[1:]}": bits for name, bits in registers.items()}
    body = re.sub(r"\.reg[^;]*;", "", ptx)
    for name, target, listed in _INSTRUCTION.findall(body):
        operands = [operand.strip() for operand in listed.split(",")]
        given = [values[one] if one in values else torch.tensor(int(one, 0)) for one in operands]
        if target.startswith("{"):
            assert name == "mov.b32", name
            low, high = (half.strip() for half in target.strip("{}").split(","))
            values[low], values[high] = given[0] & _HALF, given[0] >> 16
        else:
            values[target] = _result(name, *given)
    return {f"r{name[1:]}": bits for name, bits in values.items() if name.startswith("$")}


def _result(name: str, left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    match name:
        case "shr.u32":
            return left >> right
        case "shl.b32":
            return (left << right) % _WORDS
        case "and.b32":
            return left & right
        case "or.b32":
            return left | right
        case "mul.lo.u32":
            return left * right % _WORDS
        case "mad.lo.u32":
            assert added is not None
            return (left * right + added) % _WORDS
        case "mul.bf16x2":
            return _product(left & _HALF, right & _HALF) | _product(left >> 16, right >> 16) << 16
        case "cvt.rn.relu.bf16x2.f32":
            high, low = (bf16_bits(f32_values(one).clamp_min(0.0)) for one in (left, right))
            return low | high << 16
    raise AssertionError(f"{name}: an instruction that this module does not know")


def _product(left: Tensor, right: Tensor) -> Tensor:
    return bf16_bits(bf16_values(left) * bf16_values(right))


def bf16_values(bits: Tensor) -> Tensor:
    """16 bits, int64 -> F32."""
    return f32_values(bits << 16)


def f32_values(bits: Tensor) -> Tensor:
    """32 bits, int64 -> F32."""
    return bits.to(torch.int32).view(torch.float32)


def bf16_bits(values: Tensor) -> Tensor:
    """F32, rounded to the nearest BF16 -> 16 bits, int64."""
    return values.to(torch.bfloat16).view(torch.int16).long() & _HALF


def decoded(words: Tensor, scales: Tensor) -> Tensor:
    """What pieces of PTX should make of words [S, N] of eight F4 codes and a scale byte for each row [S, 1]: F32
    [S, N, 8], in the order of the nibbles. N is a multiple of 4."""
    packed = torch.stack([(words >> (8 * byte)) & 255 for byte in range(4)], dim=-1).to(torch.uint8)
    groups = packed.flatten(1).unflatten(1, (-1, 16))
    of_groups = scales[:, None].expand(*groups.shape[:2], 1).to(torch.uint8)
    return dequantise_f4_rows(groups, of_groups).view(*words.shape, 8)
