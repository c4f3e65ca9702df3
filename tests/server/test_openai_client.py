"""The ``openai`` client, Anthropic's form over plain HTTP, and curl, against octavo-nano in its own processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.server.real_server import QUICK, RealServer, real_server

MODEL = "octavo-nano"
MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
QUIET = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(*QUICK) as started:
        started.wait_until_ready()
        yield started


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 5, "extra_body": QUIET}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"


def test_reasoning_is_apart(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3).choices[0].message
    assert message.model_extra is not None and "reasoning_content" in message.model_extra


def test_a_seed_gives_the_same_answers_again(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=3, seed=seed, temperature=2, max_tokens=4, extra_body=QUIET
        )
        return [choice.message.content for choice in answer.choices]

    first = texts(5)
    assert first == texts(5) != texts(6)
    assert len(set(first)) > 1


def test_logprobs_of_an_answer_are_those_of_it_as_a_prompt(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="The sun", temperature=0, max_tokens=5, logprobs=1)
    text, logprobs = made.choices[0].text, made.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    read = client.completions.create(
        model=MODEL, prompt="The sun" + text, max_tokens=1, logprobs=1, echo=True, temperature=0
    ).choices[0]
    assert read.logprobs is not None and read.logprobs.token_logprobs is not None
    assert read.text.startswith("The sun" + text)
    count = len(logprobs.token_logprobs)
    # The same rows in other batches: reference numerics are row-invariant, so these are the same bits.
    assert read.logprobs.token_logprobs[-1 - count : -1] == logprobs.token_logprobs


def test_an_answer_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    class Fruit(pydantic.BaseModel):
        ripe: bool

    parsed = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Fruit, max_tokens=60, temperature=0, extra_body=QUIET
    )
    assert isinstance(parsed.choices[0].message.parsed, Fruit)


def test_the_client_s_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, logit_bias={"999999": 1})
    assert wrong.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, store=True)
    assert unsupported.value.param == "store"


def test_responses(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "input": "Hi",
        "temperature": 0,
        "max_output_tokens": 4,
        "reasoning": {"effort": "none"},
    }
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text and "".join(deltas) == whole.output_text


def test_concurrent_streams_are_each_as_if_alone(server: RealServer, long_form: bool) -> None:
    """In reference numerics; in the long form as many as the engine has slots."""
    count, max_tokens = (64, 16) if long_form else (8, 3)
    prompts = [f"Number {number} is" for number in range(count)]

    async def answer(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=max_tokens, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(answer(client, prompt) for prompt in prompts))
            return together, [await answer(client, prompt) for prompt in prompts]

    together, alone = asyncio.run(both())
    assert together == alone
    assert len(set(alone)) > 1


def test_anthropic_s_form_over_plain_http(server: RealServer) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES, "temperature": 0, **QUIET}
    whole = server.client.post("/v1/messages", json=body).json()
    text = whole["content"][0]["text"]
    lines = server.client.post("/v1/messages", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert text and "".join(delta["text"] for delta in deltas) == text
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: RealServer) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 2})
    command = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.endswith("data: [DONE]\n\n")


def test_the_prompt_is_what_tokenize_says(server: RealServer) -> None:
    told = server.client.post("/tokenize", json={"messages": MESSAGES, **QUIET}).json()
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "temperature": 0, **QUIET}
    chat = server.client.post("/v1/chat/completions", json=body).json()
    assert chat["usage"]["prompt_tokens"] == told["count"]
    completion = {"model": MODEL, "prompt": told["tokens"], "max_tokens": 2, "temperature": 0}
    text = server.client.post("/v1/completions", json=completion).json()["choices"][0]["text"]
    assert chat["choices"][0]["message"]["content"] == text.lstrip("\n")
