"""``/v1/messages``, over plain HTTP as Anthropic's clients send it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.runtime.prompt import encode_chat
from tests.server.running import Served
from tests.server.stub_client import TEXT, THOUGHT, TOKENIZER
from tests.server.test_chat import CALL

PATH = "/v1/messages"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 100}
QUIET = {"thinking": {"type": "disabled"}}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def refused(server: Served, status: int = 400, path: str = PATH, **body: Any) -> dict[str, str]:
    """The error of Anthropic's envelope."""
    response = server.post(path, **body)
    assert response.status_code == status, response.text
    assert response.json()["type"] == "error"
    error: dict[str, str] = response.json()["error"]
    assert set(error) == {"type", "message"}
    return error


def test_a_whole_message(server: Served) -> None:
    answer = server.post(PATH, **BODY, system="Be brief.").json()
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["id"] == server.submit.id
    thinking, text = answer["content"]
    assert thinking["thinking"] == THOUGHT and text == {"type": "text", "text": TEXT}
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["input_tokens"] == len(server.submit.prompts[0])
    history = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert server.submit.prompts[0] == encode_chat(TOKENIZER, history)


def test_a_stream_has_the_events_of_the_protocol(server: Served) -> None:
    events = server.events(PATH, **BODY)
    names = [name for name, _ in events if name != "ping"]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == TEXT
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_is_told(server: Served, streamed: bool) -> None:
    options = BODY | QUIET | {"stop_sequences": ["Bye"]}
    if streamed:
        (end,) = [data["delta"] for name, data in server.events(PATH, **options) if name == "message_delta"]
    else:
        end = server.post(PATH, **options).json()
        assert end["content"] == [{"type": "text", "text": TEXT.partition("Bye")[0]}]
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "Bye")


def test_tools(server: Served) -> None:
    server.stub.answer = lambda submit, index: f"hm</think>{CALL}"
    answer = server.post(PATH, **(BODY | {"max_tokens": 300}), tools=[TOOL]).json()
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    use = answer["content"][2]
    assert use["name"] == "weather" and use["input"] == {"city": "K\u00f6ln", "days": 3}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
    history = [*MESSAGES, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert server.post(PATH, messages=history, max_tokens=100, tools=[TOOL]).status_code == 200
    assert "<tool_result>rain</tool_result>" in TOKENIZER.decode(server.submit.prompts[0])


def test_sampling_and_effort(server: Served) -> None:
    server.post(PATH, **BODY, temperature=0.5, top_p=0.8, top_k=4, output_config={"effort": "max"})
    expected = {"temperature": 0.5, "top_p": 0.8, "top_k": 4, "timeout": 3600.0, "max_tokens": 100}
    assert server.submit.params == expected
    assert server.submit.prompts[0] == encode_chat(TOKENIZER, MESSAGES, effort="max")


def test_tokens_are_counted(server: Served) -> None:
    count = server.post(f"{PATH}/count_tokens", messages=MESSAGES).json()
    assert count == {"input_tokens": len(encode_chat(TOKENIZER, MESSAGES))}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]},
            "messages[0].content[0].a",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": "Ada"}]}, "messages[0].name"),
        ({"system": [{"type": "text", "text": "x", "a": 1}]}, "system[0].a"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"output_config": {"format": {}}}, "output_config.format"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(server: Served, body: Any, named: str) -> None:
    error = refused(server, **(BODY | body))
    assert error["type"] == "invalid_request_error" and named in error["message"]
    assert not server.stub.submitted


def test_an_unknown_model_is_not_found(server: Served) -> None:
    assert refused(server, 404, **(BODY | {"model": "claude"}))["type"] == "not_found_error"


def test_a_failure_in_the_middle_is_an_event(server: Served) -> None:
    server.stub.failure = "ValueError: a mask failed"
    name, data = server.events(PATH, **BODY)[-1]
    assert name == "error" and data["error"]["type"] == "api_error" and "a mask failed" in data["error"]["message"]
