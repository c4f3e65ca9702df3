"""Small models of any shape with random weights, written as checkpoints in the official layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.model.config import ModelConfig
from octavo.model.layout import expected_tensors
from octavo.model.presets import mini
from octavo.model.random_weights import fill_random
from octavo.model.shards import SINGLE_FILE, TORCH_DTYPES
from tests.judge import engram_primes
from tests.tokenizer_data import MINI

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "compress_ratios": (0, 2, 2, 1, 1, 1),
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3, 5),
    "candidate_source_layer_id": 3,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "n_routed_experts": 4,
    "engram_layer_ids": (1, 4),
    "engram_vocab_size": 31,
    "dspark_target_layer_ids": (),
    "num_nextn_predict_layers": 0,
}


def small_config(*, vision: bool = False, **changes: Any) -> ModelConfig:
    """The golden mini model cut down further, with ``changes`` to its text block.

    ``compress_ratios`` is given for the layers alone; the number of layers, the draft stages' ratios and the sizes of
    the Engram tables follow. The config is validated like that of a file.
    """
    base = mini()
    values = _SMALL | changes
    ratios = tuple(values["compress_ratios"])
    values["num_hidden_layers"] = len(ratios)
    values["compress_ratios"] = ratios + (0,) * values["num_nextn_predict_layers"]
    text = replace(base.text_config, **values)
    rows = tuple(sum(sum(heads) for heads in orders) for orders in engram_primes(text))
    config = replace(base, text_config=replace(text, engram_num_embeddings=rows))
    if not vision:
        config = replace(config, vision_config=None, image_token_id=None)
    return ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))


def write_random_checkpoint(path: Path, config: ModelConfig, seed: int) -> None:
    """One file of random weights, ``config.json`` and the mini tokenizer in the new directory ``path``."""
    path.mkdir(parents=True)
    expected = expected_tensors(config)
    tensors = {name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for name, spec in expected.items()}
    for name, tensor in tensors.items():
        if not name.endswith(".scale"):
            fill_random(name, tensor, tensors.get(name.removesuffix("weight") + "scale"), seed)
    stored = {"F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}
    views = {name: t.view(stored.get(expected[name].dtype, t.dtype)) for name, t in tensors.items()}
    save_file(views, path / SINGLE_FILE, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINI / name, path / name)
