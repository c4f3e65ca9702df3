"""One answer that is being made, and what its client hears of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from octavo.runtime.answer_text import AnswerText
from octavo.runtime.logprobs import TokenLogprob
from octavo.runtime.sampler import Draw
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Sequence

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    """Without the stop string or token that ended it."""
    ids: list[int]
    """All sampled tokens, the one that ended the answer included."""
    finish_reason: FinishReason
    """``stop``: end of sentence, stop string or stop token; ``length``: ``max_tokens`` or the room for state;
    ``abort``, ``timeout``, ``error``: as far as it came."""
    stop: str | int | None
    """The stop string or token id that ended it."""
    error: str | None
    """What went wrong, with finish reason ``error``."""
    logprobs: list[TokenLogprob] | None
    """One for each of ``ids``, if asked for."""
    prompt_tokens: int
    queue_seconds: float
    """Until its first token was computed."""
    prefill_seconds: float
    """From then until the first token of the answer."""
    decode_seconds: float
    """For all further tokens."""
    preemptions: int

    def summary(self) -> str:
        """One line: counts, speeds and why the answer ended."""
        prefill = f" at {self.prompt_tokens / self.prefill_seconds:.1f} tokens/s" if self.prefill_seconds else ""
        later = len(self.ids) - 1
        decode = f" at {later / self.decode_seconds:.1f} tokens/s" if later > 0 and self.decode_seconds else ""
        return (
            f"{self.prompt_tokens} prompt tokens{prefill}, {len(self.ids)} generated{decode}, "
            f"ended by {self.finish_reason}" + (f": {self.error}" if self.error else "")
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to an answer."""

    prompt: int
    """Which prompt of the call."""
    index: int
    """Which of the answers to it."""
    text: str
    """Text that is certain now, possibly none."""
    id: int | None
    """The sampled token; None when the answer ended without one."""
    logprob: TokenLogprob | None
    prompt_logprobs: list[TokenLogprob | None] | None
    """With the first token, if asked for: one entry a prompt token, None for the first."""
    answer: Answer | None
    """The finished answer, with the last delta."""


@dataclass(slots=True, eq=False)
class Request(Sequence):
    """A sequence with its parameters, its text, its client and its times."""

    params: SamplingParams = field(kw_only=True)
    text: AnswerText = field(kw_only=True)
    sink: Callable[[Delta], None] = field(kw_only=True)
    """Called in the engine's thread; it only hands over."""
    prompt: int = field(kw_only=True)
    index: int = field(kw_only=True)
    seed: int = field(kw_only=True)
    ending: tuple[int, ...] = field(kw_only=True)
    """Tokens that end the answer."""
    prompt_length: int = field(kw_only=True)
    arrival: float = field(kw_only=True)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    started: float | None = None
    first_token: float | None = None
    unread: bool = False
    """The last of its tokens has been drawn, and only the device knows it: a number below zero stands for it."""
    draw: Draw = field(init=False)
    """How its tokens are drawn; it looks at ``tokens`` as they grow, when none is unread."""

    def __post_init__(self) -> None:
        self.max_length = min(self.max_length, self.prompt_length + self.params.max_tokens)
        self.draw = Draw(self.params, self.seed, self.index, self.tokens, self.prompt_length, self.ending)

    @property
    def made(self) -> int:
        """Tokens of the answer so far, as far as they are known."""
        return len(self.tokens) - self.unread - self.prompt_length

    def expect(self, place: int) -> None:
        """Its next token is number ``place`` of those that this step draws."""
        self.tokens.append(~place)
        self.unread = True

    def forget_unread(self) -> None:
        """Take out what stands for a token that is on its way, if there is one."""
        if self.unread:
            self.tokens.pop()
            self.unread = False

    def learn(self, token: int) -> None:
        """The token that was expected."""
        self.forget_unread()
        self.tokens.append(token)

    def deliver(
        self,
        text: str,
        token: int | None,
        logprob: TokenLogprob | None = None,
        answer: Answer | None = None,
    ) -> None:
        first = self.params.prompt_logprobs is not None and token is not None and self.made == 1
        prompt_logprobs = self.prompt_logprobs if first else None
        self.sink(Delta(self.prompt, self.index, text, token, logprob, prompt_logprobs, answer))

    def answer(self, reason: FinishReason, now: float, stop: str | int | None, error: str | None) -> Answer:
        """The finished answer at clock time ``now``."""
        started = self.started if self.started is not None else now
        first_token = self.first_token if self.first_token is not None else now
        return Answer(
            text=self.text.text,
            ids=self.tokens[self.prompt_length :],
            finish_reason=reason,
            stop=stop,
            error=error,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            prompt_tokens=self.prompt_length,
            queue_seconds=started - self.arrival,
            prefill_seconds=first_token - started,
            decode_seconds=now - first_token,
            preemptions=self.preemptions,
        )
