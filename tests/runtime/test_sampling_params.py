"""What sampling parameters take: every bound from both sides, wrong types, and errors with field, value and rule."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from typing import Any

import pytest

from octavo import SamplingParams, UsageError
from octavo.runtime.cli import main
from octavo.runtime.sampling import MAX_ANSWERS, MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOPS

TINY = math.ulp(0.0)
"""The smallest number above zero."""

INTEGERS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**30),
    "min_tokens": (0, 2**30),
    "top_k": (0, 2**30),
    "n": (1, MAX_ANSWERS),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (TINY, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "timeout": (TINY, 1e9),
}
OPTIONAL = {"seed", "logprobs", "prompt_logprobs", "timeout"}
OTHERS = {"logit_bias", "token_mask", "stop", "stop_token_ids", "ignore_eos"}


def refused(**fields: Any) -> str:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert len(message) < 400, "an absurd value must not fill the screen"
    return message


def made(**fields: Any) -> SamplingParams:
    """With room for any ``min_tokens``."""
    return SamplingParams(**({"max_tokens": 2**30} | fields))


def test_every_field_is_in_these_tables() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {*INTEGERS, *NUMBERS, *OTHERS}


@pytest.mark.parametrize(("name", "bounds"), (INTEGERS | NUMBERS).items())
def test_bounds(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    for value in bounds:
        assert getattr(made(**{name: value}), name) == value
    if name in INTEGERS:
        outside, noun = [low - 1, high + 1, -(10**30), 10**30], "an integer"
    else:
        below, above = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
        outside, noun = [below, above, -1e300, 1e300, math.inf, -math.inf, math.nan], "a number"
    for value in outside:
        message = refused(**{name: value})
        assert message.startswith(f"{name} {value!r}: must be {noun} ") and f"{high:.0f}" in message, message
        assert message.endswith(", or None") == (name in OPTIONAL)


@pytest.mark.parametrize("name", (INTEGERS | NUMBERS))
def test_wrong_types(name: str) -> None:
    wrong: list[object] = ["1", b"1", True, False, [1], (1,), {}, 1j, object]
    wrong += [1.0, 1.5] if name in INTEGERS else []
    for value in wrong:
        assert refused(**{name: value}).startswith(f"{name} {value!r}: must be a")
    if name in OPTIONAL:
        assert getattr(made(**{name: None}), name) is None
    else:
        assert refused(**{name: None}).startswith(f"{name} None: must be a")


def test_whole_numbers_are_numbers() -> None:
    for name in NUMBERS:
        assert getattr(made(**{name: 1}), name) == 1


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(max_tokens=7, min_tokens=7).min_tokens == 7
    assert refused(max_tokens=7, min_tokens=8) == "min_tokens 8: must be at most max_tokens, 7"


LONG = "x" * (MAX_STOP_LENGTH + 1)


@pytest.mark.parametrize(
    ("fields", "start", "rule"),
    [
        ({"stop": "END"}, "stop 'END'", "must be a list"),
        ({"stop": None}, "stop None", "must be a list"),
        ({"stop": 5}, "stop 5", "must be a list"),
        ({"stop": {"END"}}, "stop {'END'}", "must be a list"),
        ({"stop": ["."] * (MAX_STOPS + 1)}, "stop: has 17 entries", "at most 16"),
        ({"stop": ["ok", ""]}, "stop ''", "strings of 1 to 256 characters"),
        ({"stop": [LONG]}, "stop 'xxx", "strings of 1 to 256 characters"),
        ({"stop": ["x" * 10**6]}, "stop 'xxx", "strings of 1 to 256 characters"),
        ({"stop": ["ok", 5]}, "stop 5", "strings"),
        ({"stop": [None]}, "stop None", "strings"),
        ({"stop": [b"END"]}, "stop b'END'", "strings"),
        ({"stop": ["\ud83d"]}, "stop '\\ud83d'", "valid Unicode"),
        ({"stop_token_ids": 5}, "stop_token_ids 5", "must be a list"),
        ({"stop_token_ids": "5"}, "stop_token_ids '5'", "must be a list"),
        ({"stop_token_ids": None}, "stop_token_ids None", "must be a list"),
        ({"stop_token_ids": list(range(MAX_STOPS + 1))}, "stop_token_ids: has 17 entries", "at most 16"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids -1", "integers from 0 on"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids '3'", "integers from 0 on"),
        ({"stop_token_ids": [3.0]}, "stop_token_ids 3.0", "integers from 0 on"),
        ({"stop_token_ids": [True]}, "stop_token_ids True", "integers from 0 on"),
        ({"logit_bias": None}, "logit_bias None", "must map token ids"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias [(1, 2.0)]", "must map token ids"),
        ({"logit_bias": "1"}, "logit_bias '1'", "must map token ids"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias {'1': 2.0}", "integers from 0 on"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias {-1: 2.0}", "integers from 0 on"),
        ({"logit_bias": {True: 2.0}}, "logit_bias {True: 2.0}", "integers from 0 on"),
        ({"logit_bias": {1.0: 2.0}}, "logit_bias {1.0: 2.0}", "integers from 0 on"),
        ({"logit_bias": {0: 1.0, 1: 100.5}}, "logit_bias {1: 100.5}", "from -100 to 100"),
        ({"logit_bias": {1: -100.5}}, "logit_bias {1: -100.5}", "from -100 to 100"),
        ({"logit_bias": {1: math.nan}}, "logit_bias {1: nan}", "from -100 to 100"),
        ({"logit_bias": {1: -math.inf}}, "logit_bias {1: -inf}", "from -100 to 100"),
        ({"logit_bias": {1: "2"}}, "logit_bias {1: '2'}", "from -100 to 100"),
        ({"logit_bias": {1: None}}, "logit_bias {1: None}", "from -100 to 100"),
        ({"logit_bias": {1: True}}, "logit_bias {1: True}", "from -100 to 100"),
        ({"ignore_eos": "false"}, "ignore_eos 'false'", "True or False"),
        ({"ignore_eos": 1}, "ignore_eos 1", "True or False"),
        ({"ignore_eos": None}, "ignore_eos None", "True or False"),
        ({"token_mask": [1, 2]}, "token_mask [1, 2]", "a function"),
        ({"token_mask": True}, "token_mask True", "a function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_lists_maps_and_switches(fields: dict[str, object], start: str, rule: str) -> None:
    message = refused(**fields)
    assert message.startswith(start) and rule in message, message


def test_lists_and_maps_at_their_bounds() -> None:
    params = SamplingParams(
        stop=tuple("x" * length for length in range(MAX_STOP_LENGTH - MAX_STOPS + 1, MAX_STOP_LENGTH + 1)),
        stop_token_ids=tuple(range(MAX_STOPS)),
        logit_bias={0: -100, 1: 100.0},
        ignore_eos=True,
        token_mask=lambda answer: None,
    )
    assert len(params.stop) == len(params.stop_token_ids) == MAX_STOPS
    assert len(params.stop[-1]) == MAX_STOP_LENGTH and params.logit_bias == {0: -100, 1: 100.0}


def test_what_was_checked_does_not_change() -> None:
    """The engine reads the parameters in its own thread, long after the caller has gone on with its lists."""
    fields: dict[str, Any] = {"stop": ["END"], "stop_token_ids": [5], "logit_bias": {1: 2.0}}
    params = SamplingParams(**fields)
    fields["stop"].append("")
    fields["stop_token_ids"].append(-1)
    fields["logit_bias"][-1] = math.nan
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (5,), {1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 99  # type: ignore[misc]
    with pytest.raises(UsageError, match="n 99: must be"):
        dataclasses.replace(params, n=99)


@pytest.mark.parametrize("name", ["temprature", "max_new_tokens", "stop_tokens", "self", ""])
def test_unknown_fields(name: str) -> None:
    """The error names the field, its value and all the fields there are."""
    message = refused(**{"temperature": 1.0, name: 0.7})
    assert message.startswith(f"{name} 0.7: no such field; there are max_tokens, min_tokens, temperature")
    listed = message.partition("there are ")[2].split(", ")
    assert listed == [field.name for field in dataclasses.fields(SamplingParams)]


def test_the_signature_is_still_that_of_the_fields() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(SamplingParams)]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "nan"], "temperature nan: must be a number from 0 to 100"),
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "0"], "top_p 0.0: must be a number above 0 and at most 1"),
        (["--n", "65"], "n 65: must be an integer from 1 to 64"),
        (["--seed", str(2**63)], "seed 9223372036854775808: must be an integer from -9223372036854775808"),
        (["--stop", ""], "stop '': must be strings"),
        (["--stop", "."] * 17, "stop: has 17 entries"),
        (["--stop-token-ids", "-1"], "stop_token_ids -1"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens 9: must be at most max_tokens, 8"),
        (["--temprature", "1"], "--temprature"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_command_line_says_the_same(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", *arguments, "Hello"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in " ".join(said.err.split()) and not said.out
