"""From a module to one FX graph: ``torch.export`` of the body with a dynamic number of rows.

Non-strict export gives overload targets, parameters lifted by name, a fake value on every node and mutation kept in
place (spec/graphs.md 3.1). The row dimension is captured well inside its range: an example of one row would be
specialised silently.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

EXAMPLE_ROWS = 16
"""Rows of the example that is traced. Any other extent of an input must differ from it only by being static."""
MAX_ROWS = 1 << 20


def capture(module: nn.Module, inputs: tuple[Any, ...], row_tensors: list[Tensor]) -> ExportedProgram:
    """Export ``module(*inputs)`` as one graph in which dimension 0 of every tensor in ``row_tensors`` is dynamic.

    ``inputs`` are registered dataclasses of tensors, real or fake (then all of one ``FakeTensorMode``, the
    parameters included). A branch on data, or a row count read from a shape, fails the export.
    """
    leaves = {id(leaf) for leaf in pytree.tree_leaves(inputs)}
    assert all(id(tensor) in leaves for tensor in row_tensors), "a row tensor is not among the inputs"
    assert all(tensor.shape[0] == EXAMPLE_ROWS for tensor in row_tensors), f"examples have {EXAMPLE_ROWS} rows"
    rows = Dim("rows", min=1, max=MAX_ROWS)
    shapes = ShapesCollection()
    for tensor in row_tensors:
        shapes[tensor] = {0: rows}
    with torch.no_grad():
        dynamic = shapes.dynamic_shapes(module, inputs)
        return torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
