"""Errors: their status, their envelope, what they tell and what they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.runtime.server import chat
from tests.server.running import Served, serve

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
ANSWERS = [
    (CHAT, BODY),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 100}),
    ("/v1/responses", {"input": "Hi"}),
    (MESSAGES, BODY),
]


def kind_of(path: str, openai: str, anthropic: str) -> str:
    return anthropic if path == MESSAGES else openai


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": 5}', b'{"model": "\\ud800"}'])
@pytest.mark.parametrize("path", [path for path, _ in ANSWERS])
def test_what_is_no_request_is_refused(server: Served, path: str, content: bytes) -> None:
    response = server.http.post(path, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("path", "body"), [answer for answer in ANSWERS if answer[0] != MESSAGES])
def test_every_seed_of_64_bits_is_one(server: Served, path: str, body: dict[str, Any]) -> None:
    for seed in (-1, 2**63 - 1, -(2**63)):
        assert server.post(path, **body, seed=seed).status_code == 200, seed
    response = server.post(path, **body, seed=2**63)
    assert response.status_code == 400 and response.json()["error"]["param"] == "seed"


@pytest.mark.parametrize("depth", [200, 5000])
def test_what_is_nested_too_deeply_is_refused(server: Served, depth: int) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":' + deep + b"}}}"
    body = b'{"model":"octavo-nano","messages":[{"role":"user","content":"x"}],"tools":[' + tool + b"]}"
    assert server.http.post(CHAT, content=body).status_code == 400
    schema = b'{"type":"json_schema","json_schema":{"name":"x","schema":' + deep + b"}}"
    body = b'{"model":"octavo-nano","prompt":"x","response_format":' + schema + b"}"
    assert server.http.post("/v1/completions", content=body).status_code == 400


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_another_model_is_not_found(server: Served, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, **(body | {"model": "gpt-5"}))
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["type"] == kind_of(path, "invalid_request_error", "not_found_error")
    assert path == MESSAGES or (error["code"], error["param"]) == ("model_not_found", "model")


def test_other_paths_and_methods_are_told_in_the_envelope(server: Served) -> None:
    assert server.http.get("/v1/nothing").status_code == 404
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    response = server.http.get(CHAT)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert "error" in response.json()


@pytest.mark.parametrize(("path", "body"), ANSWERS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_says_when_to_come_back(server: Served, path: str, body: dict[str, Any], streamed: bool) -> None:
    server.stub.most_open = 0
    response = server.post(path, **body, stream=streamed)
    assert response.status_code == 429 and response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(("path", "body"), ANSWERS)
@pytest.mark.parametrize("phase", ["starting", "draining", "broken"])
def test_an_engine_that_is_not_ready_says_why(server: Served, path: str, body: dict[str, Any], phase: Any) -> None:
    ready = None if phase == "starting" else server.stub.state.ready
    server.stub.state = dataclasses.replace(server.stub.state, phase=phase, detail="for a reason", ready=ready)
    response = server.post(path, **body)
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert error["type"] == kind_of(path, "server_error", "overloaded_error") and "for a reason" in error["message"]


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_an_engine_that_ends_ends_its_answers(server: Served, path: str, body: dict[str, Any]) -> None:
    server.stub.gone_after = 1
    response = server.post(path, **body)
    assert response.status_code == 503 and "it was killed" in response.text
    name, data = server.events(path, **body)[-1]
    assert name == (None if path in (CHAT, "/v1/completions") else "error")
    assert "it was killed" in str(data) and data != "[DONE]"


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_an_answer_that_fails_is_an_error(server: Served, path: str, body: dict[str, Any]) -> None:
    server.stub.failure = "ValueError: a mask failed"
    response = server.post(path, **body)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == kind_of(path, "server_error", "api_error")
    assert "a mask failed" in str(server.events(path, **body)[-1][1])


@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_engine_refuses_is_the_client_s_mistake(server: Served, streamed: bool) -> None:
    server.stub.refusal = "logit_bias 4000: token ids are integers from 0 to 2047"
    error = server.refused(CHAT, **BODY, stream=streamed)
    assert error["param"] == "logit_bias" and "4000" in error["message"]


def test_what_nobody_foresaw_tells_the_client_nothing(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret of /work/octavo")

    monkeypatch.setattr(chat, "encode", broken)
    error = server.refused(CHAT, 500, **BODY)
    assert error["type"] == "server_error" and "secret" not in str(error) and "/" not in error["message"]
    assert "secret of /work/octavo" in caplog.text


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serve(api_key=("first key", "second"), port=0) as served:
        yield served


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "second"}]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/models", "/stats", "/tokenize", "/nothing"])
def test_without_a_key_nothing_is_told(locked: Served, path: str, headers: dict[str, str]) -> None:
    response = locked.http.post(path, json={}, headers=headers)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["type"] == "authentication_error"
    assert path == MESSAGES or error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer first key"}, {"authorization": "bearer second"}, {"x-api-key": "second"}]
)
def test_with_a_key_the_answer_is_its_owner_s(locked: Served, headers: dict[str, str]) -> None:
    response = locked.http.post(CHAT, json=BODY | {"model": "octavo-nano"}, headers=headers)
    assert response.status_code == 200
    assert locked.stub.owners[-1] == ("first key" if "first key" in str(headers) else "second")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json"])
def test_probes_need_no_key(locked: Served, path: str) -> None:
    assert locked.http.get(path).status_code == 200
