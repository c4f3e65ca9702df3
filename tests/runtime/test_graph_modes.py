"""The engine's steps as compiled programs: every mode gives the plain call's answers, bitwise, and says what it did."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from octavo import Engine, EngineConfig, OctavoError, SamplingParams, UsageError
from octavo.runtime.assemble import assemble
from octavo.runtime.config import EngineConfig as Config
from octavo.runtime.runner import Runner
from octavo.runtime.step_program import choose_buckets
from tests.model.mini_run import MINI

PROMPTS = ["hello world, a prompt long enough to take more than one chunk of rows", "b", "another one"]
PARAMS = SamplingParams(max_tokens=6, logprobs=1, temperature=0.7, seed=3, ignore_eos=True)


def config(**changes: object) -> Config:
    fields = {"model": MINI, "device": "cpu", "chunk": 24, "kv_tokens": 1024, "max_requests": 4}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def outcome(engine: Engine) -> list[object]:
    results = engine.generate(PROMPTS, PARAMS)
    return [(result.ids, result.answers[0].logprobs) for result in results]


@pytest.fixture(scope="module")
def plain() -> list[object]:
    with Engine(config(graphs="off")) as engine:
        found = outcome(engine)
        stats = engine.stats()
    assert not stats["replays"] and stats["not_replayed"] == {"graphs off": stats["steps"]}
    return found


@pytest.mark.parametrize("mode", ["on", "compare", "poison"])
def test_replays_equal_plain_calls(plain: list[object], mode: str) -> None:
    with Engine(config(graphs=mode)) as engine:
        assert outcome(engine) == plain
        assert outcome(engine) == plain, "a second time, over what the first left in the buffers"
        stats = engine.stats()
    assert sum(stats["replays"].values()) == stats["steps"] and not stats["not_replayed"]
    assert set(stats["replays"]) <= set(choose_buckets("default", 24))
    parts = "prelude: 2 segments, 1 break; body: 18 segments, 17 breaks; epilogue: 1 segment; 6 buckets to 24 rows"
    assert f"graphs {mode}: {parts}" in engine.describe()


@pytest.mark.parametrize("mode", ["on", "eager", "compare", "poison"])
def test_inputs_that_nothing_reads(mode: str) -> None:
    """One layer has no Engram: starts are read by nothing in its prelude."""
    answers = []
    for graphs in ("off", mode):
        with Engine(config(layers=1, graphs=graphs)) as engine:
            answers.append(outcome(engine))
    assert answers[0] == answers[1]


def test_eager_mode_uses_no_buckets(plain: list[object]) -> None:
    with Engine(config(graphs="eager")) as engine:
        assert outcome(engine) == plain
        stats = engine.stats()
    assert stats["not_replayed"] == {"eager mode": stats["steps"]}


def test_steps_beyond_the_largest_bucket_are_counted(plain: list[object], caplog: pytest.LogCaptureFixture) -> None:
    """They run as plain calls, equal to the bit; logged once, not at every step."""
    with caplog.at_level(logging.WARNING, "octavo.graphs"), Engine(config(buckets="1,2,3")) as engine:
        assert outcome(engine) == plain
        stats = engine.stats()
    beyond = stats["not_replayed"]["beyond the largest bucket"]
    assert beyond > 1 and beyond + sum(stats["replays"].values()) == stats["steps"]
    assert len(caplog.records) == 1 and "was not replayed" in caplog.text


def test_the_start_is_accounted_for() -> None:
    with Engine(config(layers=2, kv_storage="bf16")) as engine:
        phases = dict(engine.timeline)
    assert list(phases) == ["weights, tokenizer", "pools", "export", "passes and proof", "buffers"]
    assert all(seconds > 0 for seconds in phases.values())


def test_dump_of_an_engine(tmp_path: Path) -> None:
    """An overview of three programs, links that lead somewhere, and a line for every step."""
    with Engine(config(layers=3, dump_dir=tmp_path / "dump", buckets="1,8,16")) as engine:
        engine.generate(PROMPTS, PARAMS)
        stats = engine.stats()
    out = tmp_path / "dump"
    index = (out / "index.md").read_text()
    links = [text.split(")")[0] for text in index.split("](")[1:]]
    assert links == ["prelude/index.md", "body/index.md", "epilogue/index.md"]
    assert all((out / link).is_file() for link in links)
    lines = [json.loads(line) for line in (out / "replay.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, stats["steps"] + 1))
    by_bucket = Counter(line["bucket"] for line in lines if line["bucket"] is not None)
    assert dict(by_bucket) == stats["replays"]
    reasons = Counter(line["not_replayed"] for line in lines if line["bucket"] is None)
    assert dict(reasons) == stats["not_replayed"] and reasons["beyond the largest bucket"] > 0


def test_the_head_takes_more_rows_than_requests() -> None:
    """Log probabilities of a prompt need many rows of logits at once, however few requests there may be."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, temperature=0.0)
    found = []
    for mode in ("off", "on", "poison"):
        with Engine(config(graphs=mode, max_requests=2)) as engine:
            found.append([result.prompt_logprobs for result in engine.generate(PROMPTS, params)])
    assert found[0] == found[1] == found[2]
    assert len(found[0][0] or []) > 20


def test_a_start_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and the peak of an eager step are counted before buffers are made."""
    assembly = assemble(config(layers=2))
    asked: list[int] = []

    def refuse(needed_bytes: int, device: torch.device) -> None:
        asked.append(needed_bytes)
        raise OctavoError("too much")

    monkeypatch.setattr("octavo.runtime.program_start.check_memory", refuse)
    for buckets in ((8,), (16,)):
        with pytest.raises(OctavoError, match="too much"):
            Runner(assembly, {False: buckets}, "on")
    pools = Runner(assembly).pools.bytes
    small, large = (needed - pools for needed in asked)
    assert small > 8 * assembly.config.text_config.hidden_size * 2
    assert 0 < 2 * small - large < small, "what grows with rows doubles; the head's buffers do not"


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ("8,4", "ascending"),
        ("4,4", "each once"),
        ("0,4", "bucket 0"),
        ("4,25", "bucket 25"),
        ("4,x", "default, dense, or row counts"),
        ("", "default, dense, or row counts"),
    ],
)
def test_bad_buckets(buckets: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_buckets(buckets, 24)


def test_default_buckets() -> None:
    dense = choose_buckets("dense", 8192)
    default = choose_buckets("default", 8192)
    assert len(default) == 24 and set(default) < set(dense) and default[-1] == dense[-1] == 8192
    assert choose_buckets("default", 16) == (1, 2, 4, 8, 16)
