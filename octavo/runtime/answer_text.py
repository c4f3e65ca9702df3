"""An answer's text as its tokens come: whole characters, stop strings cut off, nothing taken back once given out."""

from __future__ import annotations

from octavo.runtime.tokenizer import IncrementalDecoder, Tokenizer


class AnswerText:
    """Decodes tokens and looks for stop strings, which may begin and end in the middle of tokens.

    The one that is complete first ends the answer, of several complete at once the longest: where tokens end does not
    matter. Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        self._held = ""
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All that has been given out."""
        return "".join(self._given)

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token -> (text that is certain now, the stop string that ends the answer, or None).

        Without ``may_stop`` the token's text is given out whole and begins no stop string.
        """
        piece = self._decoder.push(token)
        return self._take(piece, final=False) if may_stop else (self._give(self._held + piece, ""), None)

    def finish(self) -> tuple[str, str | None]:
        """The answer ends here -> what was held back, with U+FFFD for an unfinished character, and as in push."""
        return self._take(self._decoder.finish(), final=True)

    def _take(self, piece: str, *, final: bool) -> tuple[str, str | None]:
        pending = self._held + piece
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := pending.find(stop)) >= 0]
        if found:
            _, place, stop = min(found)
            return self._give(pending[:place], ""), stop
        keep = 0 if final else max((_overlap(pending, stop) for stop in self._stops), default=0)
        cut = len(pending) - keep
        return self._give(pending[:cut], pending[cut:]), None

    def _give(self, piece: str, held: str) -> str:
        self._held = held
        if piece:
            self._given.append(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
