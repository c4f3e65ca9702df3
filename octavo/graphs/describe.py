"""A graph in words of its own: what people read and diffs compare.

Names that torch makes up, of values and of symbols, depend on its version and on every earlier edit. So values are
named here by layer and operator (``L3.mhc_mix.2``: the second ``mhc_mix`` of layer 3), inputs by their path, and the
one dynamic extent, the rows on a rank, is ``r``. Inserting a node renames no other one. Unpacking of results is no node
here: it is written ``L3.mhc_mix[1]``.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from octavo.passes.base import LAYER, PIECE, PLACEMENT, ROLE, VALUE, Compilation, Placement, values_of
from octavo.passes.normalise import origin

WIDTH = 110
"""Longest line of a text that is broken at its arguments."""
_PROBES = (16, 48, 80)
"""Row counts at which an extent is evaluated to learn how it depends on them."""


@dataclass(frozen=True, slots=True)
class NodeText:
    """One node in words."""

    name: str
    operation: str
    """Operator, or the kind of an input: weight, constant, rows, writes, pool."""
    arguments: tuple[str, ...]
    shapes: str
    layer: int | None
    """Of the name; a pass may not have written it yet."""
    notes: tuple[tuple[str, str], ...]
    """What passes have written: layer, role, placement, piece."""

    def lines(self) -> list[str]:
        """The call in one line, or one line per argument if it is long."""
        head = f"{self.name} = {self.operation}("
        tail = f") -> {self.shapes}"
        joined = head + ", ".join(self.arguments) + tail
        if len(joined) <= WIDTH:
            return [joined]
        return [head, *(f"    {argument}," for argument in self.arguments), tail]


@dataclass(frozen=True, slots=True)
class GraphText:
    """A whole graph in words: inputs, calls in order, results."""

    inputs: tuple[NodeText, ...]
    calls: tuple[NodeText, ...]
    results: tuple[str, ...]
    names: dict[str, str]
    """Our name by torch's name of the node."""

    @property
    def nodes(self) -> tuple[NodeText, ...]:
        return (*self.inputs, *self.calls)

    def canonical(self) -> list[str]:
        """What is computed, without the notes of passes: equal lines, equal computation."""
        lines = [f"{node.name}: {node.operation} {node.shapes}" for node in self.inputs]
        for node in self.calls:
            lines += node.lines()
        return [*lines, f"return {', '.join(self.results)}"]

    def annotated(self) -> list[str]:
        """The same for reading: under layer headings, with the notes."""
        width = max((len(node.name) for node in self.inputs), default=0)
        lines = ["inputs"]
        lines += [f"  {n.name:<{width}}  {n.operation:<8}  {n.shapes}{_comment(n)}" for n in self.inputs]
        layer: int | str | None = "start"
        for node in self.calls:
            if node.layer != layer:
                layer = node.layer
                lines += ["", "outside of layers" if layer is None else f"layer {layer}"]
            own = node.lines()
            lines += [f"  {line}" for line in own[:-1]]
            lines.append(f"  {own[-1]}{_comment(node)}")
        return [*lines, "", f"return {', '.join(self.results)}"]


def describe(compilation: Compilation) -> GraphText:
    """The compilation's graph as it stands now, after any pass or before the first."""
    names = value_names(compilation)
    inputs, calls = [], []
    for node in compilation.graph.nodes:
        layer = origin(node, compilation)[0] if LAYER not in node.meta else node.meta[LAYER]
        if node.op == "placeholder":
            kind = compilation.inputs[node.name].kind.value
            inputs.append(NodeText(names[node.name], kind, (), shapes_of(node), layer, _notes(node)))
        elif node.op == "call_function" and node.target is not operator.getitem:
            arguments = tuple(arguments_of(node, names))
            text = NodeText(names[node.name], operation_of(node), arguments, shapes_of(node), layer, _notes(node))
            calls.append(text)
    results = tuple(names[node.name] for node in compilation.graph.output_node().all_input_nodes)
    return GraphText(tuple(inputs), tuple(calls), results, names)


def value_names(compilation: Compilation) -> dict[str, str]:
    """Our name of every value, by torch's name of its node."""
    seen: Counter[str] = Counter()
    names: dict[str, str] = {}
    for node in compilation.graph.nodes:
        if node.op == "placeholder":
            names[node.name] = compilation.inputs[node.name].path
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            names[node.name] = f"{names[source.name]}[{index}]"
        elif node.op == "call_function":
            layer = node.meta[LAYER] if LAYER in node.meta else origin(node, compilation)[0]
            stem = ("step" if layer is None else f"L{layer}") + f".{operation_of(node)}"
            seen[stem] += 1
            names[node.name] = stem if seen[stem] == 1 else f"{stem}.{seen[stem]}"
    return names


def operation_of(node: Node) -> str:
    """The operator that a node calls, without namespace and overload."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node} calls {node.target}, which is no overload"
    return node.target._schema.name.partition("::")[2]


def arguments_of(node: Node, names: dict[str, str]) -> Iterable[str]:
    """``latents=L3.window_latent`` and so on, by the names of the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = [argument.name for argument in node.target._schema.arguments]
    for name, value in (dict(zip(schema, node.args, strict=False)) | dict(node.kwargs)).items():
        yield f"{name}={_literal(value, names)}"


def _literal(value: Any, names: dict[str, str]) -> str:
    if isinstance(value, Node):
        return names[value.name]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(member, names) for member in value)}]"
    return repr(value)


def shapes_of(node: Node) -> str:
    """``bf16[r, 64]``, several in one line; ``nothing`` of a call that only writes; ``?`` before it is known."""
    if node.meta[VALUE] is None and node.users:
        return "?"
    return ", ".join(shape_of(value) for value in values_of(node)) or "nothing"


def shape_of(value: Tensor) -> str:
    return f"{dtype_name(value.dtype)}[{', '.join(extent_of(extent) for extent in value.shape)}]"


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``f32``, ``i32`` and so on."""
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")


def extent_of(extent: int | torch.SymInt) -> str:
    """A number, or a multiple of ``r``, however torch writes it."""
    if isinstance(extent, int):
        return str(extent)
    expression = extent.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) != 1:
        return str(expression)
    values = [int(expression.subs(symbols[0], rows)) for rows in _PROBES]
    factor = values[0] // _PROBES[0]
    if any(value != factor * rows for value, rows in zip(values, _PROBES, strict=True)):
        return str(expression).replace(str(symbols[0]), "r")
    return "r" if factor == 1 else f"{factor}*r"


def _notes(node: Node) -> tuple[tuple[str, str], ...]:
    notes = []
    if LAYER in node.meta:
        layer = node.meta[LAYER]
        notes += [("layer", "none" if layer is None else str(layer)), ("role", node.meta[ROLE] or "itself")]
    if PLACEMENT in node.meta:
        placement = node.meta[PLACEMENT]
        several = (placement,) if isinstance(placement, Placement) else placement
        notes.append(("placement", ", ".join(dict.fromkeys(each.value for each in several)) or "none"))
    if PIECE in node.meta:
        notes.append(("piece", str(node.meta[PIECE])))
    return tuple(notes)


def _comment(node: NodeText) -> str:
    """The notes that a reader cannot see from the place of the line."""
    seen = ("layer",) if node.arguments else ("layer", "role")  # an input's path says both
    shown = [f"{key} {value}" for key, value in node.notes if key not in seen and value not in ("none", "itself")]
    return f"    # {'; '.join(shown)}" if shown else ""
