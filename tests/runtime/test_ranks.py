"""Real ranks: processes over gloo compute what one process computes, to the bit, and end together."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import Engine, SamplingParams
from octavo.graphs.emulation import run_ranks
from octavo.runtime.assemble import assemble
from octavo.runtime.ranks.agreement import exchange
from octavo.runtime.ranks.communicator import GroupCommunicator
from octavo.runtime.ranks.group import all_ranks
from octavo.runtime.ranks.messages import Pick, StepPlan, decode, encode
from octavo.runtime.ranks.start import rank_runner, with_common_capacity
from octavo.runtime.ranks.workers import Workers
from octavo.runtime.runner import Chunk, Runner
from octavo.runtime.step_program import choose_buckets
from tests.conftest import ReportCount
from tests.model.mini_run import MINI, golden
from tests.rank_processes import RANKS, config, members
from tests.rank_work import (
    STEPS,
    collect,
    collect_and_compare,
    compute_and_compare,
    digest_of,
    long_steps,
    run_steps,
)

ROWS = (1, RANKS, RANKS + 1, 21, 45)
"""Rows of the first step of a request, in turn: fewer than ranks, as many, one more, odd counts."""
MAIN = "import sys; from octavo.runtime.cli import main; sys.argv[0] = 'octavo'; main()"
ONE = {"OMP_NUM_THREADS": "1"}
PARAMS = SamplingParams(max_tokens=5, logprobs=1, temperature=0.7, seed=3, ignore_eos=True, prompt_logprobs=1)


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
    ("ranks", "graphs", "experts"),
    [
        (2, "on", "sharded"),
        (2, "poison", "sharded"),
        *(pytest.param(4, graphs, "sharded", marks=pytest.mark.soak) for graphs in ("on", "off", "eager", "compare")),
        *(pytest.param(ranks, "on", "replicated", marks=pytest.mark.soak) for ranks in (2, 3)),
    ],
)
def test_ranks_equal_one_rank(
    ranks: int, graphs: str, experts: str, expected: list[Any], report_count: ReportCount
) -> None:
    collectives, reason = ("captured", "gloo moves rows on the host") if graphs == "poison" else ("between", "--coll")
    with Engine(config(ranks=ranks, graphs=graphs, expert_placement=experts, collectives=collectives)) as engine:
        assert outcome(engine) == expected
        stats = engine.stats()
        assert "body-sharded" in engine.describe() and "body-replicated" in engine.describe()
        assert f"collectives between segments: {reason}" in engine.describe()
    assert stats["traffic"]["collectives"] > stats["steps"] and stats["traffic"]["bytes_sent"] > 0
    if graphs in ("on", "poison", "compare"):
        assert sum(stats["replays"].values()) == stats["steps"] and not stats["not_replayed"]
    report_count("real ranks: answers equal to one rank's, bitwise", len(expected))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [(2, 342), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, 429), (2, 1023), (4, 342), (4, 1023)))],
)
def test_state_is_equal_on_every_rank(ranks: int, rows: int, report_count: ReportCount) -> None:
    """Hidden rows and every byte of the pools, after each step, on each rank: those of one rank."""
    steps = [*STEPS, *long_steps(rows)]
    one = config(ranks=1, chunk=rows, kv_tokens=4096)
    alone = run_steps(Runner(assemble(one), {False: choose_buckets("default", one.chunk)}, "on"), steps)
    settings = config(ranks=ranks, chunk=rows, kv_tokens=4096)
    workers = Workers(settings, functools.partial(compute_and_compare, steps), 60.0)
    try:
        runner = rank_runner(with_common_capacity(assemble(settings), settings), settings)
        found = exchange(run_steps(runner, steps), all_ranks())
    finally:
        workers.stop()
    assert found == [alone] * ranks
    report_count("real ranks: states equal to one rank's, bitwise", ranks * len(steps))


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
    for settings in (config(ranks=1, layers=2), config(ranks=1, layers=2, model=model), config(layers=2, model=model)):
        with Engine(settings) as engine:
            answers.append([(r.ids, r.answers[0].logprobs) for r in engine.generate(prompts(), PARAMS)])
    assert answers[0] != answers[1] == answers[2]


@pytest.mark.timeout(120)
def test_an_interrupt_leaves_no_process() -> None:
    """Ctrl-C reaches all processes of a terminal's job."""
    options = ["--model", MINI, "--layers", "2", "--device", "cpu", "--ranks", "2", "--kv-tokens", "2048"]
    command = [sys.executable, "-c", MAIN, "generate", *map(str, options), "--max-tokens", "1500", "--ignore-eos"]
    command += ["--raw", "hello"]
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Whoever runs the tests in the background of a shell ignores the signal, and so would the job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, **ONE},
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
    options = ["--model", MINI, "--layers", "2", "--device", "cpu", "--kv-tokens", "1024", "--max-tokens", "6"]
    command = ["generate", *map(str, options), "--raw", "hello"]
    alone = subprocess.run([sys.executable, "-c", MAIN, *command], capture_output=True, text=True, check=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", sys.executable, "-c", MAIN]
    both = [*launch, *command, "--ranks", "2"]
    given = subprocess.run(both, capture_output=True, text=True, check=False, env={**os.environ, **ONE})
    assert given.returncode == 0, given.stderr
    assert given.stdout == alone.stdout and given.stderr.count("all ranks together") == 1


def test_messages() -> None:
    """What is told is what is heard, also when it is longer than a first broadcast."""
    long = StepPlan(((1, 2, 3), (4, 5, 6)), (Chunk(3, 7, list(range(2000))), Chunk(0, 0, [5])))
    for message in (None, Pick((3, 1, 4)), long, StepPlan((), (Chunk(1, 2, [3]),))):
        assert decode(encode(message)) == message
