"""The model with F32 masters in place of stored weights, and where training starts from.

Modules and names stay the engine's (``octavo.model``); only the tensors differ: a quantised matrix is one F32 master of
its logical shape, its scales are empty until it is encoded.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from octavo.model.config import ModelConfig, TextConfig
from octavo.model.model import empty_model
from octavo.model.prelude import EngramTable, Prelude, empty_tables
from octavo.model.token_classes import pad_class
from octavo.model.weights import PackedExperts, TiledWeight
from tools.train_nano.formats import Format


class Learner(enum.Enum):
    """Who moves a master."""

    MUON = "muon"
    """Matrices between hidden activations."""
    ADAM = "adam"
    TABLE = "table"
    """Engram tables: rows that few tokens touch."""
    SCALAR = "scalar"
    """Norms, sinks, gates and mixing coefficients."""
    BALANCE = "balance"
    """The router's bias: moved by loads, never by a gradient."""


_TILED = re.compile(
    r".*\.(wq_a|wq_b|wo_a|wo_b)\.weight|.*\.attn\.wkv\.weight|.*\.engram\.wkv\.weight|.*shared_experts.*"
)
_MUON = re.compile(r".*\.(wq_a|wq_b|wo_a|wo_b|wkv|wgate|wk|w1|w2|w3)\.weight")
_F32 = re.compile(r".*\.(attn_sink|hc_(attn|ffn)_(fn|scale|base)|gate\.bias)")
_INDEXER = re.compile(r".*\.attn\.indexer\..*")
_SMALL_OUTPUT = 0.3
"""Gain of matrices that write into the streams: a layer starts as a small correction."""


def stored_format(name: str) -> Format:
    """How the official layout stores the master called ``name``."""
    if ".ffn.experts." in name:
        return Format.F4_ROWS
    if name.endswith(".engram.embed.weight"):
        return Format.F8_ROWS
    if _F32.fullmatch(name):
        return Format.F32
    return Format.TILES if _TILED.fullmatch(name) else Format.BF16


def learner(name: str) -> Learner:
    if name.endswith("gate.bias"):
        return Learner.BALANCE
    if name.endswith("engram.embed.weight"):
        return Learner.TABLE
    if _MUON.fullmatch(name):
        return Learner.MUON
    # Token embeddings learn slowly: Adam moves rows without a consistent gradient too, and look-ups match them.
    if name in ("embed.weight", "head.weight") or name.endswith(("gate.weight", "weights_proj.weight", "_fn")):
        return Learner.ADAM
    return Learner.SCALAR


class Masters(nn.Module):
    """Prelude, body and head of F32 masters on one device; ``named()`` knows them by official name."""

    def __init__(
        self, config: ModelConfig, classes: npt.NDArray[np.int64], device: torch.device, dtype: torch.dtype
    ) -> None:
        """``classes`` [V] int64: the Engram class of every token id (``octavo.model.token_classes``); ``dtype`` is that
        of activations."""
        super().__init__()
        text = config.text_config
        self.config = config
        self.model = empty_model(config, device)
        self.tables = nn.ModuleList(empty_tables(text, device, device))
        _promote(self.model, device)
        _promote(self.tables, device)
        ids = torch.from_numpy(classes).to(device)
        tables = cast("Sequence[EngramTable]", self.tables)
        self.prelude = Prelude(self.model.embed, tables, ids, pad_class(classes, text), dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.prelude.dtype

    def named(self) -> dict[str, nn.Parameter]:
        """Every master by official name; expert stacks carry the name without the expert number."""
        found = {
            name.removeprefix("body."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.numel()
        }
        for layer, table in zip(self.config.text_config.engram_layer_ids, self.prelude.tables, strict=True):
            found[f"layers.{layer}.engram.embed.weight"] = table.weight
        return found

    def indexer_ids(self) -> frozenset[int]:
        return frozenset(id(p) for name, p in self.named().items() if _INDEXER.fullmatch(name))

    @torch.no_grad()
    def initialise(self, seed: int, sink: float = 2.0) -> None:
        """Values from which training starts, the same on every device. ``sink`` is the logit of every sink."""
        generator = torch.Generator().manual_seed(seed)
        for name, master in self.named().items():
            master.copy_(_initial(name, master.shape, self.config.text_config, generator, sink))


def _promote(holder: nn.Module, device: torch.device) -> None:
    """Every stored parameter becomes an F32 master, uninitialised; scales become empty."""
    for module in holder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = list(parameter.shape)
            if isinstance(module, TiledWeight | PackedExperts | EngramTable):
                if name == "scale":
                    setattr(module, name, nn.Parameter(_no_scale(device), requires_grad=False))
                    continue
                if isinstance(module, PackedExperts):
                    shape[-1] *= 2
            setattr(module, name, nn.Parameter(torch.empty(shape, device=device)))


def _no_scale(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _initial(name: str, shape: torch.Size, text: TextConfig, generator: torch.Generator, sink: float) -> Tensor:
    def normal(spread: float) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    streams = text.hc_mult
    if name == "embed.weight":
        # All tokens share a direction: keys and queries that carry it can attend by distance alone from the start.
        return normal(0.5) + 0.4 * torch.randn(shape[1], generator=generator)
    if name == "head.weight":
        return normal(0.02)
    if name.endswith("engram.embed.weight"):
        return normal(0.7)
    if name.endswith(("_base",)):
        # Streams start apart, each read and written by every sublayer in its own measure, and mix slowly.
        comb = 2.0 * torch.eye(streams).flatten()
        return torch.cat((torch.randn(2 * streams, generator=generator) * 0.7, comb))
    if name.endswith("_scale"):
        return torch.full(shape, 0.2)
    if name.endswith("attn_sink"):
        return torch.full(shape, sink)  # so that looking nowhere is the easy thing, and looking somewhere is meant
    if name.endswith("gate.bias"):
        return torch.zeros(shape)
    if len(shape) == 1 or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    matrix = normal(shape[-1] ** -0.5)
    if name.endswith(("wo_b.weight", "w2.weight")):
        matrix *= _SMALL_OUTPUT
    return matrix
