"""Where a model comes from, as far as it can be known without torch: its files, name, configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from octavo.model.config import ModelConfig
from octavo.model.packaged import NANO, nano_path, packaged_file
from octavo.model.presets import cut_layers, preset
from octavo.runtime.config import EngineConfig
from octavo.runtime.tokenizer import Tokenizer


def checkpoint_path(config: EngineConfig) -> Path | None:
    """The checkpoint to read, octavo-nano unless one is named; None for random weights."""
    if config.weights == "random":
        return None
    return config.model if config.model is not None else nano_path()


def model_name(config: EngineConfig) -> str:
    """For people: the checkpoint's path, octavo-nano, or what the random weights are."""
    if config.weights == "random":
        return f"random {config.preset} weights (seed {config.weights_seed})"
    return str(config.model) if config.model is not None else NANO


def served_name(config: EngineConfig) -> str:
    """For clients: the checkpoint's folder, octavo-nano, or the preset of random weights."""
    if config.weights == "random":
        return config.preset or ""
    return config.model.resolve().name if config.model is not None else NANO


def model_config_of(config: EngineConfig) -> ModelConfig:
    """The checkpoint's configuration or the preset's, with ``--layers`` applied. Raises :class:`OctavoError`."""
    path = checkpoint_path(config)
    model_config = ModelConfig.from_path(path) if path is not None else preset(config.preset or "")
    return cut_layers(model_config, config.layers) if config.layers is not None else model_config


def tokenizer_of(config: EngineConfig, model_config: ModelConfig) -> Tokenizer:
    """The checkpoint's tokenizer, or the one that the preset stands for."""
    path = checkpoint_path(config)
    if path is not None:
        return Tokenizer.from_checkpoint(path, model_config)
    packaged = packaged_file(config.preset or "", "tokenizer.json").decode("utf-8")
    return Tokenizer(tokenizers.Tokenizer.from_str(packaged), model_config)
