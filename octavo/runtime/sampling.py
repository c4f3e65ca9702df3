"""How an answer is drawn from the model's logits, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.errors import UsageError
from octavo.runtime.config import option

MAX_ANSWERS = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256

TokenMask = Callable[[Sequence[int]], object]
"""Called before each token with the answer so far; returns the allowed tokens, a bool tensor [V], or None for
all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Raises :class:`UsageError` that names field, value and rule for anything out of range.

    Order: penalties, ``logit_bias``, ``min_tokens`` and ``token_mask``, then temperature, ``top_k``, ``top_p``,
    ``min_p``, then the draw. Log probabilities are those of the model, before all of these.
    """

    max_tokens: int = option("Most tokens of an answer.", 128)
    min_tokens: int = option("No end of sentence and no stop token before so many tokens.", 0)
    temperature: float = option("0 takes the likeliest token each time; higher is more varied.", 0.0)
    top_k: int = option("Draw from the K likeliest tokens; 0 is off.", 0)
    top_p: float = option("Draw from the likeliest tokens that together have this probability.", 1.0)
    min_p: float = option("Draw from tokens at least this likely relative to the likeliest.", 0.0)
    presence_penalty: float = option("Taken off the logit of every token that the answer already holds.", 0.0)
    frequency_penalty: float = option("Taken off for every time that the answer holds the token.", 0.0)
    repetition_penalty: float = option(
        "Divides positive logits of tokens in prompt and answer, multiplies others.", 1.0
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single token ids."""
    token_mask: TokenMask | None = None
    """Hook for structured output. An exception in it ends this answer alone, with finish reason ``error``."""
    seed: int | None = option("The same seed gives the same answer; none draws a new one.", None)
    n: int = option("Answers to each prompt.", 1)
    stop: tuple[str, ...] = option("End the answer before this text; may be given several times.", ())
    stop_token_ids: tuple[int, ...] = option("End the answer at this token; may be given several times.", ())
    ignore_eos: bool = option("Go on after the end of sentence.", False)
    logprobs: int | None = option("Report each token's log probability and those of the K likeliest.", None)
    prompt_logprobs: int | None = option("The same for the prompt's tokens.", None)
    timeout: float | None = option("Seconds after which the answer ends as it is.", None)

    def __post_init__(self) -> None:
        self._check_range("max_tokens", 1, 1 << 30)
        self._check_range("min_tokens", 0, self.max_tokens)
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_k", 0, 1 << 30)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("n", 1, MAX_ANSWERS)
        self._check_range("logprobs", 0, MAX_LOGPROBS)
        self._check_range("prompt_logprobs", 0, MAX_LOGPROBS)
        self._check_range("seed", -(2**63), 2**63 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise UsageError(f"repetition_penalty {self.repetition_penalty}: must be above 0 and at most 100")
        if self.timeout is not None and not self.timeout > 0.0:
            raise UsageError(f"timeout {self.timeout}: must be above 0 seconds")
        self._check_stops()
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0 or not -100.0 <= bias <= 100.0:
                raise UsageError(f"logit_bias {{{token!r}: {bias!r}}}: maps token ids to numbers from -100 to 100")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:  # written so that NaN fails
            raise UsageError(f"{name} {value}: must be from {low} to {high}")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple | list) or not isinstance(self.stop_token_ids, tuple | list):
            raise UsageError(f"stop {self.stop!r}, stop_token_ids {self.stop_token_ids!r}: each is a list")
        for name in ("stop", "stop_token_ids"):
            if len(getattr(self, name)) > MAX_STOPS:
                raise UsageError(f"{name}: {len(getattr(self, name))} entries, at most {MAX_STOPS}")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise UsageError(f"stop {text!r}: strings of 1 to {MAX_STOP_LENGTH} characters")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or token < 0:
                raise UsageError(f"stop_token_ids {token!r}: token ids are integers from 0 on")
