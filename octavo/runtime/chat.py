"""A conversation at the terminal: history, ``/reset``, and Ctrl-C that stops the answer but not the chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from octavo.errors import UsageError
from octavo.runtime.engine import Engine
from octavo.runtime.prompt import encode_chat
from octavo.runtime.sampling import SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."
THINK_END = "</think>"


def chat(
    engine: Engine,
    params: SamplingParams,
    *,
    thinking: bool,
    system: str | None,
    read: Callable[[], str],
    out: TextIO,
    say: Callable[[str], None],
) -> None:
    """Talk until ``read`` raises EOFError. Answers go to ``out``, everything else through ``say``.

    A message that does not fit is refused and forgotten; what was said before stays.
    """
    if params.n != 1:
        raise UsageError(f"--n {params.n}: a conversation goes on from one answer")
    say(HELP)
    start = [{"role": "system", "content": system}] if system else []
    history = list(start)
    while True:
        try:
            message = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say(HELP)
            continue
        if message == "/exit":
            return
        if message == "/reset":
            history = list(start)
            say("forgotten")
        elif message.startswith("/"):
            say(f"{message.split()[0]} is no command. {HELP}")
        elif message:
            history = _turn(engine, params, thinking, [*history, {"role": "user", "content": message}], out, say)


def _turn(
    engine: Engine,
    params: SamplingParams,
    thinking: bool,
    history: list[dict[str, str]],
    out: TextIO,
    say: Callable[[str], None],
) -> list[dict[str, str]]:
    """Answer the last message -> the history with it and its answer, or without both if it could not be answered."""
    try:
        stream = engine.stream(encode_chat(engine.tokenizer, history, thinking=thinking), params)
    except UsageError as error:
        say(str(error))
        return history[:-1]
    while not stream.finished:
        try:
            for delta in stream:
                out.write(delta.text)
                out.flush()
        except KeyboardInterrupt:
            stream.abort()
    out.write("\n")
    (answer,) = stream.answers.values()
    say(answer.summary())
    # The model's thoughts are not part of the conversation; the official encoding drops those of earlier turns.
    content = (answer.text.partition(THINK_END)[2] if thinking else answer.text).strip()
    if answer.error or not content:
        say("no answer to remember: the message is forgotten")
        return history[:-1]
    return [*history, {"role": "assistant", "content": content}]
