"""``/v1/responses``."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.runtime.prompt import encode_chat
from tests.server.running import Served
from tests.server.stub_client import TEXT, THOUGHT, TOKENIZER
from tests.server.test_chat import CALL

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
QUIET = {"reasoning": {"effort": "none"}}


def test_a_whole_response(server: Served) -> None:
    answer = server.post(PATH, input="Who are you?", temperature=0.25, metadata={"a": "b"}, user="Ada").json()
    assert answer["object"] == "response" and answer["status"] == "completed" and answer["id"] == server.submit.id
    reasoning, message = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == TEXT
    assert answer["temperature"] == 0.25 and answer["store"] is False
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len(TOKENIZER.encode_text(THOUGHT))
    assert server.submit.params["temperature"] == 0.25
    assert server.submit.prompts[0] == encode_chat(TOKENIZER, [{"role": "user", "content": "Who are you?"}])


def test_a_stream_has_numbered_events_by_name_and_ends_with_the_whole(server: Served) -> None:
    events = server.events(PATH, input="Who are you?")
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][0] == "response.created" and events[-1][0] == "response.completed"
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    thought = "".join(data["delta"] for name, data in events if name == "response.reasoning_text.delta")
    assert (text, thought) == (TEXT, THOUGHT)
    assert events[-1][1]["response"]["output"][1]["content"][0]["text"] == TEXT


def test_an_answer_that_is_cut_short_is_incomplete(server: Served) -> None:
    answer = server.post(PATH, input="Hi", max_output_tokens=3).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_instructions_items_and_tools(server: Served) -> None:
    server.stub.answer = lambda submit, index: CALL
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    answer = server.post(PATH, input=items, instructions="Be brief.", tools=[TOOL], **QUIET).json()
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    assert answer["output"][1]["arguments"] == '{"city": "K\u00f6ln", "days": 3}'
    prompt = TOKENIZER.decode(server.submit.prompts[0])
    assert "Be brief." in prompt and "weather?" in prompt and "<tool_result>rain</tool_result>" in prompt


def test_an_answer_can_come_back_as_it_is(server: Served) -> None:
    server.stub.answer = lambda submit, index: f"hm</think>{CALL}"
    output = server.post(PATH, input="weather?", tools=[TOOL], top_logprobs=1).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "rain"}
    history = [{"role": "user", "content": "weather?"}, *output, result]
    response = server.post(PATH, input=history, tools=[TOOL])
    assert response.status_code == 200, response.text
    prompt = TOKENIZER.decode(server.submit.prompts[0])
    assert "hm</think>I look." in prompt and "<tool_result>rain</tool_result>" in prompt


def test_log_probabilities(server: Served) -> None:
    answer = server.post(PATH, input="Hi", top_logprobs=1, **QUIET).json()
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT


def test_a_schema_is_a_grammar(server: Served) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "null"}}}}
    assert server.post(PATH, input="Hi", text={"format": form}).status_code == 200
    assert server.submit.grammar is not None and server.submit.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["x"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, None),  # "Thinking mode does not support this tool_choice"
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "x", "name": "Ada"}]}, "input[0].name"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "a": 1}]}]},
            "input[0].content[0].a",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": [], "summary": [{}]}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].content"),
        ({"stop_token_ids": [1 << 64]}, "stop_token_ids"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"n": 2}, "n"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "regex", "regex": "a"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(server: Served, body: Any, param: str | None) -> None:
    assert server.refused(PATH, **({"input": "Hi"} | body))["param"] == param
    assert not server.stub.submitted


def test_a_failure_in_the_middle_is_an_event(server: Served) -> None:
    server.stub.failure = "ValueError: a mask failed"
    events = server.events(PATH, input="Hi")
    name, data = events[-1]
    assert name == "error" and data["type"] == "error" and "a mask failed" in data["message"]
    assert data["sequence_number"] == len(events) - 1
