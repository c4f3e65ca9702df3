"""Bodies, headers and connections that nobody would send: no 500, no hang, nothing left open."""

from __future__ import annotations

import copy
import json
import random
import socket
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.conftest import ReportCount
from tests.server.running import Served
from tests.server.stub_client import MODEL

MESSAGES = [{"role": "user", "content": "Answer in JSON."}, {"role": "assistant", "content": "{}", "prefix": True}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": ["x"]},
        {"messages": MESSAGES[:1], "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2},
        {
            "messages": MESSAGES[:1],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "reasoning_effort": "low",
            "logit_bias": {"5": 1.0},
            "seed": 1,
        },
    ],
    "/v1/completions": [
        {"prompt": "Hi", "max_tokens": 5, "stop": "x", "logprobs": 1, "echo": True, "stream": True},
        {"prompt": ["Hi", "Bye"], "n": 2, "max_tokens": 5},
        {"prompt": [1, 2, 3], "temperature": 0.5, "top_k": 3, "min_p": 0.1, "stop_token_ids": [4]},
    ],
    "/v1/responses": [
        {"input": "Hi", "instructions": "Be brief.", "reasoning": {"effort": "low"}, "max_output_tokens": 9},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "stream": True},
    ],
    "/v1/messages": [
        {"messages": MESSAGES[:1], "max_tokens": 9, "system": "s", "stop_sequences": ["x"], "stream": True},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ],
    "/tokenize": [{"prompt": "Hi"}, {"messages": MESSAGES[:1], "return_token_strs": True}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/abort": [{"id": "x"}],
}
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1 << 31, 1 << 63, 1 << 64, 10**40, 1e308, -0.0, 1e-320]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        [
            "</think>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            "\x00",
            "\ud83d\ude00",
            "a" * 5000,
            "../etc",
            "(?",
            "$ref",
        ]
    ),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.none() | st.integers(), max_size=2),
)


def test_the_openapi_document_holds(server: Served, long_form: bool, report_count: ReportCount) -> None:
    """Requests drawn from the document are answered as it says."""
    document = schemathesis.openapi.from_url(str(server.http.base_url.join("/openapi.json")))
    cases = 0
    for found in document.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]  # or it raises what is wrong with the document

        @settings(parent=FUZZ, max_examples=100 if long_form else 5)
        @given(operation.as_strategy())
        def answered_as_described(case: Any) -> None:
            nonlocal cases
            cases += 1
            response = case.call()
            case.validate_response(response, checks=[response_schema_conformance, status_code_conformance])
            assert response.status_code < 500, response.text

        answered_as_described()
    report_count("requests drawn from the OpenAPI document", cases)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a JSON value, itself included."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in items for place in places(each, (*path, key)))]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid body in which something is odd: a value, a field too many, or one too few."""
    path = draw(st.sampled_from(sorted(VALID)))
    body: Any = {"model": MODEL} | copy.deepcopy(draw(st.sampled_from(VALID[path])))
    if path == "/abort":
        del body["model"]
    for _ in range(draw(st.integers(1, 2))):
        *way, key = draw(st.sampled_from(places(body)[1:]))
        inside = body
        for step in way:
            inside = inside[step]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "replace":
            inside[key] = draw(ODD)
        elif action == "remove":
            del inside[key]
        elif isinstance(inside, dict):
            inside[draw(st.text(min_size=1, max_size=6))] = draw(ODD)
        if not body:
            break
    return path, body


def check(response: Any, path: str) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and "Traceback" not in error["message"] and "/work" not in error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("\n\n")
        assert not response.text.split("\n\n")[-2].startswith(('data: {"error"', "event: error"))


@FUZZ
@given(bodies())
def test_odd_bodies_are_answered_or_refused(server: Served, drawn: tuple[str, Any]) -> None:
    path, body = drawn
    check(server.http.post(path, content=json.dumps(body).encode()), path)


@FUZZ
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=60))
def test_bytes_are_refused(server: Served, path: str, content: bytes) -> None:
    response = server.http.post(path, content=content)
    check(response, path)
    assert response.status_code == 400


@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(["authorization", "x-api-key", "content-type", "x-request-id", "accept", "expect", "range"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30),
        max_size=3,
    )
)
def test_odd_headers_change_nothing(server: Served, headers: dict[str, str]) -> None:
    fields: Any = [(name.encode(), value.strip().encode("latin-1")) for name, value in headers.items()]
    response = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers=fields)
    assert response.status_code == 200, response.text


def test_connections_that_break_leave_nothing_open(server: Served, long_form: bool, report_count: ReportCount) -> None:
    """Cut anywhere: in the head, in the body, in the answer."""
    chance, count = random.Random(1), 2000 if long_form else 100
    server.stub.token_seconds = 0.002
    body = json.dumps({"model": MODEL, "messages": MESSAGES[:1], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    whole = head + body
    address = (server.http.base_url.host, server.http.base_url.port or 0)
    for _ in range(count):
        with socket.create_connection(address, timeout=5) as connection:
            if chance.random() < 0.5:
                connection.sendall(whole[: chance.randrange(len(whole))])
            else:
                connection.sendall(whole)
                connection.recv(chance.randrange(1, 500))
    server.wait_until_free()
    assert server.post("/v1/completions", prompt="Hi").status_code == 200
    report_count("broken connections", count)
