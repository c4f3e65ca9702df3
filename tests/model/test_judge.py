"""The judge itself is judged by the numbers of the official code (goldens mode fp32), and so is this comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.model.config import ModelConfig
from tests.broken_judges import BROKEN_JUDGES
from tests.judge import Judge, Trace, attend
from tests.judge_weights import dequantise, read_checkpoint
from tests.tokenizer_data import GOLDENS, MINI

TOLERANCE = 1e-5
"""Relative L2. The goldens are within 1e-6 of any fp64 run; the weakest feature of the model moves logits by 1e-3."""

PROMPTS = ("p1", "p37", "p96")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operations are so small here that threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def goldens() -> dict[str, Tensor]:
    return load_file(GOLDENS / "prefill_fp32.safetensors")


@pytest.fixture(scope="module")
def mini_model() -> tuple[ModelConfig, dict[str, Tensor], list[int]]:
    """Arguments of a judge of the golden checkpoint."""
    classes = np.load(MINI / "engram_token_map.npy").tolist()
    return ModelConfig.from_path(MINI), read_checkpoint(MINI), classes


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest relative L2 of a row; rows of zeros must be zeros."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return 0.0
    difference, size = (actual - expected).flatten(1).norm(dim=1), expected.double().flatten(1).norm(dim=1)
    return float(torch.where(difference == 0, 0.0, difference / size).max())


def values(trace: Trace) -> dict[str, Tensor]:
    """The trace under the names of the goldens: what is compared by relative L2."""
    named = {"logits": trace.logits, "main_hidden": trace.features}
    for layer in range(len(trace.streams)):
        named[f"X_in.{layer}"], named[f"X.{layer}"] = trace.layer_inputs[layer], trace.streams[layer]
        named[f"pre.{layer}"], named[f"window_kv.{layer}"] = trace.pre[layer], trace.latents[layer]
        for name in ("attn", "ffn"):
            named[f"{name}_in.{layer}"] = trace.sublayer_inputs[layer][name]
            named[f"{name}_out.{layer}"] = trace.sublayer_outputs[layer][name]
            for part, mix in zip(("pre", "post", "comb"), trace.mixes[layer][name], strict=True):
                named[f"hc.{layer}.{name}.{part}"] = mix
    for source, entries in trace.entries.items():
        named[f"compress_kv.{source}"], named[f"index_k.{source}"] = entries, trace.keys[source]
    for layer, gates in trace.gates.items():
        named[f"engram.{layer}.gate"], named[f"engram.{layer}.kv"] = gates, trace.engram_projection[layer]
    return named


def decisions(trace: Trace) -> dict[str, Tensor]:
    """What is compared exactly: masks over experts and entries, and integers."""
    named = {f"moe.{layer}.experts": chosen for layer, chosen in enumerate(trace.experts)}
    named |= {f"index.{layer}.selected": chosen for layer, chosen in trace.selected.items()}
    named |= {f"candidate.{layer}.mask": mask for layer, mask in trace.candidates.items()}
    return named | {f"engram.{layer}.hash_ids": rows for layer, rows in trace.hash_ids.items()}


def scores(trace: Trace) -> dict[str, Tensor]:
    """What is compared where it is finite, and must be infinite in the same places."""
    named = {f"index.{layer}.score": scores for layer, scores in trace.scores.items()}
    return named | {f"candidate.{layer}.block_score": scores for layer, scores in trace.block_scores.items()}


def as_mask(chosen: Tensor, width: int) -> Tensor:
    """Indices ``[t, k]``, -1 for none -> bool ``[t, width]``."""
    indices = chosen.long().view(-1, chosen.shape[-1])
    mask = torch.zeros(len(indices), width + 1, dtype=torch.bool)
    return mask.scatter(1, torch.where(indices < 0, width, indices), True)[:, :width]


def differences(trace: Trace, goldens: Mapping[str, Tensor], prompt: str) -> tuple[set[str], set[str]]:
    """Names of the goldens of ``prompt`` that the trace contradicts, and of those that were compared."""
    expected = {
        name.removeprefix(f"{prompt}."): golden for name, golden in goldens.items() if name.startswith(f"{prompt}.")
    }
    close = {
        name: relative(actual, expected[name]) < TOLERANCE for name, actual in values(trace).items() if name in expected
    }
    for name, actual in decisions(trace).items():
        if name in expected:
            indices = name.endswith(("experts", "selected"))
            mask = as_mask(expected[name], actual.shape[1]) if indices else expected[name]
            close[name] = torch.equal(actual, mask)
    for layer, weights in enumerate(trace.expert_weights):
        chosen, golden = (expected[f"moe.{layer}.{part}"].view(len(weights), -1) for part in ("experts", "weights"))
        spread = torch.zeros_like(weights).scatter(1, chosen.long(), golden.double())
        close[f"moe.{layer}.weights"] = relative(weights, spread) < TOLERANCE
    for name, actual in scores(trace).items():
        if name in expected:
            golden = expected[name].double()
            finite = golden.isfinite()
            close[name] = torch.equal(actual[~finite], golden[~finite]) and (
                relative(actual.where(finite, torch.zeros(())), golden.where(finite, torch.zeros(()))) < TOLERANCE
            )
    return {name for name, is_close in close.items() if not is_close}, set(close)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_official_numbers(
    mini_model: tuple[ModelConfig, dict[str, Tensor], list[int]], goldens: dict[str, Tensor], prompt: str
) -> None:
    trace = Judge(*mini_model).forward(goldens[f"{prompt}.input_ids"].tolist())
    different, compared = differences(trace, goldens, prompt)
    assert different == set()
    of_prompt = {name.removeprefix(f"{prompt}.") for name in goldens if name.startswith(f"{prompt}.")}
    rest = {name.split(".")[0] if "margin" not in name else "margin" for name in of_prompt - compared}
    assert rest <= {"input_ids", "margin", "ring", "pending"}, "all else must have been compared"


@pytest.mark.parametrize("broken", BROKEN_JUDGES, ids=lambda broken: broken.__name__)
def test_planted_errors_are_seen(
    mini_model: tuple[ModelConfig, dict[str, Tensor], list[int]], goldens: dict[str, Tensor], broken: type[Judge]
) -> None:
    trace = broken(*mini_model).forward(goldens["p96.input_ids"].tolist())
    different, _ = differences(trace, goldens, "p96")
    assert "logits" in different


def test_image_span(mini_model: tuple[ModelConfig, dict[str, Tensor], list[int]]) -> None:
    """Span positions route by ``bias_vl``, end n-grams and pass Engram unchanged."""
    image = load_file(GOLDENS / "image_fp32.safetensors")
    ids, span = image["input_ids"].tolist(), (image["token_types"] >= 0).tolist()
    trace = Judge(*mini_model).forward(ids, span, image["h0"])
    different, compared = differences(trace, {f"image.{name}": golden for name, golden in image.items()}, "image")
    assert different == set()
    assert {"logits", "X.9", "moe.9.experts", "engram.1.hash_ids", "engram.4.gate", "index.8.selected"} <= compared
    as_text = Judge(*mini_model).forward(ids, [False] * len(ids), image["h0"])
    assert not relative(as_text.logits, image["logits"]) < TOLERANCE


def test_attention_alone() -> None:
    """The exact softmax that the official kernel approximates: 150 places, few or no valid ones in some rows."""
    goldens = {name: golden.double() for name, golden in load_file(GOLDENS / "kernels.safetensors").items()}
    query, kv, sink = (goldens[f"sparse_attn.{name}"] for name in ("q", "kv", "sink"))
    selected = as_mask(goldens["sparse_attn.indices"], len(kv))
    assert (selected.sum(1) == (goldens["sparse_attn.indices"] >= 0).sum(1)).all(), "no index comes twice"
    out = attend(query, torch.zeros(len(query)), kv[:0], kv, selected, sink, window=1)
    # Both are fp64 sums of at most 100 terms.
    torch.testing.assert_close(out, goldens["sparse_attn.out_fp64"], rtol=1e-12, atol=1e-12)


def test_stored_bytes() -> None:
    """Ragged tiles, table rows and every packed byte, as the official code decodes them."""
    goldens = load_file(GOLDENS / "quantisers.safetensors")
    cases = {
        "dequant_tile": ("layers.0.attn.wkv", "codes"),
        "dequant_row": ("layers.1.engram.embed", "codes"),
        "dequant_fp4": ("layers.0.ffn.experts.0.w1", "packed"),
    }
    for case, (name, part) in cases.items():
        stored = {f"{name}.weight": goldens[f"{case}.{part}"], f"{name}.scale": goldens[f"{case}.scales"]}
        weights = dequantise(stored)
        assert list(weights) == [f"{name}.weight"]
        assert torch.equal(weights[f"{name}.weight"], goldens[f"{case}.expected"].double())
