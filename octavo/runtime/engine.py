"""The engine: prompts in, answers out, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from octavo.errors import UsageError
from octavo.runtime.assemble import Progress, assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.prompt import encode_chat
from octavo.runtime.runner import Chunk, Runner
from octavo.runtime.sampler import sample
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.tokenizer import IncrementalDecoder

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text to continue, token ids, or chat messages (``{"role": "user", "content": "..."}``, ...)."""

_SLOT = 0
"""The only request's."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    """Without the token that ended it."""
    ids: list[int]
    """All sampled tokens, the end of sentence included."""
    finish_reason: FinishReason
    """``stop``: the model ended its answer; ``length``: ``max_tokens`` or the room for state ran out."""
    prompt_tokens: int
    prefill_seconds: float
    """Until the first token was sampled."""
    decode_seconds: float
    """For all further tokens."""

    def summary(self) -> str:
        """One line: counts, speeds and why the answer ended."""
        prefill = self.prompt_tokens / self.prefill_seconds
        later = len(self.ids) - 1
        decode = f" at {later / self.decode_seconds:.1f} tokens/s" if later else ""
        return (
            f"{self.prompt_tokens} prompt tokens at {prefill:.1f} tokens/s, "
            f"{len(self.ids)} generated{decode}, ended by {self.finish_reason}"
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """One more token of an answer that is being made."""

    text: str
    """The whole characters that the token completes, possibly none."""
    id: int
    answer: Answer | None
    """The finished answer, with the last token."""


class Engine:
    """A model with its state, ready to answer.

    ``Engine("path")`` serves a checkpoint; ``Engine(EngineConfig(...))`` says more. Usable as a context manager.
    """

    def __init__(self, config: EngineConfig | str | Path, progress: Progress | None = None) -> None:
        """Load the weights; ``progress(done, total)`` is called with bytes. Raises :class:`OctavoError`."""
        self.config = config if isinstance(config, EngineConfig) else EngineConfig(model=Path(config))
        self._runner: Runner | None = Runner(assemble(self.config, progress))
        self.tokenizer = self._runner.assembly.tokenizer
        self.model_config = self._runner.assembly.config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give weights and state back. The engine cannot be used afterwards."""
        self._runner = None

    def describe(self) -> str:
        """One line: what is loaded, where, in which numeric mode, with room for how much."""
        text, assembly = self.model_config.text_config, self._running().assembly
        source = self.config.model or f"random {self.config.preset} weights (seed {self.config.weights_seed})"
        return (
            f"{source}: {text.num_hidden_layers} layers, {len(assembly.model.experts)} of {text.n_routed_experts} "
            f"experts on {assembly.device}, {self.config.numerics} numerics, room for {self.max_model_len} tokens"
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return min(self.config.kv_tokens, self.model_config.text_config.max_position_embeddings)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Answer]:
        """Answer the prompts, in their order. Raises :class:`UsageError` naming the prompt that cannot be answered."""
        if isinstance(prompts, str):
            raise UsageError("generate takes a list of prompts: generate([prompt])")
        encoded = [self.encode(prompt) for prompt in prompts]
        return [self._last(self._stream(ids, params or SamplingParams())) for ids in encoded]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The answer token by token. The prompt is checked before the first token is asked for."""
        return self._stream(self.encode(prompt), params or SamplingParams())

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises :class:`UsageError` if it is empty, too long, or has ids out of range."""
        if isinstance(prompt, str):
            ids = [self.model_config.bos_token_id, *self.tokenizer.encode_text(prompt)] if prompt else []
        elif prompt and all(isinstance(message, Mapping) for message in prompt):
            ids = encode_chat(self.tokenizer, prompt)  # type: ignore[arg-type]
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        if not ids:
            raise UsageError("The prompt is empty: give at least one character, token id or message.")
        vocabulary = self.model_config.text_config.vocab_size
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise UsageError(f"The prompt holds {token!r}: token ids are integers from 0 to {vocabulary - 1}.")
        if len(ids) >= self.max_model_len:
            raise UsageError(
                f"The prompt has {len(ids)} tokens; prompt and answer together have room for {self.max_model_len}. "
                "Shorten it, or raise --kv-tokens."
            )
        return ids

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        """Prefill in chunks, then one token a step until the answer ends."""
        runner, began = self._running(), time.perf_counter()
        runner.set_pages(_SLOT, range(runner.assembly.sizes.pages))
        for start in range(0, len(ids), self.config.chunk):
            logits = runner.run([Chunk(_SLOT, start, ids[start : start + self.config.chunk])])
        decoder, text, first_token = IncrementalDecoder(self.tokenizer), "", 0.0
        made: list[int] = []
        while True:
            position = len(ids) + len(made)
            token = sample(logits[0], params.temperature, params.seed, 0, position)
            made.append(token)
            first_token = first_token or time.perf_counter()
            reason = self._finish_reason(token, made, position + 1, params)
            piece = "" if reason == "stop" else decoder.push(token)
            piece += decoder.finish() if reason else ""
            text += piece
            if reason:
                times = (first_token - began, time.perf_counter() - first_token)
                yield Delta(piece, token, Answer(text, made, reason, len(ids), *times))
                return
            yield Delta(piece, token, None)
            logits = runner.run([Chunk(_SLOT, position, [token])])

    def _finish_reason(self, token: int, made: list[int], length: int, params: SamplingParams) -> FinishReason | None:
        if token == self.model_config.eos_token_id:
            return "stop"
        return "length" if len(made) == params.max_tokens or length >= self.max_model_len else None

    def _running(self) -> Runner:
        if self._runner is None:
            raise UsageError("The engine is closed.")
        return self._runner

    @staticmethod
    def _last(stream: Iterator[Delta]) -> Answer:
        *_, last = stream
        assert last.answer is not None
        return last.answer
