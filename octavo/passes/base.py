"""What passes share: the compilation that they rewrite, the context they read, their reports and their errors.

A pass is a class with a unique name. It states what it requires and what it ensures, rewrites the compilation in place,
and reports what it matched. What it learns of a node it writes into ``node.meta`` under the keys below.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.kernels.collectives import Capturable
from octavo.kernels.operator import OPERATORS, Backend, Contract, Operator

VALUE = "val"
"""Meta key: the node's fake value, a tensor or a sequence of tensors."""
LAYER = "layer"
"""Meta key: the layer whose module made the node, or None."""
ROLE = "role"
"""Meta key: the path of the module within its layer."""
PLACEMENT = "placement"
"""Meta key: a :class:`Placement`, or a tuple of them for several results."""
PIECE = "piece"
"""Meta key: number of the piece that the node belongs to."""


class GraphError(AssertionError):
    """A graph that breaks a rule. It names the node, its layer and the rule; start-up ends with it."""

    def __init__(self, rule: str, node: Node | str | None = None, layer: int | None = None) -> None:
        if isinstance(node, Node):
            layer = node.meta.get(LAYER, layer)
        where = "" if node is None else f"{node}" + (f" (layer {layer})" if layer is not None else "") + ": "
        super().__init__(where + rule)


class InputKind(enum.Enum):
    """Where a graph input comes from."""

    WEIGHT = "weight"
    CONSTANT = "constant"
    ROWS = "rows"
    """This step's rows: sharded under context parallelism."""
    WRITES = "writes"
    """This step's write metadata: all rows in global order on every rank."""
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class GraphInput:
    kind: InputKind
    path: str
    """Name of the parameter, or path of the field in the inputs, such as ``state.rings.3``."""
    fill: float | int | bool = 0
    """What dead rows of a ROWS or WRITES input hold."""


class Placement(enum.Enum):
    """Which rows a value holds on a rank."""

    WHOLE = "whole"
    """Not rows."""
    REPLICATED = "replicated"
    """All rows in global order."""
    SHARDED = "sharded"
    RANK_MAJOR = "rank-major"
    """All rows, the ranks' shards one after another."""
    PARTIAL_REPLICATED = "partial, replicated"
    """All rows, as one addend of a sum over ranks."""
    PARTIAL_RANK_MAJOR = "partial, rank-major"


_NOT_ASKED = Capturable(False, "no ranks are there that could be asked whether theirs can be captured")


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a compilation is for."""

    ranks: int = 1
    sharded: bool = True
    """Rows are dealt over the ranks (prefill); else every rank has all rows and only expert sums move."""
    replicated_experts: bool = False
    """Every rank holds all experts, so that nothing moves for them; else each holds a part of them."""
    device: str = "cpu"
    backends: Mapping[str, str] = field(default_factory=dict)
    """Chosen backend of each operator; ``reference`` unless named."""
    collectives: Capturable = _NOT_ASKED
    """Whether collectives may stand in captured segments; else each is an instruction of its own."""
    capturable: frozenset[str] | None = None
    """Operators that a test declares capturable; None asks the backends."""


@dataclass(slots=True)
class PassReport:
    """What a pass did: nodes it judged, added and removed."""

    matched: int
    added: int = 0
    removed: int = 0
    notes: tuple[str, ...] = ()


@dataclass
class Compilation:
    """One graph on its way to a program."""

    module: GraphModule
    inputs: dict[str, GraphInput]
    """By placeholder name."""
    outputs: tuple[str, ...]
    """Paths of the results, in order."""
    pieces: list[Any] = field(default_factory=list)
    """Written by ``breaks`` (kinds and reasons), completed by ``split``."""
    buffers: dict[str, Any] = field(default_factory=dict)
    """Written by ``plan_buffers``: static buffers by value name."""
    instructions: list[Any] = field(default_factory=list)
    """Written by ``lower``."""

    @property
    def graph(self) -> torch.fx.Graph:
        return self.module.graph

    def calls(self) -> Iterator[Node]:
        """All nodes that compute."""
        return (node for node in self.graph.nodes if node.op == "call_function")


class Pass(Protocol):
    """One rewriting step."""

    name: str
    optional: bool
    """Whether judging no node is fine."""

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        """Raise :class:`GraphError` unless the pass may run."""
        ...

    def run(self, compilation: Compilation, context: PassContext) -> PassReport: ...

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        """Raise :class:`GraphError` unless the pass did its work."""
        ...


def operator_of(node: Node) -> Operator[..., object] | None:
    """The operator that a node calls, if it is one of ours."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace != "octavo":
        return None
    return OPERATORS.get(node.target._schema.name.removeprefix("octavo::"))


def calls_operator(node: Node, name: str) -> bool:
    """Whether a node calls the operator of this name, by whichever backend."""
    known = operator_of(node)
    return known is not None and known.name == name


def contract_of(known: Operator[..., object], context: PassContext) -> Contract:
    """What an operator asks for and gives where the context places the experts."""
    return known.contract.complete() if context.replicated_experts else known.contract


def backend_of(node: Node) -> Backend:
    """The backend that an operator call is directed to. Raises :class:`GraphError` if no backend has this overload."""
    known = operator_of(node)
    assert known is not None, f"{node} calls no operator"
    for backend in known.backends.values():
        if backend.overload is node.target:
            return backend
    raise GraphError(f"{node.target} is no backend of {known.name}", node)


def tensor_arguments(node: Node) -> Iterator[tuple[str, Node]]:
    """(schema name, node) of every tensor that an operator call is given; lists give their members."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    bound = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    for name, value in bound.items():
        for member in value if isinstance(value, list | tuple) else (value,):
            if isinstance(member, Node):
                yield name, member


def values_of(node: Node) -> tuple[Tensor, ...]:
    """The fake tensors of a node's results."""
    value = node.meta[VALUE]
    if isinstance(value, Tensor):
        return (value,)
    return tuple(value) if isinstance(value, tuple | list) else ()
