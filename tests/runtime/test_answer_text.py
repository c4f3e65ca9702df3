"""Text of an answer: stop strings wherever tokens end, whole characters, and nothing taken back."""

from __future__ import annotations

import codecs
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.runtime.answer_text import AnswerText
from octavo.runtime.tokenizer import Tokenizer
from tests.conftest import ReportCount
from tests.tokenizer_data import mini_tokenizer, published_tokenizer


@functools.cache
def ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}


def spelled(tokenizer: Tokenizer, pieces: list[str | bytes]) -> list[int]:
    """One token for each piece."""
    ids = ids_by_bytes(tokenizer)
    return [ids[piece if isinstance(piece, bytes) else piece.encode()] for piece in pieces]


def answered(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str] | tuple[str, ...], min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What comes out, piece by piece as the engine asks for it, and the stop string that ended it."""
    text = AnswerText(tokenizer, tuple(stops))
    given, stop = [], None
    for made, token in enumerate(tokens, start=1):
        piece, stop = text.push(token, may_stop=made > min_tokens)
        given.append(piece)
        assert text.text == "".join(given)
        if stop is not None:
            return given, stop
    piece, stop = text.finish()
    given.append(piece)
    assert text.text == "".join(given)
    return given, stop


@dataclass(frozen=True)
class Case:
    what: str
    pieces: list[str | bytes]
    """The text or bytes of each token."""
    stops: list[str]
    given: list[str]
    """What each token gives out, and what the end gives out if no stop string came before."""
    stop: str | None = None
    min_tokens: int = 0


YI = "\u4e00"  # e4 b8 80
DING = "\u4e01"  # e4 b8 81
OH, IH = "\u043e", "\u0438"  # d0 be, d0 b8
SMILE = "\U0001f600"  # f0 9f 98 80
LOST = "\ufffd"
HELLO = "\u4f60\u597d"

CASES = [
    Case("no stop strings", ["ab", "cd"], [], ["ab", "cd", ""]),
    Case("no tokens", [], ["ab"], [""]),
    Case("stop that never comes", ["ab", "cd"], ["xyz"], ["ab", "cd", ""]),
    Case("stop is a token", ["ab", "cd"], ["cd"], ["ab", ""], "cd"),
    Case("stop is the first token", ["ab", "cd"], ["ab"], [""], "ab"),
    Case("stop inside a token: what follows goes too", ["a", " stop"], ["to"], ["a", " s"], "to"),
    Case("stop over two tokens", ["ab", "cd"], ["bc"], ["a", ""], "bc"),
    Case("stop over three tokens", ["a", "b", "cd"], ["abc"], ["", "", ""], "abc"),
    Case("stop from inside one token to inside another", [" stop", " stop"], ["op st"], [" st", ""], "op st"),
    Case("twice in a token", ["aaaa"], ["a"], [""], "a"),
    Case("the first of two", ["ab", "cd", "ab", "cd"], ["cd"], ["ab", ""], "cd"),
    Case("capital letters differ", ["stop", "END"], ["STOP", "end"], ["stop", "END", ""]),
    Case("one line break of two", ["a", "\n\n"], ["\n"], ["a", ""], "\n"),
    Case("two line breaks of two tokens", ["a", "\n", "\n"], ["\n\n"], ["a", "", ""], "\n\n"),
    Case("an added token", ["a", "</think>"], ["</think>"], ["a", ""], "</think>"),
    Case("an added token in plain ones", ["a", "</", "think", ">"], ["</think>"], ["a", "", "", ""], "</think>"),
    # Text held back.
    Case("held back, given at the end", ["ab"], ["abc"], ["", "ab"]),
    Case("held back, given when decided", ["ab", "d"], ["abc"], ["", "abd", ""]),
    Case("held back, begins again", ["ab", "a"], ["abc"], ["", "ab", "a"]),
    Case("stop that begins like itself", ["a", "a", "a", "b"], ["aab"], ["", "", "a", ""], "aab"),
    Case("stop that repeats itself", list("abababc"), ["ababc"], ["", "", "", "", "ab", "", ""], "ababc"),
    Case("as much as the longest beginning", ["ab", "c", "d"], ["bx", "abcx"], ["", "", "abcd", ""]),
    # Several stop strings: the first to be complete ends the answer; of two complete at once, the longer.
    Case("earlier in the text, not in the list", ["abcd"], ["d", "b"], ["a"], "b"),
    Case("one begins another", ["abc"], ["abc", "ab"], [""], "ab"),
    Case("one begins another, token by token", ["a", "b", "c"], ["abc", "ab"], ["", ""], "ab"),
    Case("one ends another", ["abc"], ["bc", "abc"], [""], "abc"),
    Case("one ends another, token by token", ["a", "bc"], ["bc", "abc"], ["", ""], "abc"),
    Case("only the ending one", ["b", "bc"], ["bc", "abc"], ["", "b"], "bc"),
    Case("one inside another", ["abcd"], ["abcd", "bc"], ["a"], "bc"),
    Case("one inside another, token by token", ["a", "b", "c", "d"], ["abcd", "bc"], ["", "", "a"], "bc"),
    Case("overlapping", ["ab", "cd"], ["bcd", "abc"], ["", ""], "abc"),
    Case("overlapping, other order", ["abcd"], ["abc", "bcd"], [""], "abc"),
    Case("the same twice", ["ab", "cd"], ["cd", "cd"], ["ab", ""], "cd"),
    # Characters of several bytes.
    Case("split character", [b"\xe4\xb8", b"\x80"], [], ["", YI, ""]),
    Case("split character as a stop", ["a", b"\xf0\x9f\x98", b"\x80"], [SMILE], ["a", "", ""], SMILE),
    Case("every byte a token", [b"\xf0", b"\x9f", b"\x98", b"\x80", "a"], [SMILE + "a"], [""] * 5, SMILE + "a"),
    Case("another character with the same first bytes", [b"\xe4\xb8", b"\x81"], [YI], ["", DING, ""]),
    Case("a held character is given whole", [b"\xe4\xb8", b"\x80", "a"], [YI + "b"], ["", "", YI + "a", ""]),
    Case("end and begin of characters in a token", [b"\xd0\xbe\xd0", b"\xb8"], [OH + IH], ["", ""], OH + IH),
    Case("stop before an unfinished character", [b"\xd0\xbe\xd0"], [OH], [""], OH),
    Case("a space and half a character", [b" \xd0", b"\xbe"], [" " + OH], ["", ""], " " + OH),
    Case("two characters in a token", [HELLO], [HELLO[1]], [HELLO[0]], HELLO[1]),
    Case("stop from inside such a token", ["a", HELLO, "b"], [HELLO[1] + "b"], ["a", HELLO[0], ""], HELLO[1] + "b"),
    Case("no normalisation", ["e", b"\xcc", b"\x81"], ["\u00e9"], ["e", "", "\u0301", ""]),
    # U+FFFD stands for bytes that are no character.
    Case("a byte that is no character", [b"\xff", "a"], [], [LOST, "a", ""]),
    Case("unfinished at the end", ["a", b"\xe4\xb8"], [], ["a", "", LOST]),
    Case("unfinished before another character", [b"\xe4\xb8", "a"], [], ["", LOST + "a", ""]),
    Case("U+FFFD as a stop", ["a", b"\xff"], [LOST], ["a", ""], LOST),
    Case("U+FFFD as a stop, at the end", ["a", b"\xe4\xb8"], [LOST], ["a", "", ""], LOST),
    Case("a stop ends with U+FFFD, at the end", ["a", b"\xe4\xb8"], ["a" + LOST], ["", "", ""], "a" + LOST),
    Case("a stop begins with U+FFFD", [b"\xe4\xb8", "a"], [LOST + "a"], ["", ""], LOST + "a"),
    # Before min_tokens nothing stops, nothing begins a stop, and nothing is held back.
    Case("stop too early", ["ab", "ab"], ["ab"], ["ab", ""], "ab", 1),
    Case("stop begins too early", ["a", "b", "ab"], ["ab"], ["a", "b", ""], "ab", 1),
    Case("never late enough", ["ab", "ab"], ["ab", "bx"], ["ab", "ab", ""], None, 2),
    Case("a character completed late enough", [b"\xe4\xb8", b"\x80"], [YI], ["", ""], YI, 1),
    Case("a character completed too early", [b"\xe4\xb8", b"\x80", "a"], [YI + "a"], ["", YI, "a", ""], None, 2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_table(case: Case) -> None:
    tokenizer = published_tokenizer()
    tokens = spelled(tokenizer, case.pieces)
    assert answered(tokenizer, tokens, case.stops, case.min_tokens) == (case.given, case.stop)


@pytest.mark.parametrize("case", [case for case in CASES if case.min_tokens == 0], ids=lambda case: case.what)
def test_where_tokens_end_does_not_matter(case: Case) -> None:
    """The table again with one token a byte, of the other vocabulary."""
    data = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in case.pieces)
    tokens = spelled(mini_tokenizer(), [bytes([byte]) for byte in data])
    given, stop = answered(mini_tokenizer(), tokens, case.stops)
    assert ("".join(given), stop) == ("".join(case.given), case.stop)


def test_the_longest_stop_strings_hold_back_no_more_than_they_must() -> None:
    a, b, c = spelled(mini_tokenizer(), ["a", "b", "c"])
    stop = "a" * 255 + "b"
    given, found = answered(mini_tokenizer(), [a] * 300 + [b], [stop])
    assert (given, found) == ([""] * 255 + ["a"] * 45 + [""], stop)
    given, found = answered(mini_tokenizer(), [a] * 300 + [c], [stop])
    assert (given, found) == ([""] * 255 + ["a"] * 45 + ["a" * 255 + "c", ""], None)


def first_stop(text: str, stops: list[str], begin: int) -> tuple[str, str | None]:
    """The definition, on the whole text: cut before the stop string that is complete first, the longest of these."""
    for end in range(begin, len(text) + 1):
        complete = [stop for stop in stops if text[begin:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def certain(text: str, stops: list[str], begin: int) -> str:
    """All of a text but an end that may still become a stop string."""
    for place in range(begin, len(text)):
        if any(stop.startswith(text[place:]) for stop in stops):
            return text[:place]
    return text


def check_against_the_definition(tokenizer: Tokenizer, tokens: list[int], stops: list[str], min_tokens: int) -> bool:
    """True if a stop string ended the answer."""
    data = [tokenizer.token_bytes(token) for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    visible = [""]
    for piece in data:
        visible.append(visible[-1] + decoder.decode(piece))
    begin = len(visible[min(min_tokens, len(tokens))])
    whole = b"".join(data).decode(errors="replace")

    given, stop = answered(tokenizer, tokens, stops, min_tokens)
    assert ("".join(given), stop) == first_stop(whole, stops, begin)
    steps = len(given) - 1  # the last one ends the answer
    for made in range(1, steps + 1):
        expected = visible[made] if made <= min_tokens else certain(visible[made], stops, begin)
        assert "".join(given[:made]) == expected
    return stop is not None


FEW_PIECES: list[str | bytes] = [
    *("a", "b", "c", "ab", "ac", "\n", "\n\n", YI),
    *(b"\xe4\xb8", b"\x80", b"\xd0", b"\xbe", b"\xd0\xbe\xd0", b" \xd0", b"\xff"),
]
FEW_CHARACTERS = ["a", "b", "c", "\n", " ", YI, OH, LOST]
"""So few that random stop strings are found, found in part, and overlap."""


@given(data=st.data())
def test_random_tokens_and_stop_strings(data: st.DataObject) -> None:
    tokenizer = mini_tokenizer()
    few = st.sampled_from(spelled(tokenizer, FEW_PIECES))
    tokens = data.draw(st.lists(few | few | few | st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    stops = data.draw(
        st.lists(st.lists(st.sampled_from(FEW_CHARACTERS), min_size=1, max_size=5).map("".join), max_size=4)
    )
    check_against_the_definition(tokenizer, tokens, stops, data.draw(st.integers(0, 4)))


PASSAGE = (
    "The quick brown fox.\n\nUser: na\u00efve caf\u00e9s?  \u4f60\u597d\uff0c\u4e16\u754c\u3002 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \U0001f600\U0001f602\U0001f469\u200d\U0001f52c </think> 1234567 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 END"
)


@pytest.mark.parametrize("make", [published_tokenizer, mini_tokenizer], ids=["published", "mini"])
def test_every_piece_of_a_passage_as_a_stop_string(
    make: Callable[[], Tokenizer], long_form: bool, report_count: ReportCount
) -> None:
    """Encoded text in many scripts, stopped by random pieces of itself, changed ones among them."""
    tokenizer = make()
    tokens = tokenizer.encode_text(PASSAGE)
    assert tokenizer.decode(tokens) == PASSAGE
    draw = random.Random(8)
    rounds = 8_000 if long_form else 800
    stopped = 0
    for _ in range(rounds):
        stops = []
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(PASSAGE))
            stop = PASSAGE[place : place + draw.randint(1, 12)]
            stops.append(stop + draw.choice(["", "", "x"]))
        stopped += check_against_the_definition(tokenizer, tokens, stops, draw.choice([0, 0, 1, 5, 20]))
    assert rounds / 2 < stopped < rounds, "both outcomes are common"
    report_count("answers cut at their stop strings", rounds)
