"""``/v1/completions``: text and token ids without a template."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.runtime.server.messages import Grammar
from octavo.runtime.tokenizer import Tokenizer
from tests.server.running import Served
from tests.server.stub_client import MODEL_CONFIG, TEXT, TOKENIZER

PATH = "/v1/completions"
BOS = MODEL_CONFIG.bos_token_id


def text_of(events: list[tuple[str | None, Any]], index: int = 0) -> str:
    choices = [choice for _, data in events if isinstance(data, dict) for choice in data["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_a_whole_answer(server: Served) -> None:
    answer = server.post(PATH, prompt="Hello", max_tokens=100).json()
    assert answer["id"].startswith("cmpl-") and answer["id"] == server.submit.id
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    made = len(TOKENIZER.encode_text(TEXT)) + 1
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": made, "total_tokens": 2 + made}
    assert server.submit.prompts[0] == [BOS, *TOKENIZER.encode_text("Hello")]
    assert server.submit.params == {"temperature": 1.0, "timeout": 3600.0, "n": 1, "max_tokens": 100}


def test_a_stream_has_text_reason_usage_and_done_in_this_order(server: Served) -> None:
    events = server.events(PATH, prompt="Hello", max_tokens=100, stream_options={"include_usage": True})
    assert events[-1] == (None, "[DONE]")
    *chunks, usage = [data for _, data in events[:-1]]
    assert (
        usage["choices"] == [] and usage["usage"] == server.post(PATH, prompt="Hello", max_tokens=100).json()["usage"]
    )
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert text_of(events) == TEXT and "\ufffd" not in text_of(events)
    assert all("usage" not in data for _, data in server.events(PATH, prompt="Hello")[:-1])


def test_at_most_sixteen_tokens_unless_more_are_asked_for(server: Served) -> None:
    answer = server.post(PATH, prompt="Hello").json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_engine_looks_for_stop_strings(server: Served) -> None:
    answer = server.post(PATH, prompt="Hello", max_tokens=100, stop=["Bye", "ld"]).json()
    assert answer["choices"][0]["text"] == "Hello, w\u00f6r" and answer["choices"][0]["finish_reason"] == "stop"
    assert server.submit.params["stop"] == ["Bye", "ld"]
    server.post(PATH, prompt="Hello", stop="Bye")
    assert server.submit.params["stop"] == ["Bye"]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_token_ids_are_taken_as_they_are(server: Served, prompt: Any) -> None:
    assert server.post(PATH, prompt=prompt).status_code == 200
    assert server.submit.prompts[0] == [5, 6, 7]


def test_several_answers(server: Served) -> None:
    server.stub.answer = lambda submit, index: f"answer {index}"
    answer = server.post(PATH, prompt=["Hello"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["answer 0", "answer 1"]
    events = server.events(PATH, prompt="Hello", n=2)
    assert [text_of(events, index) for index in range(2)] == ["answer 0", "answer 1"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompts", [["Hello", "Bye"], [[5, 6], [7]]])
def test_several_prompts(server: Served, prompts: Any, streamed: bool) -> None:
    """The answers to the first come first, as OpenAI numbers them."""
    server.stub.answer = lambda submit, index: f"answer {index}"
    options = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 0}
    if streamed:
        events = server.events(PATH, **options, stream_options={"include_usage": True})
        texts, usage = [text_of(events, index) for index in range(4)], events[-2][1]["usage"]
    else:
        answer = server.post(PATH, **options).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
    shown = [prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt) for prompt in prompts]
    assert texts == [f"{shown[index // 2]}answer {index}" for index in range(4)]
    assert usage["prompt_tokens"] == sum(map(len, server.submit.prompts))
    assert usage["completion_tokens"] == 4 * (len(TOKENIZER.encode_text("answer 0")) + 1)


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_are_decoded_only_to_be_shown(server: Served, echo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[list[int]] = []
    decode = Tokenizer.decode

    def watched(self: Tokenizer, ids: list[int], **options: Any) -> str:
        decoded.append(list(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    server.post(PATH, prompt=[5, 6, 7, 8, 9], echo=echo)
    assert ([5, 6, 7, 8, 9] in decoded) == echo


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("prompt", "shown"), [("Hello", "Hello"), ([5, 6], TOKENIZER.decode([5, 6]))])
def test_echo_and_logprobs_show_the_prompt_as_it_was_sent(
    server: Served, prompt: Any, shown: str, streamed: bool
) -> None:
    options = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 100}
    if streamed:
        events = server.events(PATH, **options)
        text = text_of(events)
        parts = [data["choices"][0]["logprobs"] for _, data in events[:-1]]
        logprobs = {key: [entry for part in parts if part for entry in part[key]] for key in parts[0]}
    else:
        (choice,) = server.post(PATH, **options).json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == shown + TEXT
    first = logprobs["token_logprobs"][0]
    assert (first is None) == isinstance(prompt, list)  # text has the beginning of sentence before it
    assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
    assert len({len(entries) for entries in logprobs.values()}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith(("bytes:", "<")) or text[offset:].startswith(token)


def test_an_answer_can_be_held_to_a_grammar(server: Served) -> None:
    assert server.post(PATH, prompt="Hi", response_format={"type": "regex", "regex": "a+"}).status_code == 200
    assert server.submit.grammar == Grammar(kind="regex", source="a+")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[5], [-1]]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a", [5] * 1000]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [TOKENIZER.vocab_size]}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 5}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 999}, "max_tokens"),
        ({"prompt": [5] * 1000}, "prompt"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"foo": 1}, "stream": True}, "stream_options.foo"),
        ({"top_k": -1}, "top_k"),
        ({"stop_token_ids": [TOKENIZER.vocab_size]}, "stop_token_ids"),
        ({"stop_token_ids": [1 << 64]}, "stop_token_ids"),
        ({"logit_bias": {str(TOKENIZER.vocab_size): 1}}, "logit_bias"),
        ({"logit_bias": {str(1 << 64): 1}}, "logit_bias"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(server: Served, body: Any, param: str) -> None:
    assert server.refused(PATH, **({"prompt": "Hello"} | body))["param"] == param
    assert not server.stub.submitted
