"""Pass 1: one form for all later passes. Overload targets, a fake value, a layer and a role on every node."""

from __future__ import annotations

import operator
import re

import torch
from torch.fx import Node

from octavo.passes.base import LAYER, ROLE, VALUE, Compilation, GraphError, InputKind, PassContext, PassReport


class Normalise:
    name = "normalise"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        names = {node.name for node in compilation.graph.nodes if node.op == "placeholder"}
        if names != set(compilation.inputs):
            raise GraphError(f"inputs without a source: {sorted(names ^ set(compilation.inputs))}")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        matched = removed = 0
        for node in list(compilation.graph.nodes):
            matched += 1
            node.meta[LAYER], node.meta[ROLE] = origin(node, compilation)
            unused = node.op == "placeholder" and not node.users
            if unused and compilation.inputs[node.name].kind is InputKind.CONSTANT:
                del compilation.inputs[node.name]
                compilation.graph.erase_node(node)
                removed += 1
        compilation.module.recompile()
        return PassReport(matched, removed=removed)

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise GraphError(f"{node.op} nodes are not expected in an exported graph", node)
            if node.op == "call_function":
                if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
                    raise GraphError(f"target {node.target} is no operator overload", node)
                if VALUE not in node.meta:
                    raise GraphError("no fake value", node)


def origin(node: Node, compilation: Compilation) -> tuple[int | None, str]:
    """Layer and module path of a node: parameters by their name, calls by the module that made them."""
    if node.op == "placeholder":
        path = compilation.inputs[node.name].path
    else:
        stack = [str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values()]
        path = stack[-1] if stack else ""
    match = re.search(r"\blayers\.(\d+)\.?(.*)", path)
    return (int(match[1]), match[2]) if match else (None, path)
