"""The engine's steps as compiled programs: every mode gives the plain call's answers, bitwise, and says what it did."""

from __future__ import annotations

import logging

import pytest

from octavo import Engine, EngineConfig, SamplingParams, UsageError
from octavo.runtime.body_program import choose_buckets
from octavo.runtime.config import EngineConfig as Config
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
    assert f"graphs {mode}: 18 segments, 17 breaks" in engine.describe()


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
    assert list(phases) == ["weights, tokenizer, pools", "export", "passes and proof", "buffers and warm-up"]
    assert all(seconds > 0 for seconds in phases.values())


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
