"""Recall over long contexts: records scattered among prose, then a question for one of them by its name.

A record is a name and its value behind it, ``Mara Holt blue 47.``, and its first token has an odd position in the
prompt. Then the last name and the first token of the value share an entry where entries are of two tokens, and so do
``with`` and a holder's first name: a small model learns to find such a pair much sooner than one that two entries
share.

Some questions need two records: the first says whose record holds the value. ``What is`` is answered with the records
first, one after the other. ``Name`` is answered at once, so the second look-up has to follow the first within the
layers of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from octavo.runtime.suites.base import Item, Split, split_of, stream_of
from octavo.runtime.suites.words import (
    ADJECTIVES,
    BESIDE,
    BIRDS,
    COLOURS,
    FIRST_NAMES,
    LAST_NAMES,
    NOUNS,
    PLACED,
    POSSESSIONS,
    STONES,
    TREES,
)

RECORD_TOKENS = 6
"""Tokens of ``Mara Holt blue 47.``"""
LINK_TOKENS = 8
"""Tokens of ``Mara Holt is with Otto Brand now.``"""
PROSE_TOKENS = 8
"""Tokens of ``The old house stands near the road.`` Like records, sentences have an even number, and move no parity."""
TAIL_TOKENS = 64
"""Least tokens of prose between the last record and the question in evaluation."""
QUESTION_TOKENS = 9
ANSWER_TOKENS = 26
"""Room for the longest answer, end of sentence included."""
LINK_SHARE = 0.3
"""How many questions that are answered step by step need two records; as many records are links."""
TRACED_LINK_SHARE = 0.5
"""The same of questions that are answered at once."""
_QUESTION = "What is the {} of {}?"
_TRACE = "Name the {} of {}."
_OPENERS = ("Here is the list of each {}.", "Here is the whole list of each {}.")
"""Of an even and of an odd number of tokens."""
_OPENER_TOKENS = 9
CHAT_START = 2
"""Position of a user's first token where the model does not think."""
THINKING_START = 27
"""The same behind the line that sets the default effort."""
_DENSITY = (0.2, 0.5)
"""Share of a context that records take."""
_VALUES = (*COLOURS, *BIRDS, *TREES, *STONES)


@dataclass(frozen=True, slots=True)
class Record:
    """What a context says of one name: its value, or whose record holds it."""

    name: str
    value: str
    holder: str | None = None
    """Another name, whose value this one has."""


@dataclass(frozen=True, slots=True)
class Context:
    """Records about one kind of possession, among prose."""

    possession: str
    records: tuple[Record, ...]
    sentences: tuple[Record | str, ...]
    """Records and prose in their order."""
    opener: str

    @property
    def text(self) -> str:
        said = [s if isinstance(s, str) else self.say(s) for s in self.sentences]
        return " ".join([self.opener, *said])

    def say(self, record: Record) -> str:
        """A record as a sentence."""
        if record.holder is not None:
            return f"{record.name} is with {record.holder} now."
        return f"{record.name} {record.value}."

    def content(self, record: Record, traced: bool) -> str:
        kind = "trace" if traced else "recall"
        return f"{kind}, {self.possession}, {record.name}, {record.holder}, {record.value}"

    def ask(self, record: Record, *, traced: bool = False, with_context: bool = True) -> Item:
        """The item that asks for a record; later turns of a conversation leave the context out."""
        steps = [self.say(record)]
        if record.holder is not None:
            steps.append(self.say(Record(record.holder, record.value)))
        question = (_TRACE if traced else _QUESTION).format(self.possession, record.name)
        return Item(
            question=f"{self.text} {question}" if with_context else question,
            reasoning=" ".join(steps),
            answer=record.value,
            content=self.content(record, traced),
            direct=traced,
        )


def item(
    seed: int,
    index: int,
    side: Split = "evaluate",
    *,
    tokens: int = 1000,
    traced: bool = False,
    start: int = CHAT_START,
) -> Item:
    """Item ``index`` of the stream ``seed``: question and answer have about ``tokens`` tokens together.

    ``start`` is the position of the question's first token in the prompt.
    """
    rng = stream_of(f"{'trace' if traced else 'recall'}@{tokens}", seed, index)
    context = draw_context(rng, tokens - QUESTION_TOKENS - ANSWER_TOKENS, TAIL_TOKENS, start)
    wants_link = rng.random() < (TRACED_LINK_SHARE if traced else LINK_SHARE)
    record = rng.choice([r for r in context.records if (r.holder is not None) == wants_link])
    while split_of(context.content(record, traced)) != side:
        value = draw_value(rng)
        context = _revalued(context, record.holder or record.name, value)
        record = replace(record, value=value)
    return context.ask(record, traced=traced)


def draw_context(rng: Random, tokens: int, tail: int, start: int) -> Context:
    """A context of about ``tokens`` tokens from position ``start`` on, with at least four records.

    Its last ``tail`` tokens or more are prose.
    """
    mean = RECORD_TOKENS + LINK_SHARE * (LINK_TOKENS - RECORD_TOKENS)
    count = max(4, round((tokens - _OPENER_TOKENS - tail) * rng.uniform(*_DENSITY) / mean))
    links = max(1, round(count * LINK_SHARE))
    names = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), count)
    records = []
    for position, number in enumerate(names):
        first, last = divmod(number, len(LAST_NAMES))
        name = f"{FIRST_NAMES[first]} {LAST_NAMES[last]}"
        if position < count - links:
            records.append(Record(name, draw_value(rng)))
        else:
            holder = records[int(rng.random() * (count - links))]
            records.append(Record(name, holder.value, holder.name))
    rest = tokens - _OPENER_TOKENS - (count - links) * RECORD_TOKENS - links * LINK_TOKENS
    tail_sentences = -(-tail // PROSE_TOKENS)
    between = max(0, rest // PROSE_TOKENS - tail_sentences)
    sentences: list[Record | str] = [*records, *(_prose(rng) for _ in range(between))]
    rng.shuffle(sentences)
    sentences += [_prose(rng) for _ in range(tail_sentences)]
    possession = rng.choice(POSSESSIONS)
    return Context(possession, tuple(records), tuple(sentences), _OPENERS[(start + 1) % 2].format(possession))


def draw_value(rng: Random) -> str:
    return f"{rng.choice(_VALUES)} {rng.randint(10, 99)}"


def _revalued(context: Context, name: str, value: str) -> Context:
    """The same context where ``name``, and whoever refers to it, has another value."""

    def changed(record: Record) -> Record:
        return replace(record, value=value) if name in (record.name, record.holder) else record

    return replace(
        context,
        records=tuple(changed(r) for r in context.records),
        sentences=tuple(s if isinstance(s, str) else changed(s) for s in context.sentences),
    )


def _prose(rng: Random) -> str:
    return (
        f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(PLACED)} {rng.choice(BESIDE)} "
        f"the {rng.choice(NOUNS)}."
    )
