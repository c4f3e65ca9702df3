"""What an operator may not do on a device that records its launches: wait for it, or bring it something from the host.

Checked without a device: operations whose result or shape depends on data say so by a tag, a mask among the indices of
a write stands for ``nonzero``, and a constant made of Python numbers is a copy from the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_INDEXED = frozenset({_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default})
"""Tagged as if their shape depended on data, which is so for masks alone; writes are not even tagged."""
_FROM_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class WaitError(AssertionError):
    """An operation that a captured graph cannot hold."""


class NothingWaits(TorchDispatchMode):
    """While it is active, operations that would wait for a device raise :class:`WaitError`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if func in _INDEXED:
            waits = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            waits = func is _ATEN.lift_fresh.default or not _FROM_DATA.isdisjoint(func.tags)
        if waits:
            raise WaitError(f"{func} waits for the device or copies from the host")
        return func(*args, **(kwargs or {}))
