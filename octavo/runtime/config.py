"""What an engine is started with; the command line is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.errors import UsageError


def option(help_text: str, default: Any) -> Any:
    """A field with the help text that the command line shows."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where the weights come from, where they go, and how much state is kept.

    Raises :class:`UsageError` for values that no engine can have.
    """

    model: Path | None = option("Directory of a checkpoint in the official layout.", None)
    weights: Literal["checkpoint", "random"] = option(
        "Read weights from --model, or make random ones of a --preset on the device, without a file.", "checkpoint"
    )
    preset: str | None = option("Configuration of random weights: tiny, mini, slice or released.", None)
    layers: int | None = option("Keep the first N layers only.", None)
    experts: int | None = option(
        "Keep the first N routed experts of each layer; rows routed to others skip them. Default: all, 48 in slice.",
        None,
    )
    weights_seed: int = option("Seed of random weights.", 0)
    device: str = option("cpu, cuda, cuda:N, or auto: cuda where there is one.", "auto")
    numerics: Literal["reference", "plain"] = option(
        "reference: the official rounding points, row-invariant. plain: F32 without quantisation, for comparison.",
        "reference",
    )
    chunk: int = option("Most rows that one step computes; longer prompts take several steps.", 8192)
    kv_tokens: int = option("Tokens that the state has room for: the longest prompt and answer together.", 8192)

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "chunk", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.weights == "checkpoint" and (self.model is None or self.preset is not None):
            raise UsageError(
                "--model PATH names the checkpoint to read; --preset goes with --weights random. "
                "`octavo checkpoint init --preset tiny PATH` makes a small checkpoint."
            )
        if self.weights == "random" and (self.preset is None or self.model is not None):
            raise UsageError("--weights random takes --preset NAME and no --model")
