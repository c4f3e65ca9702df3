"""Overlapping steps on a device: nothing waits but the read of what was drawn, and answers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from octavo import Engine, EngineConfig, SamplingParams
from octavo.runtime.answer_text import AnswerText
from octavo.runtime.assemble import Assembly, assemble
from octavo.runtime.core import EngineCore
from octavo.runtime.download import Download
from octavo.runtime.request import Delta, Request
from octavo.runtime.runner import Runner
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.step_program import ladders
from tests.gpu.test_capturable_state import waits

CONFIG: dict[str, Any] = {"device": "cuda", "chunk": 64, "max_requests": 8, "kv_tokens": 4096, "compile": "none"}
ASKS = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=40, ignore_eos=True, frequency_penalty=0.3, repetition_penalty=1.1),
    SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(max_tokens=40, ignore_eos=True, token_mask=lambda answer: None),
)


def request_of(number: int, params: SamplingParams, assembly: Assembly, heard: list[Delta]) -> Request:
    return Request(
        tokens=[5 + number, 6, 7],
        max_length=1000,
        params=params,
        text=AnswerText(assembly.tokenizer, params.stop),
        sink=heard.append,
        prompt=number,
        index=0,
        seed=params.seed or 0,
        ending=(),
        prompt_length=3,
        arrival=0.0,
    )


@pytest.mark.timeout(300)
def test_a_step_waits_for_nothing_but_what_the_one_before_has_drawn() -> None:
    """Whole steps of an engine, with all ways to draw, log probabilities included. What torch reports as a wait is an
    error; the read waits for an event, which is none of these."""
    settings = EngineConfig(**CONFIG, buckets="8,64")
    assembly = assemble(settings)
    runner = Runner(assembly, ladders(settings.buckets, settings.chunk, settings.max_requests, 1), "on")
    sizes = assembly.capacity.sizes
    scheduler = Scheduler(slots=sizes.slots, pages=sizes.pages, row_budget=settings.chunk, max_length=1000)
    core, heard = EngineCore(scheduler, runner, overlap=True), list[Delta]()
    for number, params in enumerate(ASKS):
        core.add(request_of(number, params, assembly, heard))
    for _ in range(3):  # what is set up at its first use is
        core.step()
    before = len(heard)
    with waits("error"):
        for _ in range(10):
            core.step()
    assert len(heard) == before + 10 * len(ASKS)
    while core.busy:
        core.step()
    answers = [delta.answer for delta in heard if delta.answer is not None]
    assert [(len(answer.ids), answer.finish_reason) for answer in answers] == [(40, "length")] * len(ASKS)
    assert core.stats.overlapped_steps == core.stats.steps - 1 and core.stats.rows_in_vain == 0


def test_a_download_waits_for_itself_alone() -> None:
    """It is read while the device is still at what it was told afterwards."""
    values = torch.arange(1000, device="cuda")
    download = Download(values + 1)
    torch.cuda._sleep(2_000_000_000)  # about a second
    behind = torch.cuda.Event()
    behind.record()
    (read,) = download.read()
    assert not behind.query()
    assert read.is_pinned() and read.tolist() == list(range(1, 1001))


def outcomes(overlap: Literal["on", "off"], asks: Sequence[SamplingParams], **changes: Any) -> tuple[list[Any], int]:
    """What an engine answers, and how many of its steps overlapped."""
    with Engine(EngineConfig(**(CONFIG | changes), overlap=overlap)) as engine:
        results = engine.generate([f"Question {number}:" for number in range(len(asks))], asks)
        overlapped = engine.stats()["overlapped_steps"]
    answers = [(result.prompt_logprobs, answer) for result in results for answer in result.answers]
    return [(p, a.ids, a.text, a.finish_reason, a.stop, a.logprobs) for p, a in answers], overlapped


@pytest.mark.timeout(600)
@pytest.mark.parametrize("numerics", ("fast", "reference"))
def test_answers_are_the_same(numerics: str) -> None:
    """To the bit. In ``fast`` the rows beside a row may matter, so there all answers end by their length, in the same
    steps with overlap as without; in ``reference`` they end at a stop token too."""
    asks = [replace(params, max_tokens=8 + 3 * number) for number, params in enumerate(ASKS)]
    if numerics == "reference":
        bias = {9: 100.0}  # comes as soon as it may
        asks += [
            SamplingParams(max_tokens=20, min_tokens=least, stop_token_ids=(9,), logit_bias=bias) for least in (2, 5)
        ]
    off, none = outcomes("off", asks, numerics=numerics)
    on, some = outcomes("on", asks, numerics=numerics)
    assert none == 0 and some > 10
    assert on == off
    assert {outcome[3] for outcome in on} == ({"length"} if numerics == "fast" else {"length", "stop"})


def test_overlap_is_the_default_on_a_device() -> None:
    with Engine(EngineConfig(**CONFIG, graphs="off")) as engine:
        engine.generate(["a"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert engine.stats()["overlapped_steps"] == 2
