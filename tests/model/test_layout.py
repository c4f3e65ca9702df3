"""The official layout: counts and bytes of the released model, the golden checkpoint, and other configurations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from safetensors import safe_open

from octavo.model.config import ModelConfig
from octavo.model.layout import TensorSpec, expected_tensors
from octavo.model.presets import mini, released
from tests.tokenizer_data import MINI


def altered(config: ModelConfig, **changes: Any) -> ModelConfig:
    """``config`` with other keys in ``text_config``, validated."""
    text = dataclasses.replace(config.text_config, **changes)
    return ModelConfig.from_dict(dataclasses.replace(config, text_config=text).to_dict())


def text_only(config: ModelConfig) -> ModelConfig:
    return ModelConfig.from_dict(dataclasses.replace(config, vision_config=None, image_token_id=None).to_dict())


def test_released_model() -> None:
    """The published inventory (spec/model.md 2)."""
    tensors = expected_tensors(released())
    assert len(tensors) == 96_085
    sizes: Counter[str] = Counter()
    for spec in tensors.values():
        sizes[spec.dtype] += spec.nbytes
    assert sizes == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }
    assert sizes.total() == 510_286_023_000
    assert sum(spec.parameters for spec in tensors.values()) == 763_205_315_794


def test_released_owners() -> None:
    tensors = expected_tensors(released())

    def layers_with(suffix: str) -> list[int]:
        return [layer for layer in range(40) if f"layers.{layer}.{suffix}" in tensors]

    assert layers_with("attn.compressor.wkv.weight") == [2, 8, 14, 20]
    assert layers_with("attn.compressor.wgate.weight") == [2, 8, 14]
    assert layers_with("attn.indexer.wq_b.scale") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers_with("attn.indexer.wk.weight") == [2, 8, 14, 20]
    assert layers_with("engram.embed.scale") == [1, 14]
    assert tensors["layers.3.ffn.experts.383.w2.weight"] == TensorSpec((5120, 1152), "I8")
    assert tensors["layers.3.ffn.experts.383.w2.scale"] == TensorSpec((5120, 72), "F8_E8M0")
    assert tensors["mtp.0.main_proj.scale"] == TensorSpec((160, 480), "F8_E8M0")
    assert "mtp.2.ffn.experts.128.w1.weight" not in tensors


def test_golden_checkpoint() -> None:
    stored = {}
    for file in sorted(MINI.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            for name in names:
                view = tensors.get_slice(name)
                stored[name] = TensorSpec(tuple(view.get_shape()), view.get_dtype())
    assert len(stored) == 1016
    assert expected_tensors(mini()) == stored


def test_text_only() -> None:
    every, text = expected_tensors(mini()), expected_tensors(text_only(mini()))
    gone = every.keys() - text.keys()
    assert text.items() <= every.items()
    assert {name.split(".")[0] for name in gone} == {
        *("vision", "aligner", "image_start", "image_end", "image_newline", "layers", "mtp")
    }
    assert all(name.endswith(".ffn.gate.bias_vl") for name in gone if name.startswith(("layers", "mtp")))
    assert sum(name.endswith(".ffn.gate.bias_vl") for name in gone) == 13


def test_no_drafts_and_one_draft() -> None:
    every = expected_tensors(mini())
    ratios = mini().text_config.compress_ratios
    none = expected_tensors(altered(mini(), num_nextn_predict_layers=0, compress_ratios=ratios[:10]))
    assert none == {name: spec for name, spec in every.items() if not name.startswith("mtp.")}
    one = expected_tensors(altered(mini(), num_nextn_predict_layers=1, compress_ratios=ratios[:11]))
    assert {"mtp.0.main_proj.weight", "mtp.0.norm.weight", "mtp.0.confidence_head.proj.weight"} <= one.keys()
    assert not any(name.startswith("mtp.1.") for name in one)


@pytest.mark.parametrize(("streams", "mixes"), [(2, 8), (4, 24), (8, 80)])
def test_streams(streams: int, mixes: int) -> None:
    tensors = expected_tensors(altered(mini(), hc_mult=streams))
    assert tensors["layers.0.hc_ffn_fn"].shape == (mixes, streams * 128)
    assert tensors["layers.0.hc_ffn_base"].shape == (mixes,)
    assert tensors["layers.1.engram.wkv.weight"].shape == ((streams + 1) * 128, 192)
    assert tensors["layers.1.engram.k_weight"].shape == (streams, 128)


def test_other_engram_layers() -> None:
    tensors = expected_tensors(altered(mini(), engram_layer_ids=(3,), engram_num_embeddings=(777,)))
    assert {name.split(".")[1] for name in tensors if ".engram." in name} == {"3"}
    assert tensors["layers.3.engram.embed.weight"].shape == (777, 32)
    assert tensors["layers.3.engram.embed.scale"].shape == (777, 1)
    none = expected_tensors(altered(mini(), engram_layer_ids=(), engram_num_embeddings=()))
    assert not any(".engram." in name for name in none)


def test_gate_needs_ratio_2_and_keys_need_a_kv_source() -> None:
    """All compressed layers at ratio 1 behind one KV source."""
    config = altered(
        mini(), compress_ratios=(0, 0, *[1] * 8, 0, 0, 0), kv_source_layer_ids=(2,), index_source_layer_ids=(2, 5, 6)
    )
    names = expected_tensors(config).keys()
    assert not any(".compressor.wgate." in name for name in names)
    assert {name.split(".")[1] for name in names if ".indexer.wk." in name} == {"2"}
    assert {name.split(".")[1] for name in names if ".indexer.wq_b.weight" in name} == {"2", "5", "6"}
