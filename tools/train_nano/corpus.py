"""Batches of conversations to learn from, a pure function of seed, kind and step.

Nothing is shared between calls but a table of known words, so every worker process may have its own ``Corpus``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from octavo.runtime.suites import arithmetic, facts, recall
from octavo.runtime.suites.base import Item, draw_on, split_of
from octavo.runtime.tokenizer import Tokenizer
from tools.train_nano import english
from tools.train_nano.render import ChatFormat, Conversation
from tools.train_nano.train_tokenizer import SYSTEM

KINDS = {
    "arithmetic": (128, 256),
    "facts": (128, 256),
    "english": (128, 256),
    "mixed": (128, 256),
    "recall": (128, 256, 512, 1024, 2048, 4096),
    "trace": (128, 256, 512, 1024, 2048, 4096),
}
"""Every kind, and the row lengths that suit it. Rows of ``mixed`` change among the first three from turn to turn."""
THINKING_SHARE = 0.25
"""Conversations in thinking mode."""
DROPPED_SHARE = 0.3
"""Thinking conversations of several turns as the format renders them: only the last answer keeps its reasoning."""
ONE_QUESTION_SHARE = 0.3
"""Recall conversations with a single question after a context as long as the row, as evaluation has."""

_TRIES = 100

Draw = Callable[[], "Turn | None"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its answer."""

    question: str
    thought: str
    """What a thinking model thinks."""
    said: str
    """What a model that does not think says before ``final``."""
    final: str


class Corpus:
    """``batch`` fills rows; each row is one conversation from position 0, padded at its end."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0, prompt_weight: float = 0.0, pad_id: int = 2) -> None:
        """``prompt_weight`` is the loss weight of questions; that of template tokens and recall contexts is 0."""
        self._chat = ChatFormat(tokenizer)
        self._seed = seed
        self._prompt_weight = prompt_weight
        self._pad_id = pad_id

    def batch(
        self, kind: str, rows: int, length: int, step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids int64 ``[rows, length]`` and weights float32 ``[rows, length]``: of predicting the id at that place.

        ``kind`` is one of :data:`KINDS`. Equal arguments give equal batches, in every process.
        """
        ids = np.full((rows, length), self._pad_id, dtype=np.int64)
        weights = np.zeros((rows, length), dtype=np.float32)
        for row in range(rows):
            conversation = self.conversation(kind, length, Random(f"{self._seed}/{kind}/{length}/{step}/{row}"))
            count = len(conversation.ids)
            ids[row, :count] = conversation.ids
            weights[row, :count] = conversation.weights
        return ids, weights

    def conversation(self, kind: str, length: int, rng: Random) -> Conversation:
        """One conversation of at most ``length`` tokens."""
        effort = rng.choice(("high", "high", "high", "low", "max")) if rng.random() < THINKING_SHARE else None
        if kind in ("recall", "trace"):
            return self._recall(length, rng, effort, traced=kind == "trace")
        draw = _DRAWS[kind]
        system = SYSTEM if rng.random() < 0.1 else ""

        def new() -> Conversation:
            return Conversation(self._chat, effort, system, self._prompt_weight)

        conversation, turns = _filled(new, lambda: draw(rng), length)
        if effort is None or len(turns) < 2 or rng.random() >= DROPPED_SHARE:
            return conversation
        return _dropped(new(), turns[: rng.randint(2, 4)])

    def _recall(self, length: int, rng: Random, effort: str | None, traced: bool) -> Conversation:
        def new() -> Conversation:
            return Conversation(self._chat, effort)

        start = len(new().ids) + 1
        room = length - start - 2
        most = room - recall.QUESTION_TOKENS - recall.ANSWER_TOKENS
        single = rng.random() < ONE_QUESTION_SHARE
        if single:
            context = recall.draw_context(rng, most, recall.TAIL_TOKENS if length >= 512 else 0, start)
        else:
            context = recall.draw_context(rng, min(most, round(room * rng.uniform(0.35, 0.75))), 0, start)
        records = [record for record in context.records if split_of(context.content(record, traced)) == "train"]
        if not records:  # all of few may be held out
            return self._recall(length, rng, effort, traced)
        rng.shuffle(records)
        if traced:
            records = _alternating(records, rng)
        asked = records[:1] if single else records
        items = (context.ask(record, traced=traced, with_context=not turn) for turn, record in enumerate(asked))
        return _filled(new, lambda: next(map(_turn, items), None), length)[0]


def _alternating(records: list[recall.Record], rng: Random) -> list[recall.Record]:
    """The same records: one that names a holder, one that does not, and so on, as long as there are both."""
    groups = [[r for r in records if r.holder is not None], [r for r in records if r.holder is None]]
    rng.shuffle(groups)
    return [r for pair in itertools.zip_longest(*groups) for r in pair if r is not None]


def _filled(new: Callable[[], Conversation], draw: Draw, length: int) -> tuple[Conversation, list[Turn]]:
    """A conversation with as many turns as ``length`` holds, at least one.

    In thinking mode every turn keeps its reasoning, which the format does only where tools are declared: so that all
    of them can be learned.
    """
    conversation, turns = new(), []
    for _ in range(_TRIES):
        turn = draw()
        if turn is None:
            break
        kept = len(conversation.ids)
        conversation.user(turn.question)
        conversation.answer(turn.thought, turn.said, turn.final)
        if len(conversation.ids) <= length:
            turns.append(turn)
            continue
        conversation.cut(kept)
        if turns:
            break
    if not turns:
        raise ValueError(f"rows of {length} tokens have no room for a turn")
    return conversation, turns


def _dropped(conversation: Conversation, turns: list[Turn]) -> Conversation:
    """The turns as the format renders them: only the last keeps its reasoning, and only it is learned."""
    for turn in turns[:-1]:
        conversation.user(turn.question)
        conversation.history(turn.final)
    conversation.user(turns[-1].question)
    conversation.answer(turns[-1].thought, turns[-1].said, turns[-1].final)
    return conversation


def _turn(item: Item) -> Turn:
    return Turn(item.question, item.reasoning, item.said, item.final)


def _arithmetic(rng: Random) -> Turn:
    return _turn(draw_on("train", lambda: arithmetic.draw(rng)))


def _facts(rng: Random) -> Turn:
    if rng.random() < 0.25:
        return _turn(facts.single(rng))
    return _turn(draw_on("train", lambda: facts.draw(rng)))


def _english(rng: Random) -> Turn:
    question, answer, thought = english.draw(rng)
    return Turn(question, thought, "", answer)


def _mixed(rng: Random) -> Turn:
    return rng.choice((_arithmetic, _facts, _english))(rng)


_DRAWS: dict[str, Callable[[Random], Turn]] = {
    "arithmetic": _arithmetic,
    "facts": _facts,
    "english": _english,
    "mixed": _mixed,
}
