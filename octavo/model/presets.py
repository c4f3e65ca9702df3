"""Named configurations, and the same configuration with fewer layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from octavo.errors import UsageError
from octavo.model.config import ModelConfig
from octavo.model.packaged import packaged_file


def released() -> ModelConfig:
    """DeepSeek-V4.1-Flash as published (spec/model.md 1.1)."""
    return _packaged("released")


def mini() -> ModelConfig:
    """The model of the golden numbers: every feature of the architecture in 5 MB, with 512 ids."""
    return _packaged("mini")


def tiny() -> ModelConfig:
    """``mini`` with the real vocabulary, tokenizer, special ids and Engram classes: about 85 MB as a checkpoint."""
    config, real = mini(), released()
    text = dataclasses.replace(
        config.text_config,
        vocab_size=real.text_config.vocab_size,
        engram_compressed_vocab_size=real.text_config.engram_compressed_vocab_size,
        engram_vocab_size=1000,
        engram_num_embeddings=(6126, 6332),
        engram_pad_token_id=real.text_config.engram_pad_token_id,
        dspark_noise_token_id=real.text_config.dspark_noise_token_id,
        dspark_markov_rank=16,
    )
    return _validated(
        dataclasses.replace(
            config,
            text_config=text,
            bos_token_id=real.bos_token_id,
            eos_token_id=real.eos_token_id,
            pad_token_id=real.pad_token_id,
            image_token_id=real.image_token_id,
        )
    )


def gpu_slice() -> ModelConfig:
    """``released`` with Engram tables of 1 GB in all instead of 197 GB.

    For random weights only: true shapes everywhere else, so one GPU can hold all layers with a share of the experts.
    """
    config = released()
    text = dataclasses.replace(
        config.text_config, engram_vocab_size=80_000, engram_num_embeddings=(1_923_902, 1_930_284)
    )
    return _validated(dataclasses.replace(config, text_config=text))


PRESETS: dict[str, Callable[[], ModelConfig]] = {"tiny": tiny, "mini": mini, "slice": gpu_slice, "released": released}


def preset(name: str) -> ModelConfig:
    """The configuration called ``name``. Raises :class:`UsageError` for a name that is not in :data:`PRESETS`."""
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()


def cut_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with its first ``layers`` layers; a checkpoint of ``config`` holds all of its tensors.

    Sources and Engram tables of later layers go. If draft targets go, the last layers take their place, as many as
    before, since ``mtp.0.main_proj`` has a column block for each; with too few layers for that, the draft stages go.
    Raises :class:`UsageError` unless ``1 <= layers <= num_hidden_layers``.
    """
    text = config.text_config
    if not 1 <= layers <= text.num_hidden_layers:
        raise UsageError(
            f"{layers} layers: the model has {text.num_hidden_layers}; choose 1 to {text.num_hidden_layers}"
        )
    targets, stages = text.dspark_target_layer_ids, text.num_nextn_predict_layers
    if any(target >= layers for target in targets):
        first = layers - len(targets)
        targets = tuple(range(first, layers)) if first >= 0 else ()
        stages = stages if targets else 0
    engram = [
        (i, rows) for i, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True) if i < layers
    ]
    candidate = text.candidate_source_layer_id
    cut = dataclasses.replace(
        text,
        num_hidden_layers=layers,
        compress_ratios=text.compress_ratios[:layers] + (0,) * stages,
        kv_source_layer_ids=tuple(i for i in text.kv_source_layer_ids if i < layers),
        index_source_layer_ids=tuple(i for i in text.index_source_layer_ids if i < layers),
        candidate_source_layer_id=candidate if candidate is not None and candidate < layers else None,
        engram_layer_ids=tuple(i for i, _ in engram),
        engram_num_embeddings=tuple(rows for _, rows in engram),
        num_nextn_predict_layers=stages,
        dspark_target_layer_ids=targets,
    )
    return _validated(dataclasses.replace(config, text_config=cut))


def _packaged(name: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads(packaged_file(name, "config.json")))


def _validated(config: ModelConfig) -> ModelConfig:
    """``dataclasses.replace`` does not check what the keys say of each other; parsing does."""
    return ModelConfig.from_dict(config.to_dict())
