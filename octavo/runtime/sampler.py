"""From logits to a token: greedy, or at a temperature with counter-based noise.

Noise is a pure function of (seed, sample, absolute position, token id). Nothing is drawn in sequence, so batching,
preemption and the number of ranks cannot change an answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64, as signed 64-bit numbers


def sample(logits: Tensor, temperature: float, seed: int, index: int, position: int) -> int:
    """One token from logits [V] F32 for ``position``; ``index`` numbers the answers to one prompt.

    Temperature 0 takes the largest logit, ties to the lower id. Otherwise tokens have the probabilities
    softmax(logits / temperature), by the Gumbel-max rule in F64.
    """
    if temperature > 0.0:
        logits = logits.double() / temperature + gumbel_noise(logits.shape[0], seed, index, position, logits.device)
    return int((logits == logits.max()).nonzero()[0])


def gumbel_noise(count: int, seed: int, index: int, position: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [count] F64, element i for token id i."""
    key = torch.zeros((), dtype=torch.int64, device=device)
    for word in (seed, index, position):
        key = _mixed(key + word)
    bits = _mixed(key + torch.arange(count, device=device) * _MIX[0])
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add(0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit words in which every input bit moves every output bit; products wrap around."""
    x = x + _MIX[0]
    x = (x ^ _shifted(x, 30)) * _MIX[1]
    x = (x ^ _shifted(x, 27)) * _MIX[2]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
