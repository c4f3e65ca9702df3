"""A stand-in for the model that holds the scheduler to its word, and the answers it gives to a lone request.

Logits are a pure function of all tokens so far, so whatever a scheduler mixes up changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tokenizers
import torch
from torch import Tensor

from octavo.kernels.paging import PAGE_TOKENS
from octavo.model.packaged import packaged_file
from octavo.model.presets import preset
from octavo.runtime.request import FinishReason
from octavo.runtime.runner import Chunk
from octavo.runtime.sampler import Draw, sample
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.tokenizer import Tokenizer

VOCABULARY = 32
"""Ids of the packaged tokenizer that stand for whole characters: 0 to 2 are special tokens, then ``!`` and so on."""
EOS = 1
_LOGITS = torch.randn(4093, VOCABULARY, generator=torch.Generator().manual_seed(1))
_LIKELIEST: list[list[int]] = _LOGITS.argsort(dim=1, descending=True).tolist()


def packaged_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(packaged_file("mini", "tokenizer.json").decode())
    return Tokenizer(backend, preset("mini"))


def digest(tokens: Sequence[int], before: int = 0) -> int:
    """All tokens in one number, which those that follow go on from."""
    for token in tokens:
        before = (before * 1_000_003 + token + 1) % ((1 << 61) - 1)
    return before


def logits_after(digests: Sequence[int]) -> Tensor:
    """Digests of all tokens up to some rows -> logits [rows, VOCABULARY]."""
    return _LOGITS[[number % len(_LOGITS) for number in digests]]


class StubRunner:
    """Writes each token where the page table says and reads all of a request back; knows what each slot has seen."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._memory = [[-1] * PAGE_TOKENS for _ in range(scheduler.pages.count)]
        self._table: list[dict[int, int]] = [{} for _ in range(scheduler.slots.count)]
        self._seen: list[list[int]] = [[] for _ in range(scheduler.slots.count)]
        self._digests = [0] * scheduler.slots.count

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """As in the real table, entries stay until they are overwritten."""
        for slot, place, page in pages:
            self._table[slot][place] = page

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        """-> digests [R] int64, the hidden rows of this model."""
        chunks = [replace(chunk, ids=[self._known(token, drawn) for token in chunk.ids]) for chunk in chunks]
        self._check_batch(chunks)
        for sequence in self._scheduler.running:
            table = self._table[sequence.slot]
            assert [table[place] for place in range(len(sequence.pages))] == sequence.pages, "page table"
        return torch.tensor([row for chunk in chunks for row in self._compute(chunk)])

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        return logits_after(hidden[rows].tolist())

    def _known(self, token: int, drawn: Tensor | None) -> int:
        """What an id below zero stands for."""
        if token >= 0:
            return token
        assert drawn is not None, "a token that nobody has drawn"
        return max(int(drawn[~token]), 0)

    def _check_batch(self, chunks: Sequence[Chunk]) -> None:
        scheduler = self._scheduler
        slots = [chunk.slot for chunk in chunks]
        assert len(set(slots)) == len(slots), "a slot twice in a step"
        assert all(chunk.ids for chunk in chunks), "a chunk without rows"
        rows = sum(len(chunk.ids) for chunk in chunks)
        assert 0 < rows <= scheduler.row_budget, "row budget"
        assert len(chunks) == len(scheduler.running), "somebody without a row"
        assert not any(sequence.complete for sequence in scheduler.running), "a row behind the last token"
        lengths = {sequence.slot: len(sequence.tokens) for sequence in scheduler.running}
        decoding = [0 < chunk.start == lengths[chunk.slot] - 1 for chunk in chunks]
        assert decoding == sorted(decoding, reverse=True), "a decode row after a prefill chunk"
        prefills = [chunk.start for chunk, decodes in zip(chunks, decoding, strict=True) if not decodes]
        assert not any(prefills[1:]), "two prompts are computed in part"
        running = [sequence.slot for sequence in scheduler.running]
        for kind in (slots[: sum(decoding)], slots[sum(decoding) :]):
            order = [running.index(slot) for slot in kind]
            assert order == sorted(order), "not in order of arrival"

    def _compute(self, chunk: Chunk) -> list[int]:
        slot, table = chunk.slot, self._table[chunk.slot]
        if chunk.start == 0:
            self._seen[slot], self._digests[slot] = [], 0
        seen = self._seen[slot]
        assert chunk.start == len(seen), f"slot {slot} has seen {len(seen)} tokens and is to go on at {chunk.start}"
        for position, token in enumerate(chunk.ids, chunk.start):
            self._memory[table[position // PAGE_TOKENS]][position % PAGE_TOKENS] = token
        seen += chunk.ids
        pages = range(-(-len(seen) // PAGE_TOKENS))
        found = [token for place in pages for token in self._memory[table[place]]][: len(seen)]
        assert found == seen, f"slot {slot}: its state was overwritten"
        digests = []
        for token in chunk.ids:
            self._digests[slot] = digest([token], self._digests[slot])
            digests.append(self._digests[slot])
        return digests


class MaskError(Exception):
    """What a failing token mask raises."""


@dataclass(frozen=True)
class FailingMask:
    """A token mask that allows everything, and raises when the answer has ``length`` tokens."""

    length: int

    def __call__(self, answer: Sequence[int]) -> None:
        if len(answer) == self.length:
            raise MaskError(f"at {self.length}")


@dataclass(frozen=True)
class Ask:
    """What one request asks for."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    index: int = 0

    @property
    def ending(self) -> tuple[int, ...]:
        return self.params.stop_token_ids if self.params.ignore_eos else (*self.params.stop_token_ids, EOS)


@dataclass(frozen=True)
class Lone:
    """The answer to a request that has the model to itself."""

    ids: list[int]
    reason: FinishReason | None
    """None if it was not followed to its end."""
    stop: str | int | None
    text: str


def answer_alone(ask: Ask, room: int, tokenizer: Tokenizer, most: int | None = None) -> Lone:
    """By the definition of the parameters, without scheduler, engine or incremental text; ``most`` tokens of it.

    ``room`` is the longest prompt and answer together. Stop strings go with ``min_tokens`` 0 here.
    """
    params, tokens, before = ask.params, list(ask.prompt), digest(ask.prompt)
    assert not (params.stop and params.min_tokens)
    while True:
        ids = tokens[len(ask.prompt) :]
        text = tokenizer.decode(ids)
        if len(ids) == most:
            return Lone(ids, None, None, text)
        if isinstance(params.token_mask, FailingMask) and len(ids) == params.token_mask.length:
            return Lone(ids, "error", None, text)
        token = _next_token(ask, tokens, before)
        tokens.append(token)
        ids.append(token)
        before = digest([token], before)
        if token in ask.ending and len(ids) > params.min_tokens:
            return Lone(ids, "stop", token, text)
        text = tokenizer.decode(ids)
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if found:
            place, stop = min(found)
            return Lone(ids, "stop", stop, text[:place])
        if len(ids) == params.max_tokens or len(tokens) == room:
            return Lone(ids, "length", None, text)


def _next_token(ask: Ask, tokens: list[int], before: int) -> int:
    params, made = ask.params, len(tokens) - len(ask.prompt)
    if params.temperature == 0.0:
        forbidden = ask.ending if made < params.min_tokens else ()
        likeliest = _LIKELIEST[before % len(_LIKELIEST)]
        return next(token for token in likeliest if token not in forbidden)
    draw = Draw(params, ask.seed, ask.index, tokens, len(ask.prompt), ask.ending)
    (token,) = sample(logits_after([before]), [draw]).read()
    assert isinstance(token, int)
    return token
