"""Checkpoints of random weights: complete, repeatable, small, and never in place of another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
import torch

from octavo.errors import UsageError
from octavo.model.checkpoint import Checkpoint
from octavo.model.initialise import init_checkpoint
from octavo.model.loading import load_parameters
from octavo.model.presets import preset
from octavo.model.random_weights import fill_random, randomise
from octavo.model.token_classes import token_map
from tests.checkpoint_files import parameter_tensors
from tests.tokenizer_data import MINI, published_json

FILES = {
    *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
}


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "deep" / "tiny"
    init_checkpoint("tiny", path, seed=0)
    return path


def test_tiny_is_complete_and_small(tiny: Path) -> None:
    assert set(digests(tiny)) == FILES
    checkpoint = Checkpoint(tiny)
    checkpoint.check()
    assert checkpoint.config == preset("tiny")
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 100_000_000


def test_tiny_has_the_published_tokenizer(tiny: Path) -> None:
    """Its classes are checked against the config by ``token_map``."""
    assert (tiny / "tokenizer.json").read_text(encoding="utf-8") == published_json()
    text = preset("tiny").text_config
    assert len(token_map(tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json")), text)) == text.vocab_size


def test_mini_is_like_the_golden_checkpoint(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    config = init_checkpoint("mini", tmp_path, seed=3, progress=lambda done, total: calls.append((done, total)))
    Checkpoint(tmp_path).check()
    assert config == preset("mini")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (MINI / name).read_bytes()
    mine, golden = (json.loads((path / "model.safetensors.index.json").read_text()) for path in (tmp_path, MINI))
    assert mine["metadata"] == golden["metadata"]
    assert mine["weight_map"].keys() == golden["weight_map"].keys()
    assert len(calls) == 1016
    assert calls[-1] == (4_798_628, 4_798_628)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_checkpoint("mini", tmp_path / name, seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    differing = {name for name, value in digests(tmp_path / "a").items() if value != digests(tmp_path / "c")[name]}
    assert differing == {name for name in FILES if name.startswith("model-")}


def test_randomise_equals_a_checkpoint_of_that_seed(tmp_path: Path) -> None:
    """Parameters filled in place hold what they would load, for some experts as for all."""
    config = init_checkpoint("mini", tmp_path, seed=7)
    checkpoint = Checkpoint(tmp_path)
    experts, draft_experts = range(3, 6), range(1, 2)
    loaded, drawn = (parameter_tensors(config, lambda name: True, experts, draft_experts) for _ in range(2))
    loaded["head.weight"], drawn["head.weight"] = torch.empty(512, 128), torch.empty(512, 128)
    load_parameters(loaded, checkpoint, experts=experts, draft_experts=draft_experts)
    randomise(drawn, 7, experts=experts, draft_experts=draft_experts)
    assert len(loaded) == 1016 - 4 - (10 * 8 + 3 * 4) * 6 + 13 * 6
    for name, tensor in loaded.items():
        assert torch.equal(tensor.view(torch.uint8), drawn[name].view(torch.uint8)), name
    weight, scale = checkpoint.engram_table(4)
    table, table_scale = torch.empty(864, 32, dtype=torch.float8_e4m3fn), torch.empty(864, 1, dtype=torch.uint8)
    fill_random("layers.4.engram.embed.weight", table, table_scale, 7)
    assert torch.equal(table.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(table_scale, scale)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00009.safetensors", "model.safetensors.index.json"])
def test_a_checkpoint_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"already holds {name}"):
        init_checkpoint("mini", tmp_path, seed=0)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_other_files_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("notes")
    init_checkpoint("mini", tmp_path, seed=0)
    Checkpoint(tmp_path).check()


def test_path_that_is_or_lies_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="no directory can be made there"):
            init_checkpoint("mini", path, seed=0)


def test_directory_without_write_permission() -> None:
    """/proc refuses new directories, whoever asks."""
    with pytest.raises(UsageError, match="no directory can be made there"):
        init_checkpoint("mini", Path("/proc/octavo/mini"), seed=0)


def test_presets_for_memory_only(tmp_path: Path) -> None:
    for name, size in (("released", 510), ("slice", 309)):
        with pytest.raises(UsageError, match=f"preset '{name}' is {size} GB, too large to write; choose tiny or mini"):
            init_checkpoint(name, tmp_path / name, seed=0)
        assert not (tmp_path / name).exists()
