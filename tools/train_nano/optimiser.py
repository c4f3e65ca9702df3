"""Muon for matrices between activations, Adam for the rest, and the router's bias by load.

``torch.optim.Muon`` takes one 2-D matrix at a time; a mixture of experts has many small ones of equal shape, and a
batched Newton-Schulz iteration moves them together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.model.config import TextConfig
from tools.train_nano.masters import Learner, Masters, learner

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Peak learning rates and what goes with them."""

    muon: float = 0.02
    adam: float = 0.003
    table: float = 0.01
    scalar: float = 0.004
    muon_momentum: float = 0.95
    muon_decay: float = 0.1
    """Weight decay, in units of the learning rate."""
    balance: float = 0.01
    """Step of the router's bias."""
    clip: float = 1.0


def orthogonalised(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, about: [n, out, in] -> the same shape, singular values near 1."""
    a, b, c = _NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    y = x.bfloat16() if x.is_cuda else x.float()
    y = y.transpose(1, 2) if tall else y
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram = y @ y.transpose(1, 2)
        y = a * y + (b * gram + c * gram @ gram) @ y
    result: Tensor = (y.transpose(1, 2) if tall else y).to(x.dtype)
    return result


class Muon:
    """Momentum, orthogonalised; matrices of one shape share each launch."""

    def __init__(self, matrices: Sequence[Sequence[Any]]) -> None:
        """``matrices``: (master, shape [n, out, in] of its matrices)."""
        self._by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, tuple[int, ...]]]] = {}
        for master, shape in matrices:
            self._by_shape.setdefault(tuple(shape[1:]), []).append((master, shape))
        self.momenta = [
            torch.cat([torch.zeros(shape, device=master.device) for master, shape in group])
            for group in self._by_shape.values()
        ]

    @torch.no_grad()
    def step(self, rate: float, momentum: float, decay: float) -> None:
        for (shape, group), velocity in zip(self._by_shape.items(), self.momenta, strict=True):
            gradients = [master.grad for master, _ in group]
            gradient = torch.cat([g.reshape(s) for g, (_, s) in zip(gradients, group, strict=True) if g is not None])
            velocity.lerp_(gradient, 1 - momentum)
            update = orthogonalised(gradient.lerp(velocity, momentum))
            update *= rate * max(1.0, shape[0] / shape[1]) ** 0.5
            masters: list[Tensor] = [master for master, _ in group]
            parts = update.split([s[0] for _, s in group])
            torch._foreach_mul_(masters, 1 - rate * decay)
            torch._foreach_sub_(masters, [p.view(m.shape) for p, m in zip(parts, masters, strict=True)])


class Optimiser:
    """All masters of a model; gradients must be there when :meth:`step` is called."""

    def __init__(self, masters: Masters, rates: Rates) -> None:
        self.rates = rates
        self._named = masters.named()
        groups: dict[Learner, list[str]] = {kind: [] for kind in Learner}
        for name in self._named:
            groups[learner(name)].append(name)
        text = masters.config.text_config
        self.muon = Muon([(self._named[n], _matrices(n, self._named[n], text)) for n in groups[Learner.MUON]])
        self._peaks = {Learner.ADAM: rates.adam, Learner.TABLE: rates.table, Learner.SCALAR: rates.scalar}
        self.adam = torch.optim.Adam(
            [
                {"params": [self._named[name] for name in groups[kind]], "lr": peak}
                for kind, peak in self._peaks.items()
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=next(masters.parameters()).is_cuda,
        )
        self.learning = [p for name, p in self._named.items() if learner(name) is not Learner.BALANCE]
        for master in self.learning:
            master.grad = torch.zeros_like(master)
        # Two losses, two norms: a step of the indexer that is too long must not shorten the others.
        indexer = masters.indexer_ids()
        self._main = [p for p in self.learning if id(p) not in indexer]
        self._indexer = [p for p in self.learning if id(p) in indexer]
        self._biases = [self._named[name] for name in groups[Learner.BALANCE]]
        for bias in self._biases:
            bias.requires_grad_(False)

    def step(self, scale: float, loads: Tensor) -> Tensor:
        """Move all masters by ``scale`` times the peak rates -> norm of the main gradient before clipping.

        ``loads`` [layers, E]: rows that chose each expert since the last step.
        """
        norm: Tensor = nn.utils.clip_grad_norm_(self._main, self.rates.clip)
        nn.utils.clip_grad_norm_(self._indexer, self.rates.clip)
        self.muon.step(self.rates.muon * scale, self.rates.muon_momentum, self.rates.muon_decay)
        for group, peak in zip(self.adam.param_groups, self._peaks.values(), strict=True):
            group["lr"] = peak * scale
        self.adam.step()
        with torch.no_grad():
            for bias, load in zip(self._biases, loads, strict=True):
                bias.add_(torch.sign(load.mean() - load), alpha=self.rates.balance * scale)
        torch._foreach_zero_([master.grad for master in self.learning if master.grad is not None])
        return norm

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.momenta, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        for momentum, kept in zip(self.muon.momenta, state["muon"], strict=True):
            momentum.copy_(kept)
        self.adam.load_state_dict(state["adam"])


def _matrices(name: str, master: Tensor, text: TextConfig) -> tuple[int, ...]:
    """Shape [n, out, in] of the matrices that ``master`` holds."""
    if master.dim() == 3:
        return tuple(master.shape)
    outputs, inputs = master.shape
    if re.fullmatch(r".*\.attn\.wo_a\.weight", name):
        return text.o_groups, text.o_lora_rank, inputs
    if name.endswith("engram.wkv.weight"):
        return text.hc_mult + 1, text.hidden_size, inputs
    return 1, outputs, inputs
