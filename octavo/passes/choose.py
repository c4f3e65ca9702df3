"""Pass 3: every operator call is directed to the backend that was chosen for it.

A backend is an overload of its operator, so from here on the graph says what runs. Values change where a backend gives
another dtype than the reference does (a sum over experts is F64 there and F32 elsewhere).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from octavo.passes.base import VALUE, Compilation, GraphError, PassContext, PassReport, backend_of, operator_of
from octavo.passes.propagate import computed, fake_mode_of


class Choose:
    name = "choose"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        pass

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        judged = 0
        counts: dict[str, int] = {}
        stale: set[Node] = set()
        with fake_mode_of(compilation), torch.no_grad():
            for node in compilation.calls():
                known = operator_of(node)
                if known is not None and not known.contract.collective:
                    judged += 1
                    name = context.backends.get(known.name, "reference")
                    counts[name] = counts.get(name, 0) + 1
                    if name not in known.backends:
                        raise GraphError(f"{known.name} has no backend {name}, only {list(known.backends)}", node)
                    backend = known.backends[name]
                    if context.device not in backend.devices:
                        raise GraphError(f"backend {name} of {known.name} does not run on {context.device}", node)
                    if not backend.like_reference:
                        stale.add(node)
                    node.target = backend.overload
                if node in stale or not stale.isdisjoint(node.all_input_nodes):
                    before, node.meta[VALUE] = node.meta[VALUE], computed(node)
                    if _signature(before) != _signature(node.meta[VALUE]):
                        stale.add(node)
        compilation.module.recompile()
        return PassReport(judged, notes=tuple(f"{count} calls of {name}" for name, count in sorted(counts.items())))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.calls():
            if operator_of(node) is not None:
                backend_of(node)


def _signature(value: object) -> list[tuple[torch.dtype, str]]:
    tensors = [value] if isinstance(value, torch.Tensor) else value
    assert isinstance(tensors, list | tuple)
    return [(tensor.dtype, str(tensor.shape)) for tensor in tensors]
