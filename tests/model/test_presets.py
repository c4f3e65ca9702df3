"""Named configurations, and cutting layers off."""

from __future__ import annotations

import json

import pytest

from octavo.errors import UsageError
from octavo.model.engram_hash import engram_hashes
from octavo.model.layout import expected_tensors
from octavo.model.presets import PRESETS, cut_layers, gpu_slice, mini, preset, released, tiny
from tests.tokenizer_data import MINI, PUBLISHED


@pytest.mark.parametrize("name", PRESETS)
def test_engram_rows_follow_from_the_primes(name: str) -> None:
    """``engram_hashes`` refuses a table of another size."""
    text = preset(name).text_config
    assert tuple(entry.rows for entry in engram_hashes(text)) == text.engram_num_embeddings


def test_files_are_reproduced() -> None:
    for config, folder in ((mini(), MINI), (released(), PUBLISHED)):
        assert json.loads(json.dumps(config.to_dict())) == json.loads((folder / "config.json").read_text())


def test_tiny_is_mini_with_the_real_vocabulary() -> None:
    config, real, small = tiny(), released(), mini()
    for key in ("vocab_size", "engram_compressed_vocab_size", "dspark_noise_token_id"):
        assert getattr(config.text_config, key) == getattr(real.text_config, key)
    assert config.image_token_id == real.image_token_id
    for key in (
        "compress_ratios",
        "kv_source_layer_ids",
        "engram_layer_ids",
        "num_nextn_predict_layers",
        "hidden_size",
    ):
        assert getattr(config.text_config, key) == getattr(small.text_config, key)
    assert config.vision_config == small.vision_config
    assert sum(spec.nbytes for spec in expected_tensors(config).values()) < 90_000_000


def test_slice_has_small_engram_tables_only() -> None:
    cut, full = expected_tensors(gpu_slice()), expected_tensors(released())
    assert {name for name in full if cut[name] != full[name]} == {
        f"layers.{layer}.engram.embed.{part}" for layer in (1, 14) for part in ("weight", "scale")
    }
    tables = sum(spec.nbytes for name, spec in cut.items() if ".engram.embed." in name)
    assert 0.9e9 < tables < 1.1e9


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match="no preset 'huge'; there are tiny, mini, slice, released"):
        preset("huge")


@pytest.mark.parametrize("name", ["mini", "released"])
def test_cut_is_contained_in_the_whole(name: str) -> None:
    """Every length validates, and every tensor of the cut model is a tensor of the whole one, of the same shape."""
    whole = preset(name)
    tensors = expected_tensors(whole)
    layers = whole.text_config.num_hidden_layers
    assert cut_layers(whole, layers) == whole
    for count in range(1, layers) if name == "mini" else (1, 2, 3, 8, 14, 15, 20, 21, 39):
        config = cut_layers(whole, count)
        part = expected_tensors(config)
        assert part.items() <= tensors.items()
        assert f"layers.{count - 1}.attn.wkv.weight" in part
        assert not any(name.startswith(f"layers.{count}.") for name in part)
        text = config.text_config
        if count >= 3:
            assert text.dspark_target_layer_ids == (count - 3, count - 2, count - 1)
            assert text.num_nextn_predict_layers == 3
        else:
            assert text.num_nextn_predict_layers == 0
        engram_hashes(text)


def test_cut_drops_the_candidate_source_with_its_layer() -> None:
    assert cut_layers(released(), 21).text_config.candidate_source_layer_id == 20
    assert cut_layers(released(), 20).text_config.candidate_source_layer_id is None


@pytest.mark.parametrize("layers", [0, -1, 11])
def test_cut_outside_the_model(layers: int) -> None:
    with pytest.raises(UsageError, match=f"{layers} layers: the model has 10; choose 1 to 10"):
        cut_layers(mini(), layers)
