"""Noise of random draws: a pure function of seed, answer, position and token id, whatever else is drawn beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octavo.runtime.upload import upload

_WORD = 2**64
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64."""


def gumbel_noise(count: int, words: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Standard Gumbel noise [len(words), count] F64, element i for token id i.

    ``words``: a row's seed, answer and position, each a signed 64-bit number.
    """
    keys = upload(torch.tensor([_signed(_key(row)) for row in words], dtype=torch.int64), device)
    x = keys.unsqueeze(1) + torch.arange(1, count + 1, device=device) * _signed(_STEP)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    bits = x ^ _shifted(x, 31)
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _key(words: Iterable[int]) -> int:
    """The state of a row's generator: every bit of every word moves every bit of it."""
    state = 0
    for word in words:
        state = (state + word + _STEP) % _WORD
        state = (state ^ state >> 30) * _FIRST % _WORD
        state = (state ^ state >> 27) * _SECOND % _WORD
        state ^= state >> 31
    return state


def _signed(word: int) -> int:
    """The signed number of the same 64 bits."""
    return word - _WORD if word >= _WORD // 2 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
