"""A run learns, can be interrupted and resumed, and leaves a checkpoint that the engine answers from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from octavo import Engine, EngineConfig, SamplingParams
from octavo.kernels.mhc import split_mixes
from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from tools.train_nano.attention import Step
from tools.train_nano.batches import Mix, Part, Supply, make_batch
from tools.train_nano.files import load_state, save_state, write_checkpoint
from tools.train_nano.forward import forward
from tools.train_nano.functions import mix
from tools.train_nano.loop import Pace, Trainer
from tools.train_nano.masters import Learner, Masters, learner
from tools.train_nano.optimiser import Optimiser, Rates, orthogonalised
from tools.train_nano.passes import Passes
from tools.train_nano.plot import write_plot
from tools.train_nano.rows import Numerics
from tools.train_nano.schedule import Phase, Schedule
from tools.train_nano.train import cut_down

CPU = torch.device("cpu")
LENGTH, ROWS = 48, 3


class Copies:
    """Rows that say a few random ids again and again: the second time they can be predicted."""

    def batch(
        self, kind: str, rows: int, length: int, step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        rng = np.random.default_rng(step)
        part = rng.integers(3, 40, (rows, 8))
        ids = np.tile(part, (1, length // 8))
        weights = np.zeros(ids.shape, dtype=np.float32)
        weights[:, 9:] = 1.0
        return ids, weights


MIX = Mix(LENGTH, (Part("copies", ROWS, 1.0),))
SCHEDULE = Schedule(
    phases=(
        Phase("first", 0.5, ((MIX,),), sparse=False, rounded=False),
        Phase("second", 1.0, ((MIX,),), sparse=True, rounded=True),
    ),
    warm_up_steps=5,
)


def new_masters() -> Masters:
    config = cut_down(ModelConfig.from_path(nano_path()))
    classes = np.arange(config.text_config.vocab_size) % config.text_config.engram_compressed_vocab_size
    masters = Masters(config, classes, CPU, torch.float32)
    masters.initialise(0)
    return masters


def new_trainer(folder: Path, steps: int) -> Trainer:
    masters = new_masters()
    optimiser = Optimiser(masters, Rates())
    return Trainer(
        masters,
        optimiser,
        SCHEDULE,
        Supply(Copies, workers=0),
        Passes(masters, optimiser, graphs=False, say=lambda line: None),
        total=steps,
        in_steps=True,
        log=folder / "log.jsonl",
        pace=Pace(samples=16, log_steps=1),
        say=lambda line: None,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_reach_every_master(sparse: bool) -> None:
    """And those of the indexer come from its own loss alone, which in turn reaches nothing else."""
    masters = new_masters()
    batch = make_batch(Copies(), MIX, 0, 16)
    numerics = Numerics(torch.float32, weights=sparse, activations=sparse)
    learned = masters.indexer_ids()
    step = Step(numerics, ROWS, LENGTH, sparse, batch.samples, learned)
    logits = forward(masters, step, batch.ids, batch.wanted)
    main = (nn.functional.cross_entropy(logits, batch.targets, reduction="none") * batch.weights).sum()
    main.backward(retain_graph=True)
    named = masters.named()
    indexer = {name for name, master in named.items() if id(master) in learned}
    assert len(indexer) == 3 * 2 + 2 * 2
    reached = {name for name, master in named.items() if master.grad is not None and master.grad.any()}
    expected = {name for name in named if learner(name) is not Learner.BALANCE}
    assert reached == expected - indexer
    for master in named.values():
        master.grad = None
    torch.stack(step.index_losses).sum().backward()
    assert {name for name, master in named.items() if master.grad is not None and master.grad.any()} == indexer
    assert len(step.index_losses) == 4


@pytest.mark.parametrize("streams", [2, 4])
def test_sinkhorn_gradient(streams: int) -> None:
    """The gradient of the limit is that of many rounds."""
    torch.manual_seed(0)
    width, rows = 8, 6
    x = torch.randn(rows, streams, width)
    fn = torch.randn((2 + streams) * streams, streams * width) * 0.1
    base = torch.randn((2 + streams) * streams)
    scale = torch.ones(3, requires_grad=True)
    direction = torch.randn(rows, streams, streams)
    found = mix(x, fn, scale, base, 20, 1e-6, 1e-20)
    (gradient,) = torch.autograd.grad((found[2] * direction).sum(), scale)
    flat = x.flatten(1)
    mixes = flat @ fn.t() * torch.rsqrt(flat.square().mean(1, keepdim=True))
    exact = split_mixes(mixes, scale, base, streams, 100, 1e-6)
    (expected,) = torch.autograd.grad((exact[2] * direction).sum(), scale)
    assert expected[2].abs() > 0.01
    assert (gradient - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (found[2] - exact[2]).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(3, 32, 64), (2, 64, 32)])
def test_orthogonalised(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_a_short_run_learns(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, 30)
    trainer.run(30)
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(entries) == 30
    losses = [entry["loss"]["copies"] for entry in entries]
    assert losses[0] > 7.0, "about the logarithm of the vocabulary"
    assert losses[-1] < 0.6 * losses[0]
    assert [entry["phase"] for entry in entries] == ["first"] * 15 + ["second"] * 15
    assert len(entries[-1]["index_recalls"]) == 4
    write_plot(tmp_path / "log.jsonl", tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().count("<path") == 6


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = new_trainer(tmp_path, 6)
    whole.run(6)

    first = new_trainer(tmp_path, 6)
    first.run(3)
    save_state(tmp_path / "state.pt", first.masters, first.optimiser, first.progress)
    second = new_trainer(tmp_path, 6)
    second.progress = load_state(tmp_path / "state.pt", second.masters, second.optimiser)
    assert second.progress.step == 3
    second.run(6)
    for (name, master), other in zip(whole.masters.named().items(), second.masters.named().values(), strict=True):
        assert torch.equal(master, other), name


def test_the_checkpoint_answers(tmp_path: Path) -> None:
    masters = new_masters()
    write_checkpoint(masters, tmp_path / "nano", nano_path())
    with Engine(EngineConfig(model=tmp_path / "nano", device="cpu", graphs="off", kv_tokens=512)) as engine:
        (answer,) = engine.generate(
            [[{"role": "user", "content": "Hello"}]], SamplingParams(max_tokens=3, ignore_eos=True)
        )
    assert len(answer.ids) == 3


def test_workers_give_the_same_batches() -> None:
    alone, several = Supply(Copies, workers=0), Supply(Copies, workers=2)
    try:
        for step in range(5):
            (_, expected), (mix, found) = (s.get(step, lambda _: (MIX,), 16)[0] for s in (alone, several))
            assert mix == MIX
            assert torch.equal(expected.ids, found.ids) and torch.equal(expected.samples, found.samples)
    finally:
        several.close()
