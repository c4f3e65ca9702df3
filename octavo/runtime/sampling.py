"""How an answer is drawn from the model's logits."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import UsageError
from octavo.runtime.config import option


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an answer is drawn. Raises :class:`UsageError` for a value outside its range."""

    max_tokens: int = option("Most tokens of an answer.", 128)
    temperature: float = option("0 takes the likeliest token each time; higher is more varied.", 0.0)
    seed: int = option("The same seed gives the same answer.", 0)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens {self.max_tokens}: must be at least 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"temperature {self.temperature}: must be between 0 and 100")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed}: must fit 64 bits")
