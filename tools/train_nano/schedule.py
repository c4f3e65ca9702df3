"""What is trained when: phases that end when their aim is reached or their time is over, and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.train_nano.batches import Mix, Part

SHARES = {"arithmetic": 0.15, "facts": 0.1, "english": 0.1, "recall": 0.65, "trace": 0.05}
"""Of the loss. Recall has few supervised tokens and is learned last, so a mean over tokens would drown it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run."""

    name: str
    until: float
    """Fraction of the time at which it ends at the latest."""
    steps: tuple[tuple[Mix, ...], ...]
    """What consecutive steps compute, in turn."""
    sparse: bool
    rounded: bool
    aims: Mapping[str, float] = field(default_factory=dict)
    """It ends early when all of these answer accuracies are reached; ``index`` is the indexer's recall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    phases: tuple[Phase, ...]
    warm_up_steps: int = 60
    decay_from: float = 0.4
    """Fraction of the time from which the rate falls linearly to ``last_scale``."""
    last_scale: float = 0.02

    def scale(self, step: int, fraction: float) -> float:
        """Learning rate in units of its peak."""
        warm = min(1.0, (step + 1) / self.warm_up_steps)
        left = min(1.0, max(0.0, (1.0 - fraction) / (1.0 - self.decay_from)))
        return warm * (self.last_scale + (1 - self.last_scale) * left)

    def advance(self, index: int, fraction: float, seen: Mapping[str, float]) -> int:
        """The phase to be in, from the one that the run is in and what its log says."""
        last = len(self.phases) - 1
        while index < last and fraction >= self.phases[index].until:
            index += 1
        aims = self.phases[index].aims
        reached = bool(aims) and all(seen.get(name, 0.0) >= aim for name, aim in aims.items())
        return index + 1 if reached and index < last else index


def mixed(length: int, **rows: int) -> Mix:
    return Mix(length, tuple(Part(kind, count, SHARES[kind]) for kind, count in rows.items()))


def full_schedule() -> Schedule:
    """The run that makes octavo-nano: 16,000 tokens a step at first, 40,000 later.

    Recall is learned among few records and with dense attention first, then among more; selection begins when the
    indexer agrees with dense attention, and everything is rounded in the last phases.
    """
    short = mixed(256, arithmetic=14, facts=10, english=8, trace=6)
    at = {length: (short, mixed(length, recall=32768 // length)) for length in (256, 512, 1024, 2048, 4096)}
    first = mixed(128, arithmetic=16, facts=16, english=8, recall=96, trace=12)
    second = mixed(256, arithmetic=8, facts=8, english=4, recall=60, trace=8)
    return Schedule(
        phases=(
            Phase("dense 128", 0.10, ((first,),), False, False, {"recall@128": 0.9}),
            Phase("dense 256", 0.18, ((second,), (second,), (first,)), False, False, {"recall@256": 0.9}),
            Phase("dense 512", 0.26, (at[512], (second,)), False, False, {"recall@512": 0.9, "index": 0.9}),
            Phase("sparse 512", 0.34, (at[512], (second,)), True, False, {"recall@512": 0.93}),
            Phase("sparse 1024", 0.46, (at[1024], at[512]), True, False, {"recall@1024": 0.95}),
            Phase("rounded 2048", 0.64, (at[2048], at[1024], at[512]), True, True, {"recall@2048": 0.97}),
            Phase("rounded 4096", 1.0, (at[4096], at[2048], at[4096], at[1024]), True, True),
        )
    )


def cut_down_schedule(length: int, rows: int, kinds: tuple[str, ...]) -> Schedule:
    """The same phases for a CPU: one length, few rows."""
    mix = mixed(length, **dict.fromkeys(kinds, rows))
    aims = {f"recall@{length}": 0.95} if "recall" in kinds else {}
    return Schedule(
        phases=(
            Phase("dense", 0.65, ((mix,),), False, False, aims | {"index": 0.9} if aims else {}),
            Phase("sparse", 0.82, ((mix,),), True, False, aims),
            Phase("rounded", 1.0, ((mix,),), True, True),
        ),
        warm_up_steps=20,
        decay_from=0.6,
    )
