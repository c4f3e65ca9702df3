"""How an answer is drawn from the model's logits, and when it ends."""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo.errors import UsageError
from octavo.runtime.config import option

MAX_ANSWERS = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256

_OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "timeout")
_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")

TokenMask = Callable[[Sequence[int]], object]
"""Called before each token with the answer so far; returns the allowed tokens, a bool tensor [V], or None for
all."""


def _refusing_unknown_fields(cls: type[T]) -> type[T]:
    """Make an unknown field of a dataclass a :class:`UsageError`, as any other wrong field is."""
    init = vars(cls)["__init__"]
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: T, /, **values: Any) -> None:
        for name, value in values.items():
            if name not in names:
                raise UsageError(f"{name} {reprlib.repr(value)}: no such field; there are {', '.join(names)}")
        init(self, **values)

    type.__setattr__(cls, "__init__", checked)
    return cls


@_refusing_unknown_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Raises :class:`UsageError` that names field, value and rule for a wrong value or type, or an unknown field.

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
    logprobs: int | None = None
    """Report each token's log probability and those of the K likeliest."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; each of several answers carries them."""
    timeout: float | None = option("Seconds after which the answer ends as it is.", None)

    def __post_init__(self) -> None:
        self._check("max_tokens", int, 1, 1 << 30)
        self._check("min_tokens", int, 0, 1 << 30)
        self._check("temperature", float, 0, 100)
        self._check("top_k", int, 0, 1 << 30)
        self._check("top_p", float, 0, 1, above=True)
        self._check("min_p", float, 0, 1)
        self._check("presence_penalty", float, -2, 2)
        self._check("frequency_penalty", float, -2, 2)
        self._check("repetition_penalty", float, 0.01, 100)
        self._check("seed", int, -(2**63), 2**63 - 1)
        self._check("n", int, 1, MAX_ANSWERS)
        self._check("logprobs", int, 0, MAX_LOGPROBS)
        self._check("prompt_logprobs", int, 0, MAX_LOGPROBS)
        self._check("timeout", float, 0, 1_000_000_000, above=True)
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens}: must be at most max_tokens, {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos {reprlib.repr(self.ignore_eos)}: must be True or False")
        if self.token_mask is not None and not callable(self.token_mask):
            raise UsageError(f"token_mask {reprlib.repr(self.token_mask)}: must be a function, or None")
        self._check_stops()
        self._check_bias()

    def _check(self, name: str, kind: type, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        optional = name in _OPTIONAL
        if value is None and optional:
            return
        # Written so that NaN fails.
        if not _is_number(value, kind) or not low <= value <= high or (above and value == low):
            noun = "an integer" if kind is int else "a number"
            rule = f"above {low} and at most {high}" if above else f"from {low} to {high}"
            none = ", or None" if optional else ""
            raise UsageError(f"{name} {reprlib.repr(value)}: must be {noun} {rule}{none}")

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            entries = getattr(self, name)
            if not isinstance(entries, tuple | list):
                raise UsageError(f"{name} {reprlib.repr(entries)}: must be a list")
            if len(entries) > MAX_STOPS:
                raise UsageError(f"{name}: has {len(entries)} entries, must have at most {MAX_STOPS}")
            object.__setattr__(self, name, tuple(entries))
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH or _SURROGATE.search(text):
                raise UsageError(
                    f"stop {reprlib.repr(text)}: must be strings of 1 to {MAX_STOP_LENGTH} characters, valid Unicode"
                )
        for token in self.stop_token_ids:
            if not _is_number(token, int) or token < 0:
                raise UsageError(f"stop_token_ids {reprlib.repr(token)}: must be token ids, integers from 0 on")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias {reprlib.repr(self.logit_bias)}: must map token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            if not _is_number(token, int) or token < 0 or not _is_number(bias, float) or not -100 <= bias <= 100:
                raise UsageError(
                    f"logit_bias {reprlib.repr({token: bias})}: must map token ids, integers from 0 on, to numbers "
                    "from -100 to 100"
                )


def _is_number(value: object, kind: type) -> bool:
    """Whole numbers are floats too; True and False are no numbers."""
    return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
