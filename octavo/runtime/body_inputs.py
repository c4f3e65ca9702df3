"""What the compiler has to know of the body's inputs: where each comes from, what its dead rows hold, and examples."""

from __future__ import annotations

from typing import Any

import torch

from octavo.graphs.capture import EXAMPLE_ROWS
from octavo.model.config import TextConfig
from octavo.model.inputs import Rows
from octavo.passes.base import GraphInput, InputKind
from octavo.runtime.pools import Pools, PoolSizes, Storage

_NO_REQUEST = frozenset({"slots", "positions", "write_slots", "write_positions", "write_starts"})
"""Fields whose dead rows hold -1; all others hold zero."""


def classify(path: str) -> GraphInput:
    """Kind and dead rows of the input ``rows.FIELD`` or ``state.FIELD``, as in :mod:`octavo.model.inputs`."""
    owner, field = path.split(".")[:2]
    fill = -1 if field in _NO_REQUEST else 0
    if owner == "rows":
        return GraphInput(InputKind.ROWS, path, fill)
    return GraphInput(InputKind.WRITES if field.startswith("write_") else InputKind.POOL, path, fill)


def example_inputs(
    text: TextConfig, sizes: PoolSizes, storage: Storage, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """``{"rows": Rows, "state": State}`` to export the body with: shapes matter, values do not.

    Under a ``FakeTensorMode`` nothing is allocated.
    """
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim

    def integers() -> torch.Tensor:
        return torch.zeros(EXAMPLE_ROWS, dtype=torch.int32, device=device)

    def flags() -> torch.Tensor:
        return torch.zeros(EXAMPLE_ROWS, dtype=torch.bool, device=device)

    def values(width: int) -> torch.Tensor:
        return torch.zeros(EXAMPLE_ROWS, width, dtype=dtype, device=device)

    rows = Rows(
        values(text.hidden_size),
        integers(),
        integers(),
        flags(),
        flags(),
        [values(columns) for _ in text.engram_layer_ids],
    )
    state = Pools(text, sizes, storage, device).state(integers(), integers(), integers())
    return {"rows": rows, "state": state}
