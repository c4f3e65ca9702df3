"""``/v1/chat/completions``: what the engine is asked, and what the client is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.runtime.prompt import encode_chat
from octavo.runtime.server.messages import Grammar
from tests.server.running import Served
from tests.server.stub_client import MODEL, TEXT, THOUGHT, TOKENIZER

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
PLAIN: dict[str, Any] = {"messages": MESSAGES, "thinking": {"type": "disabled"}}
DSML = "\uff5cDSML\uff5c"
CALL = (
    f'I look.\n\n<{DSML} calls>\n<{DSML} invoke name="weather">\n'
    f'<{DSML} parameter name="city" string="true">K\u00f6ln</{DSML} parameter>\n'
    f'<{DSML} parameter name="days" string="false">3</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


def deltas(events: list[tuple[str | None, Any]], key: str, index: int = 0) -> str:
    choices = [choice for _, data in events if isinstance(data, dict) for choice in data["choices"]]
    return "".join(choice["delta"].get(key) or "" for choice in choices if choice["index"] == index)


def test_a_whole_answer_has_reasoning_text_and_usage(server: Served) -> None:
    answer = server.post(PATH, messages=MESSAGES).json()
    assert answer["id"].startswith("chatcmpl-") and answer["id"] == server.submit.id
    assert answer["object"] == "chat.completion" and answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == TEXT and choice["message"]["reasoning_content"] == THOUGHT
    reasoning, text = len(TOKENIZER.encode_text(THOUGHT)), len(TOKENIZER.encode_text(TEXT))
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(server.submit.prompts[0])
    assert usage["completion_tokens"] == reasoning + text + 2  # the ends of reasoning and of the sentence
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == reasoning


def test_a_stream_has_role_deltas_reason_and_done_in_this_order(server: Served) -> None:
    events = server.events(PATH, messages=MESSAGES)
    assert events[-1] == (None, "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert {chunk["id"] for chunk in chunks} == {server.submit.id}
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert deltas(events, "reasoning_content") == THOUGHT
    assert deltas(events, "content") == TEXT
    assert not any("\ufffd" in str(choice["delta"]) for choice in choices)


def test_usage_is_streamed_last_and_only_if_asked_for(server: Served) -> None:
    events = server.events(PATH, messages=MESSAGES, stream_options={"include_usage": True})
    chunks = [data for _, data in events[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == server.post(PATH, messages=MESSAGES).json()["usage"]


@pytest.mark.parametrize("streamed", [False, True])
def test_several_answers_to_one_prompt(server: Served, streamed: bool) -> None:
    server.stub.answer = lambda submit, index: f"answer {index}"
    if streamed:
        events = server.events(PATH, **PLAIN, n=3, stream_options={"include_usage": True})
        texts = [deltas(events, "content", index) for index in range(3)]
        usage = events[-2][1]["usage"]
    else:
        answer = server.post(PATH, **PLAIN, n=3).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        usage = answer["usage"]
    assert texts == ["answer 0", "answer 1", "answer 2"]
    assert usage["prompt_tokens"] == len(server.submit.prompts[0])
    assert usage["completion_tokens"] == 3 * (len(TOKENIZER.encode_text("answer 0")) + 1)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    ("options", "thinking", "effort"),
    [
        ({}, True, None),
        ({"reasoning_effort": "max"}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
    ],
)
def test_the_prompt_is_the_template_s(server: Served, options: Any, thinking: bool, effort: Any) -> None:
    server.post(PATH, messages=MESSAGES, **options)
    assert server.submit.prompts[0] == encode_chat(TOKENIZER, MESSAGES, thinking=thinking, effort=effort)
    assert server.submit.thinking is thinking


def test_every_sampling_field_reaches_the_engine(server: Served) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.5,
        "seed": 7,
        "n": 2,
        "min_tokens": 1,
        "stop_token_ids": [9],
        "ignore_eos": False,
        "timeout": 5.0,
    }
    server.post(PATH, **PLAIN, **fields, logit_bias={"5": 2}, max_tokens=11, logprobs=True, top_logprobs=4)
    expected = fields | {"logit_bias": {5: 2}, "max_tokens": 11, "logprobs": 4}
    assert server.submit.params == expected


def test_defaults_are_openai_s_and_the_server_s_own(server: Served) -> None:
    server.post(PATH, **PLAIN, timeout=1e8)
    params = server.submit.params
    assert params["temperature"] == 1.0 and params["timeout"] == 3600.0
    assert params["max_tokens"] == 1000 - len(server.submit.prompts[0])  # what fits


def test_max_completion_tokens_is_the_same_as_max_tokens(server: Served) -> None:
    answer = server.post(PATH, **PLAIN, max_completion_tokens=2).json()
    assert server.submit.params["max_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"
    error = server.refused(PATH, **PLAIN, max_completion_tokens=2, max_tokens=3)
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_end_the_text_and_not_the_reasoning(server: Served, streamed: bool) -> None:
    server.stub.answer = lambda submit, index: "no STOP yet</think>one two STOP three"
    server.stub.token_seconds = 0.001
    if streamed:
        events = server.events(PATH, messages=MESSAGES, stop=["three", "STOP"])
        reasoning, text = deltas(events, "reasoning_content"), deltas(events, "content")
        reason = events[-2][1]["choices"][0]["finish_reason"]
    else:
        choice = server.post(PATH, messages=MESSAGES, stop=["three", "STOP"]).json()["choices"][0]
        reasoning, text = choice["message"]["reasoning_content"], choice["message"]["content"]
        reason = choice["finish_reason"]
    assert (reasoning, text, reason) == ("no STOP yet", "one two ", "stop")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_its_own_answer_in_the_engine_too(
    server: Served, streamed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With reason stop, which the log has; other answers go on."""
    server.stub.answer = lambda submit, index: ("one STOP " if index == 0 else "two ") + "more " * 30
    server.stub.token_seconds = 0.002
    if streamed:
        events = server.events(PATH, **PLAIN, n=2, stop="STOP", max_tokens=20)
        texts = [deltas(events, "content", index) for index in range(2)]
    else:
        choices = server.post(PATH, **PLAIN, n=2, stop="STOP", max_tokens=20).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
        texts = [choice["message"]["content"] for choice in choices]
    assert texts[0] == "one " and texts[1].startswith("two more more")
    assert list(server.stub.stopped) == [0] and not server.stub.aborted
    line = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert line["finish"] == ["stop", "length"] and line["answer_tokens"] < 40


