"""Where the Engram tables lie: in the checkpoint's mapped files, in memory that the ranks of a host share, or on the
device of every rank (design section 6)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from octavo.model.checkpoint import Checkpoint
from octavo.model.config import SCALE_BLOCK, TextConfig
from octavo.model.loading import load_engram_tables
from octavo.model.prelude import EngramTable, empty_tables, engram_tables
from octavo.model.random_weights import fill_random
from octavo.runtime.config import EngineConfig
from octavo.runtime.ranks.host_memory import shared_memory

EngramMemory = Literal["device", "host", "mmap"]


def choose_engram_memory(config: EngineConfig) -> EngramMemory:
    """What ``auto`` means: the files where there are some, else the device; other names are what they say."""
    if config.engram != "auto":
        return config.engram
    return "mmap" if config.weights == "checkpoint" else "device"


def table_bytes(text: TextConfig) -> int:
    """Of all tables, with their scales."""
    return sum(text.engram_num_embeddings) * (text.engram_head_dim + text.engram_head_dim // SCALE_BLOCK)


def load_tables(
    config: EngineConfig,
    checkpoint: Checkpoint | None,
    text: TextConfig,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> list[EngramTable]:
    """The tables of all Engram layers, of the ``checkpoint`` or random, used from ``device``.

    With ``host`` and several ranks all of them call it together; the tables may be read after the next collective.
    ``progress(done, total)`` is called with bytes that are copied.
    """
    memory = choose_engram_memory(config)
    if memory == "mmap":
        assert checkpoint is not None, "the configuration maps tables and has no files"
        return engram_tables(text, [checkpoint.engram_table(layer) for layer in text.engram_layer_ids], device)
    if memory == "device":
        tables, fills = empty_tables(text, device, device), True
    elif text.engram_layer_ids:
        whole, fills = shared_memory(table_bytes(text), config.ranks)
        tables = engram_tables(text, _cut(whole, text), device)
    else:
        return []
    named = dict(zip(text.engram_layer_ids, tables, strict=True))
    if fills and checkpoint is not None:
        load_engram_tables({layer: (table.weight, table.scale) for layer, table in named.items()}, checkpoint, progress)
    elif fills:
        for layer, table in named.items():
            fill_random(f"layers.{layer}.engram.embed.weight", table.weight, table.scale, config.weights_seed)
    return tables


def _cut(whole: Tensor, text: TextConfig) -> list[tuple[Tensor, Tensor]]:
    """Weight [rows, width] E4M3 and scale [rows, width / 32] uint8 of every table, one after another."""
    width = text.engram_head_dim
    sizes = [(rows * width, rows * width // SCALE_BLOCK) for rows in text.engram_num_embeddings]
    parts = iter(whole.split(list(itertools.chain.from_iterable(sizes))))
    return [
        (weight.view(torch.float8_e4m3fn).view(-1, width), scale.view(-1, width // SCALE_BLOCK))
        for weight, scale in zip(parts, parts, strict=True)
    ]
