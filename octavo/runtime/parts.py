"""The three parts of a step as the compiler takes them: module, example inputs, and where each input comes from.

Examples give shapes, dtypes and devices; their values do not matter. Pools among them are the engine's own, which the
program will read and write where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.graphs.capture import EXAMPLE_ROWS
from octavo.model.body import Body
from octavo.model.config import TextConfig
from octavo.model.inputs import Output, Rows, State, Tokens
from octavo.model.prelude import Prelude
from octavo.model.weights import LinearF32
from octavo.passes.base import GraphInput, InputKind
from octavo.runtime.pools import Pools

_NO_REQUEST = frozenset({"ids", "slots", "positions", "starts", "write_slots", "write_positions", "write_starts"})
"""Fields whose dead rows hold -1; all others hold zero."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    module: nn.Module
    inputs: dict[str, Any]
    """Arguments of the module by name: tensors, or registered dataclasses of them."""
    restore: Callable[[Sequence[Tensor]], Any]
    """From the results in order to what the module returns."""


def classify(path: str) -> GraphInput:
    """Kind and dead rows of an input of any part, such as ``rows.slots``: see :mod:`octavo.model.inputs`."""
    owner, *fields = path.split(".")
    field = fields[0] if fields else owner
    fill = -1 if field in _NO_REQUEST else 0
    if owner in ("rows", "hidden"):
        return GraphInput(InputKind.ROWS, path, fill)
    if owner == "tokens" or field.startswith("write_"):
        return GraphInput(InputKind.WRITES, path, fill)
    return GraphInput(InputKind.POOL, path, fill)


def prelude_part(prelude: Prelude, pools: Pools) -> Part:
    """Tokens and history to rows. The pools lie where the model does."""
    device = pools.page_table.device
    tokens = Tokens(
        torch.zeros(EXAMPLE_ROWS, dtype=torch.int64, device=device),
        _integers(device),
        _integers(device),
        _integers(device),
        _flags(device),
        _flags(device),
    )
    return Part("prelude", prelude, {"tokens": tokens, "history": pools.history}, _rows)


def body_inputs(text: TextConfig, pools: Pools, dtype: torch.dtype) -> dict[str, Rows | State]:
    """``{"rows": Rows, "state": State}`` of example rows on the pools' device."""
    device = pools.page_table.device
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim

    def values(width: int) -> Tensor:
        return torch.zeros(EXAMPLE_ROWS, width, dtype=dtype, device=device)

    rows = Rows(
        values(text.hidden_size),
        _integers(device),
        _integers(device),
        _flags(device),
        _flags(device),
        [values(columns) for _ in text.engram_layer_ids],
    )
    return {"rows": rows, "state": pools.state(_integers(device), _integers(device), _integers(device))}


def body_part(body: Body, text: TextConfig, pools: Pools, dtype: torch.dtype) -> Part:
    """Rows and state to hidden rows and draft features."""
    inputs = body_inputs(text, pools, dtype)
    return Part("body", body, inputs, lambda results: Output(results[0], list(results[1:])))


def epilogue_part(head: LinearF32, text: TextConfig, dtype: torch.dtype, device: torch.device) -> Part:
    """Hidden rows that sample to logits. Its rows are requests, not tokens."""
    hidden = torch.zeros(EXAMPLE_ROWS, text.hidden_size, dtype=dtype, device=device)
    return Part("epilogue", head, {"hidden": hidden}, lambda results: results[0])


def _rows(results: Sequence[Tensor]) -> Rows:
    embeds, slots, positions, live, image, *engram = results
    return Rows(embeds, slots, positions, live, image, engram)


def _integers(device: torch.device) -> Tensor:
    return torch.zeros(EXAMPLE_ROWS, dtype=torch.int32, device=device)


def _flags(device: torch.device) -> Tensor:
    return torch.zeros(EXAMPLE_ROWS, dtype=torch.bool, device=device)
