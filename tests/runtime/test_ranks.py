"""Real ranks: processes over gloo compute what one process computes, to the bit, and end together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import Engine, EngineConfig, OctavoError, SamplingParams, UsageError
from octavo.graphs.emulation import run_ranks
from octavo.runtime.assemble import assemble
from octavo.runtime.ranks.agreement import agree, exchange
from octavo.runtime.ranks.communicator import GroupCommunicator
from octavo.runtime.ranks.group import all_ranks
from octavo.runtime.ranks.messages import Pick, StepPlan, decode, encode
from octavo.runtime.ranks.start import rank_runner, with_common_capacity
from octavo.runtime.ranks.workers import RankFailure, Workers
from octavo.runtime.runner import Chunk, Runner
from octavo.runtime.step_program import choose_buckets
from tests.conftest import ReportCount
from tests.model.mini_run import MINI, golden
from tests.rank_work import (
    collect,
    collect_and_compare,
    compute_and_compare,
    differs,
    digest_of,
    raises_while_loading,
    run_steps,
)

RANKS = 2
ROWS = (1, RANKS, RANKS + 1, 21, 45)
"""Rows of the first step of a request, in turn: fewer than ranks, as many, one more, odd counts."""
MAIN = "import sys; from octavo.runtime.cli import main; sys.argv[0] = 'octavo'; main()"
ONE = {"OMP_NUM_THREADS": "1"}
PARAMS = SamplingParams(max_tokens=5, logprobs=1, temperature=0.7, seed=3, ignore_eos=True, prompt_logprobs=1)


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"model": MINI, "device": "cpu", "chunk": 48, "kv_tokens": 2048, "max_requests": 8}
    return EngineConfig(**(fields | {"ranks": RANKS, "step_deadline": 60.0} | changes))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 500, (rows,), generator=generator).tolist() for rows in ROWS]


def outcome(engine: Engine) -> list[Any]:
    """Some prompts alone, then all together."""
    results = [engine.generate([prompt], PARAMS)[0] for prompt in prompts()[::2]] + engine.generate(prompts(), PARAMS)
    return [(result.ids, result.answers[0].logprobs, result.prompt_logprobs) for result in results]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with Engine(config(ranks=1)) as engine:
        return outcome(engine)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "graphs"),
    [
        (2, "on"),
        (2, "poison"),
        *(pytest.param(4, graphs, marks=pytest.mark.soak) for graphs in ("on", "off", "eager", "compare")),
    ],
)
def test_ranks_equal_one_rank(ranks: int, graphs: str, expected: list[Any], report_count: ReportCount) -> None:
    with Engine(config(ranks=ranks, graphs=graphs)) as engine:
        assert outcome(engine) == expected
        stats = engine.stats()
        assert "body-sharded" in engine.describe() and "body-replicated" in engine.describe()
    if graphs in ("on", "poison", "compare"):
        assert sum(stats["replays"].values()) == stats["steps"] and not stats["not_replayed"]
    report_count("real ranks: answers equal to one rank's, bitwise", len(expected))


@pytest.mark.timeout(120)
def test_state_is_equal_on_every_rank() -> None:
    """Hidden rows and every byte of the pools, after each step, on each rank: those of one rank."""
    one = config(ranks=1)
    alone = run_steps(Runner(assemble(one), {False: choose_buckets("default", one.chunk)}, "on"))
    settings = config()
    workers = Workers(settings, compute_and_compare, 60.0)
    try:
        runner = rank_runner(with_common_capacity(assemble(settings), settings), settings)
        found = exchange(run_steps(runner), all_ranks())
    finally:
        workers.stop()
    assert found == [alone] * RANKS


@pytest.mark.timeout(60)
def test_collectives_are_the_emulated_ones() -> None:
    """To the bit, on every rank, whatever dtype and however large."""
    expected = [{"digest": digest_of(found)} for found in run_ranks(RANKS, collect)]
    workers = Workers(config(), collect_and_compare, 60.0)
    try:
        found = exchange({"digest": digest_of(collect(GroupCommunicator()))}, all_ranks())
    finally:
        workers.stop()
    assert found == expected


@pytest.mark.timeout(120)
def test_goldens_and_a_dump(tmp_path: Path) -> None:
    """The official greedy answer by two ranks in plain numerics; the dump holds the programs of both placements."""
    prompt = golden("prefill", "plain")["p37.input_ids"].tolist()
    with Engine(config(numerics="plain", dump_dir=tmp_path / "dump")) as engine:
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=25))
    assert answer.ids == golden("decode", "plain")["generated"].tolist()
    folders = {path.name for path in (tmp_path / "dump").iterdir() if path.is_dir()}
    assert folders == {"prelude-sharded", "body-sharded", "prelude-replicated", "body-replicated", "epilogue"}


@pytest.mark.timeout(120)
def test_the_shared_expert_is_added_once(tmp_path: Path) -> None:
    """With routed experts that give nothing, what is left of the sum over ranks is the shared expert's."""
    model = tmp_path / "model"
    shutil.copytree(MINI, model)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        routed = [name for name in tensors if ".experts." in name and name.endswith(".weight")]
        for name in routed:
            tensors[name].view(torch.uint8).zero_()
        if routed:
            save_file(tensors, file)
    answers = []
    for settings in (config(ranks=1), config(ranks=1, model=model), config(model=model)):
        with Engine(settings) as engine:
            answers.append([(r.ids, r.answers[0].logprobs) for r in engine.generate(prompts(), PARAMS)])
    assert answers[0] != answers[1] == answers[2]