def test_an_answer_that_fails_after_its_stop_string_is_whole(server: Served) -> None:
    server.stub.answer = lambda submit, index: "STOP"
    server.stub.failure = "ValueError: a mask failed"
    first = TOKENIZER.decode(TOKENIZER.encode_text("STOP")[:1])
    choice = server.post(PATH, **PLAIN, stop=first).json()["choices"][0]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_of_reasoning_and_text_are_told_apart(server: Served, streamed: bool) -> None:
    found: dict[str, list[Any]] = {"reasoning_content": [], "content": []}
    if streamed:
        for _, data in server.events(PATH, messages=MESSAGES, logprobs=True, top_logprobs=2)[:-1]:
            for key, entries in (data["choices"][0]["logprobs"] or {}).items():
                found[key] += entries
    else:
        found |= server.post(PATH, messages=MESSAGES, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    for key, text in (("reasoning_content", THOUGHT), ("content", TEXT)):
        data = b"".join(bytes(entry["bytes"]) for entry in found[key])
        assert data.decode() == text
        assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in found[key])


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_are_read_from_the_answer(server: Served, streamed: bool) -> None:
    server.stub.answer = lambda submit, index: f"hm</think>{CALL}"
    if streamed:
        events = server.events(PATH, messages=MESSAGES, tools=TOOLS)
        calls = [call for _, data in events[:-1] for call in data["choices"][0]["delta"].get("tool_calls", ())]
        name = calls[0]["function"]["name"]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        text, reason = deltas(events, "content"), events[-2][1]["choices"][0]["finish_reason"]
    else:
        choice = server.post(PATH, messages=MESSAGES, tools=TOOLS).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (name, arguments, text, reason) == ("weather", '{"city": "K\u00f6ln", "days": 3}', "I look.", "tool_calls")


def test_results_of_tools_go_on_with_the_conversation(server: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert server.post(PATH, messages=history, tools=TOOLS).status_code == 200
    prompt = TOKENIZER.decode(server.submit.prompts[0])
    assert "Bonn" in prompt and "<tool_result>rain</tool_result>" in prompt


def test_a_required_tool_is_called(server: Served) -> None:
    server.stub.answer = lambda submit, index: CALL.split(" calls>\n", 1)[1]
    choice = server.post(PATH, **PLAIN, tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert server.refused(PATH, **PLAIN, tool_choice="required")["param"] == "tool_choice"


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(kind="json_object")),
        ({"type": "regex", "regex": "[0-9]+"}, Grammar(kind="regex", source="[0-9]+")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            Grammar(
                kind="json_schema",
                source='{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}',
            ),
        ),
    ],
)
def test_response_formats_are_grammars(server: Served, form: Any, grammar: Grammar | None) -> None:
    messages = [{"role": "user", "content": "Answer in JSON."}]
    response = server.post(PATH, messages=messages, response_format=form)
    assert response.status_code == 200, response.text
    assert server.submit.grammar == grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "regex", "regex": "a" * 1001}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "a"}, "tools": TOOLS}, "response_format"),
        ({"tools": [TOOLS[0] | {"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"functions": []}, "functions"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"prediction": {}}, "prediction"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ada"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "system", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "tool_call_id": "1"}]},
            "messages[1].tool_call_id",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]},
            "messages[0].content[0].a",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": []}]}, "messages[1].tool_calls"),
        ({"messages": [*MESSAGES, {"role": "assistant"}]}, None),  # "content or tool_calls must be set"
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
        # The name is the user's, whatever fields are called.
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "model"}}}, None),
        ({"stop_token_ids": [TOKENIZER.vocab_size]}, "stop_token_ids"),
        ({"stop_token_ids": [1 << 64]}, "stop_token_ids"),
        ({"logit_bias": {str(1 << 64): 1}}, "logit_bias"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(server: Served, body: Any, param: str | None) -> None:
    error = server.refused(PATH, **(PLAIN | body))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert not server.stub.submitted


def test_images_are_refused(server: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = server.refused(PATH, messages=[{"role": "user", "content": [part]}])
    assert "Images" in error["message"] and error["param"].startswith("messages")


def test_a_prompt_that_does_not_fit_says_so(server: Served) -> None:
    error = server.refused(PATH, messages=[{"role": "user", "content": "word " * 1000}])
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    error = server.refused(PATH, **PLAIN, max_tokens=999)
    assert error["code"] == "context_length_exceeded"
