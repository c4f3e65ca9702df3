"""The conversation at the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from octavo import Engine, EngineConfig, SamplingParams
from octavo.runtime.chat import HELP, chat
from octavo.runtime.prompt import encode_chat
from tests.model.mini_run import MINI


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(model=MINI, device="cpu", kv_tokens=512, max_requests=2, graphs="off")) as running:
        yield running


class Terminal:
    """Types the given lines; an exception among them is raised, as Ctrl-C would be."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)
        self.said: list[str] = []
        self.out = io.StringIO()

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def talk(self, engine: Engine, params: SamplingParams, system: str | None = None) -> list[str]:
        chat(engine, params, thinking=False, system=system, read=self.read, out=self.out, say=self.said.append)
        return self.out.getvalue().split("\n")[:-1]


def answer(engine: Engine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    return engine.generate([encode_chat(engine.tokenizer, messages, thinking=False)], params)[0].text


PARAMS = SamplingParams(max_tokens=4, logit_bias={199: -100.0})


def test_it_remembers_and_forgets(engine: Engine) -> None:
    terminal = Terminal("Hi", "And?", "/reset", "Hi", "/exit", "never read")
    terminal.talk(engine, PARAMS)
    hi = {"role": "user", "content": "Hi"}
    first = answer(engine, [hi], PARAMS)
    history = [hi, {"role": "assistant", "content": first.strip()}, {"role": "user", "content": "And?"}]
    assert terminal.out.getvalue() == "\n".join([first, answer(engine, history, PARAMS), first]) + "\n"
    assert terminal.said[0] == HELP and "forgotten" in terminal.said
    assert terminal.lines == ["never read"]


def test_system_message(engine: Engine) -> None:
    terminal = Terminal("Hi")
    terminal.talk(engine, PARAMS, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert terminal.out.getvalue() == answer(engine, messages, PARAMS) + "\n"


def test_what_does_not_fit_is_refused_and_forgotten(engine: Engine) -> None:
    terminal = Terminal("x" * 3000, "Hi")
    terminal.talk(engine, PARAMS)
    assert any("room for 512" in message for message in terminal.said)
    assert terminal.out.getvalue() == answer(engine, [{"role": "user", "content": "Hi"}], PARAMS) + "\n"


def test_unknown_command_and_interrupt_at_the_prompt(engine: Engine) -> None:
    terminal = Terminal("/wat", KeyboardInterrupt, "", "  ")
    terminal.talk(engine, PARAMS)
    assert terminal.out.getvalue() == ""
    assert terminal.said[1].startswith("/wat is no command") and terminal.said[2] == HELP


def test_interrupt_stops_the_answer_only(engine: Engine) -> None:
    class Interrupting(io.StringIO):
        written = 0

        def write(self, text: str) -> int:
            self.written += 1
            if self.written == 3:
                raise KeyboardInterrupt
            return super().write(text)

    terminal = Terminal("Hi", "/exit")
    terminal.out = Interrupting()
    terminal.talk(engine, SamplingParams(max_tokens=400, ignore_eos=True))
    assert any("ended by abort" in message for message in terminal.said)
    assert terminal.lines == []
