"""Two GPUs of one host: collectives over NCCL, against one GPU."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import Engine, EngineConfig, OctavoError, SamplingParams
from octavo.model.packaged import nano_path
from octavo.runtime.evaluate import generated_suites, run_suite
from tests.model.mini_run import MINI, golden
from tests.rank_processes import children

ACCURACY = 0.93
"""octavo-nano answers 98.8 % and more; that over 7 of 100 questions are wrong has a chance below 1e-4."""


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"device": "cuda", "ranks": 2, "chunk": 256, "max_requests": 32, "kv_tokens": 65_536}
    return EngineConfig(**(fields | changes))


@pytest.mark.timeout(200)
def test_the_golden_answer() -> None:
    prompt = golden("prefill", "plain")["p37.input_ids"].tolist()
    with Engine(config(model=MINI, numerics="plain", kv_tokens=1024, max_requests=4, chunk=64)) as engine:
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=25))
    assert answer.ids == golden("decode", "plain")["generated"].tolist()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("graphs", ["on", "compare", "poison"])
def test_reference_equals_one_gpu(graphs: str) -> None:
    """Row-invariant operators, and sums in the order of the ranks."""
    prompts = [[300 + i] * (3 + 20 * i) for i in range(6)]
    params = SamplingParams(max_tokens=6, logprobs=1)
    answers = []
    for settings in (config(numerics="reference", ranks=1), config(numerics="reference", graphs=graphs)):
        with Engine(settings) as engine:
            answers.append([(r.ids, r.answers[0].logprobs) for r in engine.generate(prompts, params)])
    assert answers[0] == answers[1]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("experts", ["sharded", "replicated"])
def test_collectives_are_captured(experts: str, tmp_path: Path) -> None:
    """Where the probe at start says so: no collective is left between segments, and replay equals one GPU's answer."""
    prompts = [[300 + i] * (3 + 20 * i) for i in range(4)]
    params = SamplingParams(max_tokens=6, logprobs=1)
    with Engine(config(numerics="reference", ranks=1)) as engine:
        expected = [(r.ids, r.answers[0].logprobs) for r in engine.generate(prompts, params)]
    captured = config(
        numerics="reference", expert_placement=experts, collectives="captured", dump_dir=tmp_path / "dump"
    )
    with Engine(captured) as engine:
        assert "collectives in captured segments: NCCL was captured and replayed" in engine.describe()
        assert [(r.ids, r.answers[0].logprobs) for r in engine.generate(prompts, params)] == expected
    for name in ("body-sharded", "body-replicated"):
        report = json.loads((tmp_path / "dump" / name / "report.json").read_text())
        assert report["collectives_captured"]["value"]
        assert "collective" not in {piece["kind"] for piece in report["pieces"]}


@pytest.mark.timeout(200)
def test_captured_collectives_among_fast_kernels() -> None:
    """Each replayed segment equals its eager run to the bit, though kernels beside a collective may start early."""
    captured = config(model=nano_path(), numerics="fast", collectives="captured", graphs="compare")
    with Engine(captured) as engine:
        assert "collectives in captured segments: NCCL was captured and replayed" in engine.describe()
        answers = engine.generate([[300 + i] * (3 + 20 * i) for i in range(4)], SamplingParams(max_tokens=6))
    assert all(answer.ids for answer in answers)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("collectives", ["between", "captured"])
def test_a_killed_rank_ends_the_engine(collectives: str) -> None:
    """Within ten seconds, by name, also when the GPU of the other waits inside a collective; nothing is left."""
    settings = config(numerics="reference", buckets="8", compile="none", collectives=collectives, step_deadline=60.0)
    with Engine(settings) as engine:
        (worker,) = children()
        threading.Timer(1.0, os.kill, (worker, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(OctavoError, match="rank 1 ended: killed by SIGKILL"):
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=50_000, ignore_eos=True))
        assert time.monotonic() - began < 11.0
    assert time.monotonic() - began < 20.0, "and it can be closed"
    assert not children()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("engram", ["device", "host", "mmap"])
def test_engram_tables(engram: str) -> None:
    prompts = [[300 + i] * (3 + 20 * i) for i in range(4)]
    answers = []
    for settings in (config(ranks=1, numerics="reference"), config(engram=engram, numerics="reference")):
        with Engine(settings) as engine:
            answers.append([r.ids for r in engine.generate(prompts, SamplingParams(max_tokens=6))])
    assert answers[0] == answers[1]


@pytest.mark.timeout(300)
def test_nano_is_as_accurate() -> None:
    with Engine(config(model=nano_path())) as engine:
        assert "fast numerics" in engine.describe()
        for suite in ("arithmetic", "recall@1k"):
            (questions,) = generated_suites(suite, 100, seed=0)
            assert run_suite(engine, questions).accuracy >= ACCURACY, suite
