"""Conversations as ids and loss weights, in the official chat format, without calling the tokenizer for known words.

Text is cut where the tokenizer's pre-tokenizer cuts it, and pieces met before are looked up.
Source: spec/model.md 5; a test holds it equal to ``octavo.runtime.prompt.encode_chat``.
"""

from __future__ import annotations

import re

from octavo.runtime.tokenizer import BEGIN_OF_SENTENCE, END_OF_SENTENCE, Tokenizer

_PUNCTUATION = r"!-/:-@\[-`{-~"
_PIECES = re.compile(
    rf" ?[0-9]|[{_PUNCTUATION}][A-Za-z]+| ?[A-Za-z]+| ?[{_PUNCTUATION}]+[\r\n]*|\s*[\r\n]+|\s+(?![^\s])|\s"
)
"""The pre-tokenizer's rule for ASCII."""
EFFORTS = {"low": 50, "high": 75, "max": 100}


class PieceEncoder(dict[str, list[int]]):
    """Encodes ASCII text to the ids that the tokenizer gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, piece: str) -> list[int]:
        ids = self[piece] = self.tokenizer.encode_text(piece)
        return ids

    def encode(self, text: str) -> list[int]:
        return [token for piece in _PIECES.findall(text) for token in self[piece]]


class ChatFormat:
    """The ids between the texts of a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_id
        self.encode = PieceEncoder(tokenizer).encode
        self.begin, self.end = special(BEGIN_OF_SENTENCE), special(END_OF_SENTENCE)
        self.system, self.user = special("<\uff5cSystem\uff5c>"), special("<\uff5cUser\uff5c>")
        self.assistant = special("<\uff5cAssistant\uff5c>")
        self.think, self.think_end = special("<think>"), special("</think>")
        self.effort = {
            name: self.encode(
                f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
            )
            for name, number in EFFORTS.items()
        }


class Conversation:
    """One conversation as it grows: ids, and for each id the weight of predicting it."""

    def __init__(self, chat: ChatFormat, effort: str | None, system: str = "", prompt_weight: float = 0.0) -> None:
        """``effort`` low, high or max is thinking mode, None is not; no ``system`` message if empty."""
        self._chat = chat
        self._thinking = effort is not None
        self._prompt_weight = prompt_weight
        self.ids = [chat.begin]
        self.weights = [0.0]
        if effort is not None or system:
            self._add([chat.system], 0.0)
        if effort is not None:
            self._add(chat.effort[effort], 0.0)
        if system:
            self._add(chat.encode(system), 0.0)

    def user(self, text: str) -> None:
        self._add([self._chat.user], 0.0)
        self._add(self._chat.encode(text), self._prompt_weight)

    def answer(self, thought: str, said: str, final: str) -> None:
        """The answer that is learned: ``thought`` where the model thinks, ``said`` where not, then ``final``."""
        chat = self._chat
        if self._thinking:
            self._add([chat.assistant, chat.think], 0.0)
            self._add([*chat.encode(thought), chat.think_end, *chat.encode(final), chat.end], 1.0)
        else:
            self._add([chat.assistant, chat.think_end], 0.0)
            self._add([*chat.encode(f"{said} {final}" if said else final), chat.end], 1.0)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.ids[length:], self.weights[length:]

    def history(self, final: str) -> None:
        """An earlier answer in thinking mode, whose reasoning the format drops. Nothing of it is learned."""
        chat = self._chat
        self._add([chat.assistant, chat.think_end, *chat.encode(final), chat.end], 0.0)

    def _add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
