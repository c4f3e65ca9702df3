"""What a step has drawn, while the device may still be computing it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.runtime.logprobs import Logprobs
from octavo.runtime.request import Request
from octavo.runtime.sampler import Sampled


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step whose outcome the host does not know yet."""

    number: int
    """Of the step, from 1 on."""
    requests: list[Request]
    """Whose last token is on its way, in the order of ``sampled``."""
    sampled: Sampled
    asked: list[Request]
    """Of these, the ones that asked for log probabilities."""
    logprobs: Logprobs | None
    """Of their tokens, in their order; None if nobody asked."""
    prompt_logprobs: list[tuple[Request, Logprobs]]
    """Of prompts, in order of position."""
