"""The memory of a step: the peak that the graph foretells is what an eager run holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.graphs.compile import input_names
from octavo.graphs.footprint import buffer_bytes, peak_bytes
from octavo.graphs.program import Program
from tests.passes.compiled import CPU, batch, compiled, new_pools, resident_tensors


@pytest.mark.parametrize("rows", [21, 60])
def test_peak_is_that_of_an_eager_run(rows: int) -> None:
    """What operators made and somebody still held, weighed after each of them. The step's inputs, which the caller of
    this run holds from first to last, are all that lies between the two numbers.
    """
    compilation = compiled()
    program = Program(compilation, resident_tensors(0, 1, new_pools()), (64,), CPU)
    names = input_names(compilation)
    values = {names[path]: value for path, value in batch([rows]).values(0, 1, True).items()}
    with torch.no_grad(), Weighing() as weighing:
        program.run_eager(values)
    inputs = storage_bytes([value.clone() for value in values.values()])
    assert weighing.most <= peak_bytes(compilation, rows) <= weighing.most + inputs < 2 * weighing.most


def storage_bytes(values: list[object]) -> int:
    """Bytes of the distinct storages behind tensors and tuples of them."""
    found = {}
    for value in values:
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def test_buffers_are_what_a_program_allocates() -> None:
    for ranks in (1, 4):
        compilation = compiled(ranks)
        program = Program(compilation, resident_tensors(0, ranks, new_pools()), (8, 24), CPU)
        assert buffer_bytes(compilation, 24) == program.buffer_bytes > 0


class Weighing(TorchDispatchMode):
    """Most bytes of operators' results that were held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        alive = [tensor for made in self._made if (tensor := made()) is not None]
        self.most = max(self.most, storage_bytes(list(alive)))
        return result
