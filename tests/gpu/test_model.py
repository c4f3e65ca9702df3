"""The reference operators on a CUDA device: the goldens, and the released shapes with random weights."""

from __future__ import annotations

import time

import pytest
import torch

from octavo import Engine, EngineConfig, SamplingParams
from octavo.runtime.assemble import assemble
from tests.conftest import ReportCount
from tests.model.mini_run import MINI, MiniRun, Numerics, golden, relative


@pytest.mark.parametrize("prompt", ["p1", "p37", "p96"])
@pytest.mark.parametrize(
    ("numerics", "median", "largest"),
    [
        ("plain", 1e-5, 1e-5),
        # F32 products are summed in another order, as on a CPU of another kind: see test_golden_reference.
        ("reference", 0.1, 0.2),
    ],
)
def test_goldens(numerics: Numerics, median: float, largest: float, prompt: str) -> None:
    goldens = golden("prefill", numerics)
    run = MiniRun(assemble(EngineConfig(model=MINI, device="cuda", numerics=numerics, kv_tokens=256, max_requests=1)))
    record = run.step(goldens[f"{prompt}.input_ids"].tolist())
    with torch.no_grad():
        logits = run.assembly.model.head(record.hidden).cpu()
    error = relative(logits, goldens[f"{prompt}.logits"])
    assert error.median() <= median and error.max() <= largest
    assert (logits.argmax(1) == goldens[f"{prompt}.logits"].argmax(1)).double().mean() >= 0.9


def test_greedy_answer() -> None:
    prompt = golden("prefill", "plain")["p37.input_ids"].tolist()
    with Engine(EngineConfig(model=MINI, device="cuda", numerics="plain", chunk=20)) as engine:
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=25))
    assert answer.ids == golden("decode", "plain")["generated"].tolist()


@pytest.mark.timeout(500)
def test_released_shapes(report_count: ReportCount) -> None:
    """40 layers at true shapes with 48 of 384 experts; whole and chunked prefill agree on the first tokens."""
    began = time.perf_counter()
    answers = []
    prompt = list(range(1000, 1150))
    config = EngineConfig(
        weights="random", preset="slice", device="cuda", max_requests=8, numerics="reference", graphs="off"
    )
    with Engine(config) as engine:
        loading = time.perf_counter() - began
        gigabytes = torch.cuda.memory_allocated() / 1e9
        answers += engine.generate([prompt, prompt], SamplingParams(max_tokens=4))
        assert answers[0].ids == answers[1].ids
        assert engine.model_config.text_config.n_routed_experts == 384
    report_count(
        "layers at true shapes on the GPU",
        40,
        f"{gigabytes:.1f} GB made in {loading:.0f} s, {answers[1].answers[0].summary()}",
    )