@pytest.mark.timeout(120)
def test_an_interrupt_leaves_no_process() -> None:
    """Ctrl-C reaches all processes of a terminal's job."""
    options = ["--model", MINI, "--device", "cpu", "--ranks", "2", "--kv-tokens", "2048", "--max-tokens", "1500"]
    command = [sys.executable, "-c", MAIN, "generate", *map(str, options), "--ignore-eos", "--raw", "hello"]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **ONE}
    )
    assert job.stdout is not None
    job.stdout.read(1)  # it has begun to answer
    os.killpg(job.pid, signal.SIGINT)
    job.wait(20)
    job.stdout.close()
    deadline = time.monotonic() + 10
    while members(job.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(job.pid)


@pytest.mark.timeout(120)
def test_torchrun_gives_the_ranks() -> None:
    """Two processes of one command: the first answers as one alone does, the other says nothing."""
    options = ["--model", MINI, "--device", "cpu", "--kv-tokens", "1024", "--max-tokens", "6", "--raw", "hello"]
    command = ["generate", *map(str, options)]
    alone = subprocess.run([sys.executable, "-c", MAIN, *command], capture_output=True, text=True, check=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", sys.executable, "-c", MAIN]
    both = [*launch, *command, "--ranks", "2"]
    given = subprocess.run(both, capture_output=True, text=True, check=False, env={**os.environ, **ONE})
    assert given.returncode == 0, given.stderr
    assert given.stdout == alone.stdout and given.stderr.count("all ranks together") == 1


def members(group: int) -> list[str]:
    """Processes of a process group that are no zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(folder.name)
    return found


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(config(layers=2)) as running:
        yield running


def children() -> list[int]:
    """Ranks that this process has started and not buried."""
    own = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and "spawn_main" in command:
            own.append(int(folder.name))
    return own


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
    with Engine(config(layers=2, step_deadline=4.0)) as engine:
        time.sleep(6.0)
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


@pytest.mark.timeout(60)
def test_a_stopped_rank_ends_the_engine_at_its_deadline() -> None:
    with Engine(config(layers=2, step_deadline=3.0)) as engine:
        (worker,) = children()
        os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(OctavoError, match=r"ended|hangs"):
            engine.generate([[5, 6]])
        assert time.monotonic() - began < 20
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


def test_messages() -> None:
    """What is told is what is heard, also when it is longer than a first broadcast."""
    long = StepPlan(((1, 2, 3), (4, 5, 6)), (Chunk(3, 7, list(range(2000))), Chunk(0, 0, [5])))
    for message in (None, Pick((3, 1, 4)), long, StepPlan((), (Chunk(1, 2, [3]),))):
        assert decode(encode(message)) == message
