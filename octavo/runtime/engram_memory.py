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
from octavo.runtime.bus_memory import seen_from
from octavo.runtime.config import EngineConfig
from octavo.runtime.ranks.host_memory import shared_memory

EngramMemory = Literal["device", "host", "mmap"]


def choose_engram_memory(config: EngineConfig, device: torch.device) -> EngramMemory:
    """What ``auto`` means on a device; other names are what they say.

    A checkpoint's tables stay in its files for a CPU. A GPU would wait for the host at every step, so for it they are
    copied to memory that it reads by itself. Random tables have no file.
    """
    if config.engram != "auto":
        return config.engram
    if config.weights == "random":
        return "device"
    return "host" if device.type == "cuda" else "mmap"


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

    With ``host`` and several ranks all of them call it together; the tables may be read after the next collective. A
    GPU reads these over the bus, as if they were its own. ``progress(done, total)`` is called with bytes that are
    copied.
    """
    memory = choose_engram_memory(config, device)
    if memory == "mmap":
        assert checkpoint is not None, "the configuration maps tables and has no files"
        return engram_tables(text, [checkpoint.engram_table(layer) for layer in text.engram_layer_ids], device)
    if not text.engram_layer_ids:
        return []
    if memory == "device":
        tables, fills = empty_tables(text, device, device), True
        filled = [(table.weight.data, table.scale.data) for table in tables]
    else:
        whole, fills = shared_memory(table_bytes(text), config.ranks, writable=device.type == "cuda")
        filled = _cut(whole, text)
        seen = _cut(seen_from(device, whole), text) if device.type == "cuda" else filled
        tables = engram_tables(text, seen, device)
    named = dict(zip(text.engram_layer_ids, filled, strict=True))
    if fills and checkpoint is not None:
        load_engram_tables(named, checkpoint, progress)
    elif fills:
        for layer, (weight, scale) in named.items():
            fill_random(f"layers.{layer}.engram.embed.weight", weight, scale, config.weights_seed)
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
