"""A server's life in its two processes: start, what it tells of itself, the death of either, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.real_server import QUICK, RealServer, is_gone, real_server, wait_for

KEY, OTHER_KEY = "one key", "another key"
HEADER_BYTES = 8192
PROMPT = "A secret of the user's."


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, list[tuple[int, dict[str, Any]]]]]:
    """With a file of keys that can be read once."""
    keys = tmp_path_factory.mktemp("keys") / "pipe"
    os.mkfifo(keys)
    threading.Thread(target=keys.write_text, args=(f"{OTHER_KEY}\n",), daemon=True).start()
    options = ("--api-key", KEY, "--api-key-file", str(keys), "--max-header-bytes", str(HEADER_BYTES))
    with real_server(*QUICK, *options) as server:
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        yield server, server.wait_until_ready()
        assert server.end(signal.SIGTERM) == 0


@pytest.fixture
def server(started: tuple[RealServer, list[tuple[int, dict[str, Any]]]]) -> RealServer:
    return started[0]


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "octavo-nano", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields


@contextlib.contextmanager
def stream(server: RealServer, **fields: Any) -> Iterator[Iterator[str]]:
    """Events of a long answer, of which the first has come."""
    body = completion(stream=True, **({"max_tokens": 4000} | fields))
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def test_start_tells_its_phase(started: tuple[RealServer, list[tuple[int, dict[str, Any]]]]) -> None:
    *starting, (status, ready) = started[1]
    assert (status, ready["status"]) == (200, "ready")
    assert starting, "it was asked before it was ready"
    assert all(code == 503 and told["status"] == "starting" and told["detail"] for code, told in starting)
    assert starting[0][1]["detail"] == "the engine's process" and "total" in starting[0][1]


def test_http_process_has_no_torch(server: RealServer) -> None:
    server.client.post("/v1/completions", json=completion()).raise_for_status()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "tokenizers" in maps and "torch" not in maps
    assert "torch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_models_and_stats(server: RealServer) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("octavo-nano", "model", 8192)
    assert server.client.get("/v1/models/octavo-nano").json() == model
    unknown = server.client.get("/v1/models/other")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    told = server.client.get("/stats").json()
    assert told["phase"] == "ready" and told["engine"]["max_requests"] == 64
    assert told["stats"]["slots"] == 64 and told["stats"]["running"] == 0


def test_keys(server: RealServer) -> None:
    without = httpx.Client(base_url=server.url)
    for path in ("/stats", "/v1/models"):
        assert without.get(path).status_code == 401
    assert without.post("/abort", json={"id": "x"}).status_code == 401
    assert without.get("/health").status_code == without.get("/metrics").status_code == 200


def test_metrics_count_requests_and_steps(server: RealServer) -> None:
    def read() -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(server.client.get("/metrics").text)
        return {
            (sample.name, ",".join(sample.labels.values())): sample.value for one in families for sample in one.samples
        }

    before = read()
    server.client.post("/v1/completions", json=completion(n=2)).raise_for_status()
    after = read()
    rise = {key: value - before.get(key, 0) for key, value in after.items()}
    assert rise["octavo_http_requests_total", "/v1/completions,200"] == 1
    assert rise["octavo_generated_tokens_total", ""] == 8 and rise["octavo_answers_total", "length"] == 2
    assert rise["octavo_time_to_first_token_seconds_count", ""] == 2
    assert rise["octavo_eager_steps_total", "graphs off"] == rise["octavo_steps_total", ""] == 4


def test_log_has_a_line_for_each_request_without_its_text(server: RealServer) -> None:
    given = server.client.post("/v1/completions", json=completion(n=2), headers={"X-Request-Id": "mine-1"})
    assert given.headers["X-Request-Id"] == "mine-1"
    line = server.log("mine-1")
    assert (line["method"], line["path"], line["status"], line["complete"]) == ("POST", "/v1/completions", 200, True)
    assert line["answer_tokens"] == 8 and line["finish"] == ["length", "length"] and line["id"] == given.json()["id"]
    assert line["seconds"] > 0 and line["prompt_tokens"] > 0
    made = server.client.get("/nowhere", headers={"X-Request-Id": "two words"})
    assert server.log(made.headers["X-Request-Id"])["status"] == 404
    assert not any(PROMPT in line or "Bearer" in line or KEY in line for line in server.lines)


def test_a_client_that_leaves_frees_everything(server: RealServer) -> None:
    """Streaming or not."""
    steps = server.client.get("/stats").json()["stats"]["steps"]
    with stream(server, n=2):
        pass
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=completion(max_tokens=4000), timeout=0.3)

    def idle() -> bool:
        stats: dict[str, Any] = server.client.get("/stats").json()["stats"]
        return bool(
            stats["steps"] > steps and stats["free_slots"] == stats["slots"] and stats["free_pages"] == stats["pages"]
        )

    wait_for(idle)


def test_abort_needs_the_key_of_the_request(server: RealServer) -> None:
    with stream(server) as events:
        name = json.loads(next(events))["id"]
        other = server.client.post("/abort", json={"id": name}, headers={"Authorization": f"Bearer {OTHER_KEY}"})
        assert other.status_code == 404
        assert server.client.post("/abort", json={"id": name}).json() == {"id": name, "aborted": True}
        *_, last, done = events
        assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.client.post("/abort", json={"id": name}).status_code == 404


def test_a_head_without_end_is_cut_off(server: RealServer) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 0)) as connection:
        # No more than is read: a connection that is closed with something unread is reset, and its answer lost.
        connection.sendall((b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * HEADER_BYTES)[: HEADER_BYTES + 1])
        connection.settimeout(10)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431")
        assert connection.recv(1) == b""
    assert server.client.get("/health").status_code == 200


def test_a_server_process_that_stands_still_holds_up_no_step(server: RealServer) -> None:
    """So whatever a client does to it, the engine goes on."""
    with stream(server) as events:
        began = time.monotonic()
        for _ in range(5):
            next(events)
        of_ten_steps = 2 * (time.monotonic() - began)
        before = server.client.get("/stats").json()["stats"]["steps"]
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(of_ten_steps)
        os.kill(server.process.pid, signal.SIGCONT)
        after = server.client.get("/stats").json()["stats"]["steps"]
        # The two requests to /stats let one or two steps pass.
        assert after - before > 4


def test_many_streams_have_the_answers_that_each_has_alone(server: RealServer, long_form: bool) -> None:
    """64 at a time, to the bit; in the short form they are eight times the same eight."""
    count = 64
    different = count if long_form else 8
    bodies = [
        completion(prompt=f"{number} pears", temperature=1.5 if number % 2 else 0.0, seed=number)
        for number in range(different)
    ]

    def text(response: httpx.Response) -> str:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    alone = [text(server.client.post("/v1/completions", json=body | {"stream": True})) for body in bodies]

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=count)
        headers = server.client.headers
        async with httpx.AsyncClient(base_url=server.url, headers=headers, limits=limits, timeout=60) as client:
            posts = [
                client.post("/v1/completions", json=bodies[k % different] | {"stream": True}) for k in range(count)
            ]
            return await asyncio.gather(*posts)

    together = [text(response) for response in asyncio.run(ask())]
    assert together == [alone[k % different] for k in range(count)]
    assert len(set(alone)) > different / 2, "answers differ from each other"


def test_killed_engine_is_told_to_everybody_and_the_server_still_ends() -> None:
    with real_server(*QUICK) as server:
        server.wait_until_ready()
        with stream(server) as events:
            os.kill(server.engine_pid, signal.SIGKILL)
            last = list(events)[-1]
        assert "killed by SIGKILL" in json.loads(last)["error"]["message"]
        broken = server.client.get("/health")
        assert broken.status_code == 503 and broken.json()["status"] == "broken"
        assert "killed by SIGKILL" in broken.json()["detail"]
        refused = server.client.post("/v1/completions", json=completion())
        assert refused.status_code == 503 and "killed by SIGKILL" in refused.json()["error"]["message"]
        assert server.client.get("/stats").status_code == 503
        assert 'phase="broken"} 1.0' in server.client.get("/metrics").text
        assert server.end(signal.SIGTERM) == 0


def test_ctrl_c_lets_requests_end_and_a_second_one_ends_them() -> None:
    """The signal goes to the whole process group, as from a terminal; no process is left."""
    with real_server(*QUICK, "--drain-seconds", "600") as server:
        server.wait_until_ready()
        engine = server.engine_pid
        with stream(server) as endless, stream(server, max_tokens=8) as short:
            os.killpg(server.process.pid, signal.SIGINT)
            wait_for(lambda: server.client.get("/health").json()["status"] == "draining")
            refused = server.client.post("/v1/completions", json=completion())
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
            *_, last, done = short
            assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
            assert json.loads(next(endless))["choices"][0]["finish_reason"] is None
            os.killpg(server.process.pid, signal.SIGINT)
            assert list(endless)[-1] == "[DONE]"
        assert server.process.wait(30) == 0
        assert is_gone(engine)


def test_draining_has_an_end_and_so_has_an_engine_without_server() -> None:
    with real_server(*QUICK, "--drain-seconds", "0.1") as server:
        server.wait_until_ready()
        engine = server.engine_pid
        with stream(server) as events:
            os.kill(server.process.pid, signal.SIGTERM)
            *_, last, done = events
        assert json.loads(last)["choices"][0]["finish_reason"] is not None and done == "[DONE]"
        assert server.process.wait(30) == 0
        assert is_gone(engine)
    with real_server(*QUICK) as server:
        engine = server.engine_pid
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: is_gone(engine), 30)
