"""The training loop: time-boxed steps, and a log of what they did."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train_nano.batches import Batch, Mix, Supply
from tools.train_nano.masters import Masters
from tools.train_nano.optimiser import Optimiser
from tools.train_nano.passes import Passes, Results, Way
from tools.train_nano.schedule import Phase, Schedule

_SMOOTHING = 0.5
"""Of the accuracies that end a phase, from one logged step to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often what is done."""

    samples: int = 1024
    """Rows of a forward pass on which the indexer is taught."""
    log_steps: int = 20
    print_seconds: float = 10.0


@dataclass
class Progress:
    """Where a run stands; part of the resumable state."""

    step: int = 0
    seconds: float = 0.0
    """Of training, over all parts."""
    tokens: int = 0
    phase: int = 0
    seen: dict[str, float] = field(default_factory=dict)
    """Smoothed answer accuracies, and ``index``."""


class Trainer:
    """Steps on ``masters`` until the time is over."""

    def __init__(
        self,
        masters: Masters,
        optimiser: Optimiser,
        schedule: Schedule,
        supply: Supply,
        passes: Passes,
        *,
        total: float,
        in_steps: bool = False,
        log: Path,
        pace: Pace,
        say: Callable[[str], None] = print,
    ) -> None:
        """``total`` is the length of the whole run, in seconds of training or in steps."""
        self.masters, self.optimiser, self.schedule, self.supply = masters, optimiser, schedule, supply
        self.passes, self.total, self.in_steps, self.log = passes, total, in_steps, log
        self.pace, self._say = pace, say
        self.progress = Progress()
        self._planned: dict[int, Phase] = {}

    def run(self, until: float) -> None:
        """Train until the run has lasted for ``until``, in the units of ``total``."""
        progress = self.progress
        began = time.perf_counter() - progress.seconds
        printed, last = -self.pace.print_seconds, (progress.seconds, progress.tokens)
        self.masters.train()
        while self._done() < until:
            fraction = self._done() / self.total
            self._enter(self.schedule.advance(progress.phase, fraction, progress.seen))
            scale = self.schedule.scale(progress.step, fraction)
            phase, noted = self._step(scale)
            logs = progress.step % self.pace.log_steps == 0
            numbers = noted() if logs else {}
            progress.step += 1
            progress.seconds = time.perf_counter() - began
            if not logs:
                continue
            self._see(numbers)
            rate = (progress.tokens - last[1]) / max(1e-9, progress.seconds - last[0])
            last = (progress.seconds, progress.tokens)
            entry = {
                "step": progress.step,
                "seconds": round(progress.seconds, 2),
                "tokens": progress.tokens,
                "tokens_per_second": round(rate),
                "phase": phase.name,
                "scale": round(scale, 4),
                **numbers,
            }
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            if progress.seconds - printed >= self.pace.print_seconds:
                printed = progress.seconds
                self._say(_line(entry))

    def _done(self) -> float:
        return self.progress.step if self.in_steps else self.progress.seconds

    def _enter(self, phase: int) -> None:
        if phase != self.progress.phase:
            self.progress.phase = phase
            self._say(f"{self.progress.seconds:6.0f} s  phase {self.schedule.phases[phase].name!r} begins")

    def _see(self, numbers: dict[str, Any]) -> None:
        seen = self.progress.seen
        for name, value in {**numbers["answer_accuracy"], "index": numbers["index_recall"]}.items():
            seen[name] = value if name not in seen else _SMOOTHING * seen[name] + (1 - _SMOOTHING) * value

    def _plan(self, step: int) -> tuple[Mix, ...]:
        phase = self._planned[step] = self.schedule.phases[self.progress.phase]
        return phase.steps[step % len(phase.steps)]

    def _step(self, scale: float) -> tuple[Phase, Callable[[], dict[str, Any]]]:
        """One step; the second result computes what to log, and waits for the device only if called."""
        batches = self.supply.get(self.progress.step, self._plan, self.pace.samples)
        phase = self._planned.pop(self.progress.step)
        way = Way(phase.sparse, phase.rounded)
        done: list[tuple[Mix, Batch, Results]] = []
        for mix, batch in batches:
            done.append((mix, batch, self.passes.run(mix, batch, way)))
            self.progress.tokens += mix.tokens
        norm = self.optimiser.step(scale, torch.stack([results.loads for *_, results in done]).sum(0))
        return phase, lambda: _noted(done, norm)


def answers_right(right: Tensor, answers: Tensor) -> Tensor:
    """[answers] bool: every prediction of an answer is right."""
    count = int(answers.max()) + 1 if len(answers) else 0
    wrong = torch.zeros(count, device=right.device).index_add(0, answers, (~right).float())
    return wrong == 0


def _noted(done: Sequence[tuple[Mix, Batch, Results]], norm: Tensor) -> dict[str, Any]:
    """Numbers of one step for the log."""
    loss: dict[str, float] = {}
    token: dict[str, float] = {}
    answer: dict[str, float] = {}
    for mix, batch, results in done:
        losses, right = results.losses.cpu(), results.right.cpu()
        for index, part in enumerate(mix.parts):
            mine = batch.kinds == index
            name = f"{part.kind}@{mix.length}" if part.kind in ("recall", "trace") else part.kind
            loss[name] = round(float(losses[mine].mean()), 4)
            token[name] = round(float(right[mine].float().mean()), 4)
            whole = answers_right(right[mine], batch.answers[mine])
            answer[name] = round(float(whole[batch.answers[mine].unique()].float().mean()), 4)
    index_losses = torch.cat([results.index_losses for *_, results in done])
    held, there = done[-1][2].index_recall.cpu().unbind(1)
    loads = torch.stack([results.loads for *_, results in done]).sum(0)
    return {
        "loss": loss,
        "token_accuracy": token,
        "answer_accuracy": answer,
        "index_loss": round(float(index_losses.mean()), 4),
        "index_recall": round(float(held.sum() / there.sum().clamp_min(1e-9)), 4),
        "index_recalls": [round(value, 3) for value in (held / there.clamp_min(1e-9)).tolist()],
        "index_sharpness": [round(value, 1) for value in there.tolist()],
        "gradient_norm": round(float(norm), 3),
        "expert_imbalance": round(float((loads.amax(1) / loads.mean(1)).max()), 2),
    }


def _line(entry: dict[str, Any]) -> str:
    kinds = "  ".join(
        f"{kind} {entry['loss'][kind]:.3f}/{entry['answer_accuracy'][kind]:.0%}" for kind in entry["loss"]
    )
    return (
        f"{entry['seconds']:6.0f} s  step {entry['step']:5}  {entry['tokens_per_second'] / 1000:5.0f}k/s  "
        f"x{entry['scale']:.2f}  {kinds}  index {entry['index_recall']:.2f} (kl {entry['index_loss']:.2f})  "
        f"norm {entry['gradient_norm']:.2f}  experts {entry['expert_imbalance']:.1f}"
    )
