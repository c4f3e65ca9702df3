"""The engine in ``plain`` numerics against the judge, on models of many shapes that no golden covers.

Tolerance 1e-5 relative L2 of each row: F32 against fp64 gives up to 1.7e-6 here, most of it where angles of fast
rotations are F32. Selections and candidates are equal. A decision that is nearer than :data:`DOUBT` may fall either
way in F32: the cases of the table take prompts that meet none, and the random search compares the positions before
the first one, which no later token can reach.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from octavo.model.config import ModelConfig, RopeScaling
from octavo.runtime.assemble import assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.pools import PoolSizes
from octavo.runtime.runner import Chunk, Runner
from tests.broken_judges import BROKEN_JUDGES
from tests.conftest import ReportCount
from tests.judge import Judge, Trace
from tests.judge_weights import read_checkpoint
from tests.model.mini_run import MiniRun, Record, relative
from tests.random_models import small_config, write_random_checkpoint
from tests.tokenizer_data import MINI

TOLERANCE = 1e-5
DOUBT = 1e-5
"""Relative margin. Exact ties are no matter of doubt: the lower index comes first."""

TOKENS = 150
"""Crosses two borders of pages of 64 tokens; random chunks end within pages, windows and groups."""

ONES = (1,) * 6
YARN = RopeScaling(rope_type="yarn", factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=64)

CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "one stream": {"hc_mult": 1},
    "two streams": {"hc_mult": 2, "hc_sinkhorn_iters": 1},
    "three streams, large epsilon": {"hc_mult": 3, "hc_sinkhorn_iters": 3, "hc_eps": 0.05},
    "five streams": {"hc_mult": 5},
    "window alone in the middle": {
        "compress_ratios": (2, 2, 0, 1, 0, 1),
        "kv_source_layer_ids": (0, 3),
        "index_source_layer_ids": (0, 3, 5),
        "candidate_source_layer_id": 3,
    },
    "ratio 1 before ratio 2": {
        "compress_ratios": (1, 1, 2, 2, 1, 1),
        "kv_source_layer_ids": (0, 2, 4),
        "index_source_layer_ids": (0, 1, 2, 3, 4, 5),
        "candidate_source_layer_id": 0,
    },
    "candidates of one of three sources": {
        "compress_ratios": ONES,
        "kv_source_layer_ids": (0, 2, 4),
        "index_source_layer_ids": (0, 1, 2, 3, 4, 5),
        "candidate_source_layer_id": 2,
    },
    "candidates of pairs, named by a layer without entries": {
        "compress_ratios": (2, 2, 2, 2, 2, 2),
        "kv_source_layer_ids": (0,),
        "index_source_layer_ids": (0, 2, 4, 5),
        "candidate_source_layer_id": 2,
    },
    "candidates never read": {"candidate_source_layer_id": 5},
    "no candidates": {"candidate_source_layer_id": None},
    "one candidate block of one entry": {"candidate_topk_blocks": 1, "candidate_block_size": 1},
    "candidate blocks of 3": {"candidate_topk_blocks": 5, "candidate_block_size": 3, "index_topk": 20},
    "one block holds all": {"candidate_topk_blocks": 2, "candidate_block_size": 256},
    "no sources": {
        "compress_ratios": (0, 0, 0),
        "kv_source_layer_ids": (),
        "index_source_layer_ids": (),
        "candidate_source_layer_id": None,
        "engram_layer_ids": (2,),
    },
    "one layer": {
        "compress_ratios": (2,),
        "kv_source_layer_ids": (0,),
        "index_source_layer_ids": (0,),
        "candidate_source_layer_id": 0,
        "engram_layer_ids": (0,),
    },
    "selects one": {"index_topk": 1, "index_n_heads": 1},
    "selects all": {"index_topk": 256},
    "window of 5": {"sliding_window": 5},
    "window of 1": {"sliding_window": 1},
    "window of 48": {"sliding_window": 48},
    "window beyond the prompt": {"sliding_window": 300},
    "a group a head": {"o_groups": 4, "o_lora_rank": 8},
    "one group": {"o_groups": 1, "o_lora_rank": 64},
    "all experts": {"num_experts_per_tok": 4},
    "one expert": {"n_routed_experts": 1, "num_experts_per_tok": 1},
    "3 of 5 experts": {"n_routed_experts": 5, "num_experts_per_tok": 3, "routed_scaling_factor": 3.0},
    "no clamp": {"swiglu_limit": 1000.0},
    "tight clamp": {"swiglu_limit": 0.02},
    "small ranks": {"q_lora_rank": 32, "o_lora_rank": 16},
    "all channels rotate": {"qk_rope_head_dim": 32},
    "few channels rotate": {"qk_rope_head_dim": 4, "head_dim": 64, "index_head_dim": 96, "index_n_heads": 3},
    "fast rotation": {"compress_rope_theta": 100.0, "rope_theta": 20.0, "rope_scaling": YARN},
    "sizes of three": {
        "hidden_size": 96,
        "head_dim": 96,
        "num_attention_heads": 6,
        "o_groups": 3,
        "moe_intermediate_size": 96,
        "q_lora_rank": 96,
    },
    "Engram at the start, pairs alone": {"engram_layer_ids": (0, 1, 2), "engram_max_ngram_size": 2},
    "n-grams of 5": {"engram_layer_ids": (0, 5), "engram_max_ngram_size": 5, "engram_n_heads": 3},
    "another pad": {"engram_pad_token_id": 40, "engram_n_heads": 1, "engram_head_dim": 64},
    "Engram everywhere": {"engram_layer_ids": (0, 1, 2, 3, 4, 5)},
    "no Engram": {"engram_layer_ids": ()},
    "with vision": {"vision": True},
    "with drafts": {"num_nextn_predict_layers": 2, "dspark_target_layer_ids": (0, 4, 5)},
    "features without drafts": {"dspark_target_layer_ids": (1,)},
}

BATCHED = (
    "ratio 1 before ratio 2",
    "candidates of pairs, named by a layer without entries",
    "window of 5",
    "selects all",
    "n-grams of 5",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operations are so small here that threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class JudgedModel:
    """One random model, both ways."""

    def __init__(self, path: Path, config: ModelConfig, seed: int) -> None:
        write_random_checkpoint(path, config, seed)
        self.config = config
        self.judge_arguments = config, read_checkpoint(path), np.load(MINI / "engram_token_map.npy").tolist()
        self.assembly = assemble(
            EngineConfig(model=path, numerics="plain", kv_tokens=256, max_requests=3, device="cpu")
        )
        self.runs = 0

    def judge(self, ids: Sequence[int]) -> Trace:
        return Judge(*self.judge_arguments).forward(ids)

    def judged_prompt(self, count: int, first_seed: int = 0) -> tuple[list[int], Trace]:
        """A prompt of ``count`` random tokens, none of which makes the model doubt."""
        for seed in range(first_seed, first_seed + 20):
            ids = random_ids(seed, count)
            trace = self.judge(ids)
            if first_doubt(trace) == count:
                return ids, trace
        raise AssertionError("twenty prompts in doubt: the judge's margins, or the model, are not what they were")

    def disagreements(self, trace: Trace, ids: Sequence[int], chunks: Sequence[int]) -> set[str]:
        """What the engine computes otherwise for the first ``sum(chunks)`` of ``ids``, given in steps."""
        run = MiniRun(self.assembly)
        poison(run.runner)
        count = self.assembly.capacity.sizes.pages
        pages = random.Random(self.runs).sample(range(count), count)
        self.runs += 1
        run.runner.set_pages([(0, place, page) for place, page in enumerate(pages)])
        found: set[str] = set()
        for size in chunks:
            rows = slice(run.length, run.length + size)
            record = run.step(list(ids[rows]))
            found |= self._step_disagreements(trace, record, run.logits(record), rows)
        text, pools = self.config.text_config, run.runner.pools
        for place, source in enumerate(text.kv_source_layer_ids):
            count = run.length // text.compress_ratios[source]
            if not close(pools.entries[place][pages].flatten(0, 1)[:count], trace.entries[source][:count]):
                found.add(f"entries {source}")
            if not close(pools.keys[place][pages].flatten(0, 1)[:count], trace.keys[source][:count]):
                found.add(f"keys {source}")
        return found

    def _step_disagreements(self, trace: Trace, record: Record, logits: Tensor, rows: slice) -> set[str]:
        text, found = self.config.text_config, set()
        if not close(logits, trace.logits[rows]):
            found.add("logits")
        features = torch.cat(record.features, 1) if record.features else logits[:, :0]
        if not close(features, trace.features[rows]):
            found.add("features")
        for layer in range(text.num_hidden_layers):
            if not close(record.streams[layer], trace.streams[layer][rows]):
                found.add(f"streams {layer}")
            if not close(record.pre[layer], trace.pre[layer][rows]):
                found.add(f"pre {layer}")
            if layer in trace.selected:
                entries = trace.selected[layer].shape[1]
                if not torch.equal(mask_of(record.selected[layer], entries), trace.selected[layer][rows]):
                    found.add(f"selected {layer}")
            if layer in trace.candidates:
                size, entries = text.candidate_block_size, trace.candidates[layer].shape[1]
                blocks = mask_of(record.candidates[layer], -(-entries // size)).repeat_interleave(size, 1)
                if not torch.equal(blocks[:, :entries], trace.candidates[layer][rows]):
                    found.add(f"candidates {layer}")
        return found


def poison(runner: Runner) -> None:
    """Nothing that an earlier request left behind may count."""
    pools = runner.pools
    for tensor in (*pools.rings, *pools.entries, *pools.keys, *pools.pending):
        tensor.fill_(torch.nan)
    pools.history.fill_(7)


def close(actual: Tensor, expected: Tensor) -> bool:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return not expected.numel() or bool((relative(actual, expected) < TOLERANCE).all())


def mask_of(chosen: Tensor | None, count: int) -> Tensor:
    """Indices ``[rows, k]``, -1 for none -> bool ``[rows, count]``; no index may come twice."""
    assert chosen is not None
    hits = torch.zeros(len(chosen), count + 1, dtype=torch.int64)
    hits.scatter_add_(1, torch.where(chosen < 0, count, chosen).long(), torch.ones_like(chosen, dtype=torch.int64))
    assert (hits[:, :count] <= 1).all()
    return hits[:, :count] > 0


def first_doubt(trace: Trace) -> int:
    """The first position where a decision is too near to call; the number of positions if there is none."""
    doubtful = torch.stack([(margin > 0) & (margin < DOUBT) for margin in trace.margins.values()]).any(0)
    return int(doubtful.nonzero()[0]) if doubtful.any() else len(doubtful)


def random_ids(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [0, *(source.randrange(512) for _ in range(count - 1))]


def random_chunks(source: random.Random, total: int) -> list[int]:
    chunks: list[int] = []
    while (rest := total - sum(chunks)) > 0:
        chunks.append(min(rest, source.choice((1, 1, 2, 3, 5, 7, 16, 31, 64))))
    return chunks


@pytest.mark.parametrize("name", CASES)
def test_any_shape_in_any_chunks(tmp_path: Path, report_count: ReportCount, name: str) -> None:
    model = JudgedModel(tmp_path / "model", small_config(**CASES[name]), seed=0)
    ids, trace = model.judged_prompt(TOKENS)
    chunkings = [[TOKENS], [1], [2], [3], random_chunks(random.Random(name), TOKENS)]
    for chunks in chunkings:
        assert model.disagreements(trace, ids, chunks) == set(), chunks
    report_count("rows of engine and judge compared", sum(map(sum, chunkings)))


@pytest.mark.parametrize("name", BATCHED)
def test_requests_side_by_side(tmp_path: Path, report_count: ReportCount, name: str) -> None:
    """Three requests advance by turns, in any order and any subset: each last row as if its request were alone."""
    source = random.Random(name)
    model = JudgedModel(tmp_path / "model", small_config(**CASES[name]), seed=0)
    prompts, traces = zip(*(model.judged_prompt(count, count) for count in (TOKENS, 70, 5)), strict=True)
    pool_sizes = PoolSizes(slots=3, pages=9, max_pages=3)
    runner = Runner(replace(model.assembly, capacity=replace(model.assembly.capacity, sizes=pool_sizes)))
    poison(runner)
    pages = source.sample(range(9), 9)
    runner.set_pages([(number // 3, number % 3, page) for number, page in enumerate(pages)])
    done, compared = [0, 0, 0], 0
    while unfinished := [slot for slot in range(3) if done[slot] < len(prompts[slot])]:
        slots = source.sample(unfinished, source.randint(1, len(unfinished)))
        sizes = [min(source.choice((1, 2, 3, 9, 30)), len(prompts[slot]) - done[slot]) for slot in slots]
        chunks = [
            Chunk(slot, done[slot], prompts[slot][done[slot] : done[slot] + size])
            for slot, size in zip(slots, sizes, strict=True)
        ]
        hidden = runner.run(chunks)
        logits = runner.logits(hidden, [sum(sizes[: place + 1]) - 1 for place in range(len(sizes))])
        for slot, size in zip(slots, sizes, strict=True):
            done[slot] += size
        last = torch.stack([traces[slot].logits[done[slot] - 1] for slot in slots])
        assert close(logits, last), (slots, sizes, done)
        compared += len(slots)
    report_count("last rows of batches compared with the judge", compared)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> JudgedModel:
    """Every feature bites: YaRN, Engram in the middle, candidates that exclude, entries of one and of two tokens."""
    path = tmp_path_factory.mktemp("everything") / "model"
    return JudgedModel(path, small_config(**CASES["fast rotation"]), seed=0)


def test_planted_errors_are_seen(everything: JudgedModel, report_count: ReportCount) -> None:
    ids, right = everything.judged_prompt(60)
    assert everything.disagreements(right, ids, [60]) == set()
    unseen = []
    for broken in BROKEN_JUDGES:
        wrong = broken(*everything.judge_arguments).forward(ids)
        if "logits" not in everything.disagreements(wrong, ids, [60]):
            unseen.append(broken.__name__)
    assert unseen == []
    report_count("planted errors told from the truth", len(BROKEN_JUDGES))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Changes for :func:`small_config`: any layers that the rules of sharing allow, and any sizes."""
    ratios: list[int] = []
    kv_sources: list[int] = []
    index_sources: list[int] = []
    for layer in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["window", "singles", "pairs", "select", "read"]))
        if role in ("singles", "pairs"):
            kv_sources.append(layer)
            index_sources.append(layer)
            ratios.append(1 if role == "singles" else 2)
        elif role == "window" or not kv_sources:
            ratios.append(0)
        else:
            ratios.append(ratios[kv_sources[-1]])
            if role == "select":
                index_sources.append(layer)
    layers = range(len(ratios))
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    experts = draw(st.integers(1, 5))
    stages = draw(st.integers(0, 1))
    return {
        "vision": draw(st.booleans()),
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(kv_sources),
        "index_source_layer_ids": tuple(index_sources),
        "candidate_source_layer_id": draw(st.sampled_from([None, *index_sources])),
        "candidate_topk_blocks": draw(st.integers(1, 6)),
        "candidate_block_size": draw(st.integers(1, 9)),
        "index_topk": draw(st.integers(1, 40)),
        "index_n_heads": draw(st.integers(1, 5)),
        "index_head_dim": draw(st.sampled_from([32, 64])),
        "sliding_window": draw(st.integers(1, 40)),
        "hc_mult": draw(st.integers(1, 5)),
        "hc_sinkhorn_iters": draw(st.integers(1, 20)),
        "hc_eps": draw(st.sampled_from([1e-6, 1e-3, 0.1])),
        "hidden_size": draw(st.sampled_from([32, 64, 96])),
        "head_dim": draw(st.sampled_from([32, 64])),
        "qk_rope_head_dim": draw(st.sampled_from([8, 16, 24, 32])),
        "num_attention_heads": heads,
        "o_groups": draw(st.sampled_from([groups for groups in (1, 2, 3, 4, 6) if heads % groups == 0])),
        "q_lora_rank": draw(st.sampled_from([32, 64])),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.sampled_from([32, 64])),
        "swiglu_limit": draw(st.sampled_from([0.05, 0.5, 10.0])),
        "rope_scaling": draw(st.sampled_from([YARN, replace(YARN, factor=16, original_max_position_embeddings=4096)])),
        "engram_layer_ids": tuple(sorted(draw(st.sets(st.sampled_from(layers), max_size=3)))),
        "engram_max_ngram_size": draw(st.integers(2, 5)),
        "engram_n_heads": draw(st.integers(1, 3)),
        "dspark_target_layer_ids": tuple(sorted(draw(st.sets(st.sampled_from(layers), min_size=stages)))),
        "num_nextn_predict_layers": stages,
    }


@pytest.mark.soak
def test_random_shapes(report_count: ReportCount) -> None:
    rows = 0

    @hypothesis.settings(max_examples=500, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    @hypothesis.given(shapes(), st.integers(0, 2**32), st.integers(1, TOKENS))
    def search(changes: dict[str, Any], seed: int, tokens: int) -> None:
        nonlocal rows
        ids = random_ids(seed, tokens)
        with tempfile.TemporaryDirectory() as folder:
            model = JudgedModel(Path(folder) / "model", small_config(**changes), seed)
            trace = model.judge(ids)
            sure = first_doubt(trace)
            hypothesis.assume(sure > 0)
            for chunks in ([sure], random_chunks(random.Random(seed), sure)):
                assert model.disagreements(trace, ids, chunks) == set(), chunks
                rows += sure

    search()
    report_count("rows of engine and judge compared, random shapes", rows)
