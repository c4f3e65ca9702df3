"""Ranks that die, throw or are stopped: the engine ends soon, says why, and leaves no process."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import get_args

import pytest

from octavo import Engine, OctavoError, SamplingParams, UsageError
from octavo.runtime.ranks import given
from octavo.runtime.ranks.agreement import agree, exchange
from octavo.runtime.ranks.given import given_ranks
from octavo.runtime.ranks.group import all_ranks
from octavo.runtime.ranks.workers import RankFailure, Workers
from tests.rank_processes import children, config
from tests.rank_work import How, Phase, differs, fails, raises_while_loading


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(config(layers=2)) as running:
        yield running


@pytest.mark.timeout(60)
def test_a_killed_rank_ends_the_engine(engine: Engine) -> None:
    """Within ten seconds, by name, while a request is running; nothing is left."""
    (worker,) = children()
    threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(OctavoError, match="rank 1 ended: killed by SIGKILL"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=900, ignore_eos=True))
    assert time.monotonic() - began < 10.5
    engine.close()
    assert not children()


@pytest.mark.timeout(60)
def test_an_idle_engine_waits() -> None:
    """Longer than a collective may take; and closing twice is closing once."""
    with Engine(config(layers=2, step_deadline=6.0)) as engine:
        time.sleep(7.5)
        assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].finish_reason == "length"
        engine.close()
    assert not children()


@pytest.mark.timeout(60)
def test_a_rank_that_dies_while_nothing_runs(engine: Engine) -> None:
    (worker,) = children()
    os.kill(worker, signal.SIGKILL)
    time.sleep(1.0)
    with pytest.raises(OctavoError, match="rank 1 ended: killed by SIGKILL"):
        engine.generate([[5]])


CASES: tuple[tuple[Phase, How], ...] = (
    ("load", "kill"),
    ("load", "stop"),
    ("start", "throw"),
    ("prefill", "throw"),
    ("decode", "stop"),
)
"""One or two of each phase; ``make soak`` goes through all."""


def _all_cases() -> list[object]:
    phases, ways = get_args(Phase), get_args(How)
    every = [(phase, how) for phase in phases for how in ways]
    return [case if case in CASES else pytest.param(*case, marks=pytest.mark.soak) for case in every]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("phase", "how"), _all_cases())
def test_a_rank_that_fails(phase: Phase, how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever it does: told by name within ten seconds, a stopped one's after the deadline; nothing is left."""
    monkeypatch.setattr("octavo.runtime.engine.follow", functools.partial(fails, phase, how))
    named = {
        "kill": "rank 1 ended: killed by SIGKILL",
        "stop": "Rank 1 is stopped",
        "throw": f"rank 1 ended: ValueError: no luck in {phase}",
    }[how]
    deadline = 8.0 if how == "stop" else 45.0
    began = time.monotonic()
    with (
        pytest.raises(OctavoError, match=named),
        Engine(config(layers=2, step_deadline=deadline)) as engine,
    ):
        began = time.monotonic()
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))
    if phase in ("prefill", "decode"):
        assert time.monotonic() - began < 10 + (deadline if how == "stop" else 0)
    assert not children()


@pytest.mark.timeout(60)
def test_an_error_while_loading_is_named() -> None:
    workers = Workers(config(), raises_while_loading, 30.0)
    try:
        with pytest.raises(RuntimeError) as broken:
            exchange({}, all_ranks())
        found = workers.explain(broken.value)
    finally:
        workers.stop()
    assert isinstance(found, RankFailure) and str(found) == "rank 1 ended: ValueError: no weights for rank 1"
    assert not children()


@pytest.mark.timeout(60)
def test_the_rank_that_differs_is_named() -> None:
    workers = Workers(config(), differs, 30.0)
    try:
        with pytest.raises(OctavoError, match="rank 1 differs from rank 0 in torch: another instead of mine"):
            agree({"torch": "mine", "octavo": "same"}, all_ranks())
    finally:
        workers.stop()


def test_what_cannot_be_dealt() -> None:
    """Before any process is started."""
    with pytest.raises(UsageError, match="--device cuda:0 with --ranks 2: each rank needs its own; use cuda"):
        Engine(config(device="cuda:0"))
    with pytest.raises(UsageError, match="--ranks 3: 8 experts cannot be dealt evenly; 1, 2, 4, 8 ranks can"):
        Engine(config(ranks=3))
    assert not children()


@pytest.mark.timeout(60)
def test_a_host_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of another host sees it that torchrun has started: nobody listens where rank 0 should be."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    given_by_torchrun = {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in given_by_torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(given, "_REACH_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(OctavoError, match=rf"the host of rank 0 cannot be reached: .*{port}.*--rdzv-endpoint"):
        given_ranks()
    assert time.monotonic() - began < 20
