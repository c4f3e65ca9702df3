"""From a module to a compilation that the passes can rewrite: export, and the source of every input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedKind
from torch.fx import GraphModule

from octavo.graphs.capture import capture
from octavo.passes.base import Compilation, GraphError, GraphInput, InputKind


def compilation_of(
    module: nn.Module,
    inputs: dict[str, Any],
    classify: Callable[[str], GraphInput],
) -> Compilation:
    """Export ``module(*inputs.values())`` and say where every input of the graph comes from.

    ``inputs`` are tensors or registered dataclasses by name; ``classify`` is given the path of each of their tensors,
    such as ``state.rings.3``, and tells its kind and what its dead rows hold. Tensors of kind ROWS and WRITES are
    dynamic.
    """
    leaves = dict(leaves_of(inputs))
    sources = {path: classify(path) for path in leaves}
    moving = [tensor for path, tensor in leaves.items() if sources[path].kind in (InputKind.ROWS, InputKind.WRITES)]
    program = capture(module, tuple(inputs.values()), moving)
    return Compilation(program.graph_module, _graph_inputs(program, list(sources.values())), _output_paths(program))


def copy_of(compilation: Compilation) -> Compilation:
    """One that passes may rewrite while the other stays as it is; values, weights and pools are shared."""
    module = GraphModule(nn.Module(), copy.deepcopy(compilation.graph))
    return Compilation(module, dict(compilation.inputs), compilation.outputs)


def input_names(compilation: Compilation) -> dict[str, str]:
    """Placeholder name of every input path."""
    return {entry.path: name for name, entry in compilation.inputs.items()}


def leaves_of(inputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in the arguments of a module, such as ``state.rings.3``."""
    found = []
    for name, value in inputs.items():
        for keys, tensor in pytree.tree_flatten_with_path(value)[0]:
            suffix = pytree.keystr(keys).replace("[", ".").replace("]", "")
            found.append((name + suffix, tensor))
    return found


def _graph_inputs(program: ExportedProgram, user_inputs: list[GraphInput]) -> dict[str, GraphInput]:
    kinds = {ExportedKind.PARAMETER: InputKind.WEIGHT, ExportedKind.BUFFER: InputKind.CONSTANT}
    users = iter(user_inputs)
    found: dict[str, GraphInput] = {}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is ExportedKind.USER_INPUT:
            found[name] = next(users)
        elif spec.kind in kinds and spec.target is not None:
            found[name] = GraphInput(kinds[spec.kind], spec.target)
        else:
            raise GraphError(f"input {name} of kind {spec.kind} is not expected")
    return found


def _output_paths(program: ExportedProgram) -> tuple[str, ...]:
    return tuple(str(spec.arg.name) for spec in program.graph_signature.output_specs)
