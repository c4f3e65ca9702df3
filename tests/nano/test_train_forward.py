"""The training forward computes what the engine computes, with the engine's own modules.

Without rounding it equals mode ``plain``: both are F32 and sum in other orders, so log probabilities agree to 1e-4.
With rounding it follows mode ``reference``, on a checkpoint that it wrote itself. There, training does not round each
probability, mixing coefficient and partial sum where the engine does; a rounding that falls on the other side moves
later layers by a quantisation step. So logits agree to a few per cent and almost every best token is the same. An
operator that computes something else breaks both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import Engine, EngineConfig, SamplingParams
from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from octavo.model.token_classes import token_map
from octavo.runtime.tokenizer import Tokenizer
from tools.train_nano.attention import Step
from tools.train_nano.files import write_checkpoint
from tools.train_nano.formats import rounded as through_format
from tools.train_nano.forward import forward
from tools.train_nano.masters import Masters, stored_format
from tools.train_nano.rows import Numerics
from tools.train_nano.train import cut_down

LENGTH = 96
"""Tokens of a prompt: six windows, and more entries than are selected."""
PROMPTS = 8
"""Of two, the median distance is still a fifth off from sample to sample."""
PLAIN_TOLERANCE = 1e-4
"""Of log probabilities; rows in which a near tie of scores is decided otherwise may be ten times as far."""
REFERENCE_TOLERANCE = 0.1
"""Median distance of log probabilities, in units of their spread: random weights drift by 4 to 7 %
(spec/model.md 7)."""


def small_masters(dtype: torch.dtype = torch.float32) -> Masters:
    """The cut-down model away from its start: norms, sinks, biases and mixing coefficients all differ."""
    config = ModelConfig.from_path(nano_path())
    tokenizer = Tokenizer.from_checkpoint(nano_path(), config)
    masters = Masters(cut_down(config), token_map(tokenizer.backend, config.text_config), torch.device("cpu"), dtype)
    masters.initialise(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for master in masters.named().values():
            spread = 0.3 if master.dim() == 1 else 0.0
            master.add_(spread * torch.randn(master.shape, generator=generator))
        masters.model.head.weight.mul_(20)
    return masters


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nano")
    write_checkpoint(small_masters(), path, nano_path())
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[0, *rng.integers(3, 1900, LENGTH - 1).tolist()] for _ in range(PROMPTS)]


def engine_rows(checkpoint: Path, numerics: str, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Of every predicted prompt token: its log probability [n], and the likeliest id there [n]."""
    config = EngineConfig(model=checkpoint, device="cpu", numerics=numerics, graphs="off", kv_tokens=1024)  # type: ignore[arg-type]
    with Engine(config) as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=1))
    entries = [entry for result in results for entry in (result.prompt_logprobs or [])[1:]]
    assert len(entries) == PROMPTS * (LENGTH - 1)
    assert all(entry is not None for entry in entries)
    found = [(entry.logprob, entry.top[0][0]) for entry in entries if entry is not None]
    return torch.tensor([value for value, _ in found]), torch.tensor([best for _, best in found])


def training_rows(masters: Masters, prompts: list[list[int]], *, rounded: bool) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(prompts)
    numerics = Numerics(masters.dtype, weights=rounded, activations=rounded)
    wanted = torch.arange(ids.numel()).view(ids.shape)[:, :-1].flatten()
    with torch.no_grad():
        logits = forward(masters, Step(numerics, len(prompts), LENGTH, sparse=True), ids, wanted)
    logs = logits.log_softmax(1)
    return logs.gather(1, ids[:, 1:].flatten().unsqueeze(1)).squeeze(1), logits.argmax(1)


def stored_values(masters: Masters) -> Masters:
    """The masters after a trip through the checkpoint's formats."""
    with torch.no_grad():
        for name, master in masters.named().items():
            master.copy_(through_format(master, stored_format(name)))
    return masters


def test_without_rounding_it_is_plain(checkpoint: Path, prompts: list[list[int]]) -> None:
    expected, best = engine_rows(checkpoint, "plain", prompts)
    found, found_best = training_rows(stored_values(small_masters()), prompts, rounded=False)
    assert expected.std() > 0.5, "all rows alike would prove nothing"
    assert (found - expected).abs().median() < PLAIN_TOLERANCE
    assert (found - expected).abs().max() < 10 * PLAIN_TOLERANCE
    assert (found_best == best).float().mean() > 0.99


def test_with_rounding_it_follows_reference(checkpoint: Path, prompts: list[list[int]]) -> None:
    """Closer than half as far as without rounding, so that the rounding is the engine's and not just any."""
    expected, best = engine_rows(checkpoint, "reference", prompts)
    found, found_best = training_rows(small_masters(torch.bfloat16), prompts, rounded=True)
    plain, plain_best = training_rows(small_masters(torch.bfloat16), prompts, rounded=False)
    distance, plain_distance = ((x - expected).abs().median() for x in (found, plain))
    assert distance < REFERENCE_TOLERANCE * expected.std()
    assert distance < 0.5 * plain_distance
    agreement, plain_agreement = ((x == best).float().mean() for x in (found_best, plain_best))
    assert agreement > 0.8 > plain_agreement


def without_sink(masters: Masters) -> None:
    for layer in masters.model.body.layers:
        layer.attn.attn_sink.fill_(-1e4)


def with_plain_frequencies(masters: Masters) -> None:
    masters.model.body.yarn.copy_(masters.model.body.plain)


def with_one_entry_fewer(masters: Masters) -> None:
    for layer in masters.model.body.layers:
        if layer.plan.selects:
            layer.attn.indexer.top_k -= 1


def with_unmixed_streams(masters: Masters) -> None:
    for layer in masters.model.body.layers:
        layer.hc_attn_scale.zero_()


def with_a_biased_router(masters: Masters) -> None:
    for layer in masters.model.body.layers:
        layer.ffn.gate.bias.copy_(torch.linspace(0, 1, len(layer.ffn.gate.bias)))


@pytest.mark.parametrize(
    "break_it",
    [without_sink, with_plain_frequencies, with_one_entry_fewer, with_unmixed_streams, with_a_biased_router],
)
def test_a_difference_shows(checkpoint: Path, prompts: list[list[int]], break_it: Callable[[Masters], None]) -> None:
    """Each is far outside the tolerance of the comparison with ``plain``."""
    masters = stored_values(small_masters())
    right, _ = training_rows(masters, prompts, rounded=False)
    with torch.no_grad():
        break_it(masters)
    broken, _ = training_rows(masters, prompts, rounded=False)
    assert (broken - right).abs().median() > 10 * PLAIN_TOLERANCE
