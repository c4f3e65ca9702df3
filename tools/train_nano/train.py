"""``python -m tools.train_nano.train --minutes 9 --out DIR``: one time-boxed training run of octavo-nano."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from pathlib import Path

import torch

from octavo.errors import OctavoError
from octavo.model.config import ModelConfig
from octavo.model.engram_hash import engram_hashes
from octavo.model.packaged import nano_path
from octavo.model.token_classes import token_map
from octavo.runtime.tokenizer import Tokenizer
from tools.train_nano import evaluate
from tools.train_nano.batches import Supply
from tools.train_nano.corpus import Corpus
from tools.train_nano.files import load_state, save_masters, save_state, write_checkpoint
from tools.train_nano.loop import Pace, Trainer
from tools.train_nano.masters import Masters
from tools.train_nano.optimiser import Optimiser, Rates
from tools.train_nano.passes import Passes
from tools.train_nano.plot import write_plot
from tools.train_nano.schedule import Schedule, cut_down_schedule, full_schedule


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="Of training, all parts together.")
    parser.add_argument("--part-minutes", type=float, help="Stop after so many, with a state to resume from.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="Directory of an earlier part.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6, help="Processes that make batches; 0: none.")
    parser.add_argument("--eager", action="store_true", help="No CUDA graphs.")
    parser.add_argument("--cut-down", action="store_true", help="A small model and short rows, for a CPU.")
    parser.add_argument("--kinds", default="recall,arithmetic", help="With --cut-down.")
    parser.add_argument("--rows", type=int, default=8, help="With --cut-down: conversations of each kind a step.")
    parser.add_argument("--length", type=int, default=256, help="With --cut-down.")
    parser.add_argument("--eval-items", type=int, default=512, help="Held-out items a suite at the end; 0: none.")
    parser.add_argument("--sink", type=float, default=2.0, help="Logit from which the sinks start.")
    for rate in dataclasses.fields(Rates):
        parser.add_argument(f"--{rate.name.replace('_', '-')}", type=float, default=rate.default)
    options = parser.parse_args()
    try:
        _run(options)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = ModelConfig.from_path(nano_path())
    tokenizer = Tokenizer.from_checkpoint(nano_path(), config)
    if options.cut_down:
        config = cut_down(config)
    schedule: Schedule = (
        cut_down_schedule(options.length, options.rows, tuple(options.kinds.split(",")))
        if options.cut_down
        else full_schedule()
    )
    # First, because workers take their time to start.
    supply = Supply(functools.partial(_source, options.seed), options.workers)
    if device.type == "cpu":
        torch.set_num_threads(1)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    masters = Masters(config, token_map(tokenizer.backend, config.text_config), device, dtype)
    masters.initialise(options.seed, options.sink)
    rates = Rates(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Rates)})
    optimiser = Optimiser(masters, rates)
    total = options.minutes * 60
    say = functools.partial(print, flush=True)
    passes = Passes(masters, optimiser, graphs=not options.eager, say=say)
    pace = Pace(samples=64, log_steps=10) if options.cut_down else Pace()
    log = out / "log.jsonl"
    trainer = Trainer(masters, optimiser, schedule, supply, passes, total=total, log=log, pace=pace, say=say)
    if options.resume is not None:
        trainer.progress = load_state(options.resume / "state.pt", masters, optimiser)
    count = sum(p.numel() for p in masters.named().values())
    print(f"{count / 1e6:.2f} M parameters on {device}, ready after {time.perf_counter() - began:.1f} s", flush=True)
    try:
        part = total if options.part_minutes is None else trainer.progress.seconds + options.part_minutes * 60
        trainer.run(min(total, part))
    finally:
        supply.close()
    _finish(trainer, tokenizer, out, options)
    print(f"finished after {time.perf_counter() - began:.1f} s in all", flush=True)


def _finish(trainer: Trainer, tokenizer: Tokenizer, out: Path, options: argparse.Namespace) -> None:
    """The state is written first: what follows can be repeated from it."""
    masters, progress = trainer.masters, trainer.progress
    save_state(out / "state.pt", masters, trainer.optimiser, progress)
    save_masters(masters, out / "masters.pt")
    print(f"{progress.step} steps, {progress.tokens / 1e6:.1f} M tokens, {progress.seconds:.1f} s of training")
    if trainer.masters.model.head.weight.is_cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    write_checkpoint(masters, out / "checkpoint", nano_path())
    write_plot(out / "log.jsonl", out / "loss.svg")
    if options.eval_items:
        sizes = {"arithmetic": 1, "facts": 1, "recall@1k": 1, "recall@4k": 4}
        if options.cut_down:
            sizes = dict(itertools.islice(sizes.items(), 3))
        items = {suite: max(1, options.eval_items // share) for suite, share in sizes.items()}
        report = evaluate.table(masters, tokenizer, items=items)
        print(report, flush=True)
        (out / "accuracy.txt").write_text(report + "\n", encoding="utf-8")


def _source(seed: int) -> Corpus:
    """In a worker: a corpus of its own."""
    config = ModelConfig.from_path(nano_path())
    return Corpus(Tokenizer.from_checkpoint(nano_path(), config), seed=seed)


def cut_down(config: ModelConfig) -> ModelConfig:
    """octavo-nano with fewer layers and narrower, all features kept: to try the recipe on a CPU."""
    text = dataclasses.replace(
        config.text_config,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        n_routed_experts=4,
        sliding_window=16,
        compress_ratios=(0, 2, 2, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer_id=3,
        candidate_topk_blocks=4,
        candidate_block_size=16,
        engram_layer_ids=(1,),
        engram_num_embeddings=config.text_config.engram_num_embeddings[:1],
    )
    cut = ModelConfig.from_dict(dataclasses.replace(config, text_config=text).to_dict())
    engram_hashes(cut.text_config)
    return cut


if __name__ == "__main__":
    sys.exit(main())
