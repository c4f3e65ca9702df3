"""Regions: the nodes of a program whose insides a compiler may fuse, grouped into kinds, each traced once for all rows.

Every rounding point lies inside an operator, so hardly anything stands between operators; what is worth compiling is
the inside of one. A node whose backend says that it is ``compilable`` is a region. Its *kind* is its canonical text:
operator, backend, shapes and dtypes with the row extent as ``r``, and every other argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.fx.node import map_arg
from torch.utils._sympy.value_ranges import ValueRanges

from octavo.kernels.operator import Backend
from octavo.passes.base import LAYER, VALUE, GraphError, backend_of, operator_of, values_of
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction
from octavo.passes.split import canonical_text

Compilable = Callable[[Node], Backend | None]
"""The backend whose function may be compiled in a node's place, or None."""


@dataclass(slots=True)
class Region:
    """All nodes of one kind."""

    text: str
    backend: Backend
    nodes: list[Node] = field(default_factory=list)
    """One at least, equal in all that :attr:`text` says; once for every instruction that shares their module."""

    @property
    def name(self) -> str:
        """Operator and backend, such as ``rms_norm.torch``."""
        return f"{self.backend.overload._schema.name.removeprefix('octavo::')}.{self.backend.name}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def layer(self) -> int | None:
        """The first layer that has such a node."""
        return min((node.meta[LAYER] for node in self.nodes if node.meta.get(LAYER) is not None), default=None)


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as a graph of plain PyTorch operations: ``module(*inputs)`` gives a tuple of results."""

    module: GraphModule
    inputs: list[Tensor]
    """Fake, contiguous; the row extent is one symbol."""
    environment: ShapeEnv
    """Of that symbol alone. It has no guards yet; a compiler leaves here what it takes for granted."""

    @property
    def outputs(self) -> tuple[Node, ...]:
        """The nodes of the results, with their fake values."""
        (outputs,) = self.module.graph.output_node().args
        return cast(tuple[Node, ...], outputs)


def compilable_backend(node: Node) -> Backend | None:
    """The backend that a node is directed to, if a compiler may fuse its insides."""
    if operator_of(node) is None:
        return None
    backend = backend_of(node)
    return backend if backend.compilable else None


def find_regions(instructions: Iterable[Instruction], compilable: Compilable = compilable_backend) -> list[Region]:
    """The kinds of all regions in the segments of a program, in order of first appearance."""
    kinds: dict[str, Region] = {}
    for instruction in instructions:
        if instruction.kind is PieceKind.SEGMENT:
            for node in instruction.module.graph.nodes:
                backend = compilable(node)
                if backend is not None:
                    text = canonical_text([node], node.all_input_nodes, [node])
                    kinds.setdefault(text, Region(text, backend)).nodes.append(node)
    return list(kinds.values())


def trace_region(region: Region, largest_rows: int) -> Traced:
    """The function of a kind's backend with all arguments but its tensors bound; inputs as ``node.all_input_nodes``.

    See :func:`trace`. Raises :class:`GraphError` if a result is not what the graph says: then backend and fake
    implementation disagree.
    """
    node = region.nodes[0]
    operands = node.all_input_nodes

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        values = dict(zip(operands, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        result = region.backend.function(*args, **kwargs)
        return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]

    traced = trace(call, [operand.meta[VALUE] for operand in operands], largest_rows)
    found = ", ".join(describe(output.meta[VALUE]) for output in traced.outputs)
    expected = ", ".join(describe(value) for value in values_of(node))
    if found != expected:
        raise GraphError(f"{region.name} gives {found}, and its fake implementation {expected}", node)
    return traced


def trace(call: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], largest_rows: int) -> Traced:
    """Trace ``call(*examples)`` for 1 to ``largest_rows`` rows. Symbolic extents of the examples are rows.

    A function that reads data on the host or brings some from there, or whose shapes depend on data, raises. A branch
    on the number of rows leaves a guard, see :func:`check_guards`. One row is traced as any other number: an extent of
    one makes strides irrelevant, and nothing else.

    The graph has a ``ShapeEnv`` of its own: what a compiler assumes of it touches nothing else, and the symbol has one
    name in every kind, so that equal kinds of other models are found in the compiler's cache.
    """
    environment = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=environment)
    rows = _rows_symbol(mode, environment, largest_rows)

    def contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(result.contiguous() for result in call(*tensors))

    with torch.no_grad(), mode, enable_python_dispatcher():
        inputs = [
            torch.empty([_in_rows(extent, rows) for extent in value.shape], dtype=value.dtype, device=value.device)
            for value in examples
        ]
        traced = Traced(make_fx(contiguous)(*inputs), inputs, environment)
    if any(node.op == "get_attr" for node in traced.module.graph.nodes):
        raise ValueError("it makes a tensor from numbers of the host, which would be copied at every call")
    return traced


def check_guards(traced: Traced, largest_rows: int) -> None:
    """Raise ValueError unless what tracing and compiling took for granted holds for 2 to ``largest_rows`` rows.

    Nothing checks it when an artifact is called.
    """
    for guard in traced.environment.guards:
        for rows in (*range(2, min(largest_rows, 64)), largest_rows):
            if rows > 1 and not guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, rows)):
                raise ValueError(f"it holds only where {guard.expr}, and {rows} rows break that")


def describe(value: Tensor) -> str:
    """Dtype and extents, rows as ``r``, such as ``torch.bfloat16[r, 4, 128]``."""
    extents = []
    for factor, dynamic in map(_factor, value.shape):
        rows = "r" if factor == 1 else f"{factor}*r"
        extents.append(rows if dynamic else str(factor))
    return f"{value.dtype}[{', '.join(extents)}]"


def rows_of(value: Tensor) -> tuple[int, int] | None:
    """(axis, factor) of a fake tensor's first extent that counts rows: it is ``factor`` times their number."""
    for axis, extent in enumerate(value.shape):
        factor, dynamic = _factor(extent)
        if dynamic:
            return axis, factor
    return None


def _rows_symbol(mode: FakeTensorMode, environment: ShapeEnv, largest: int) -> int:
    """A ``SymInt``, which type checkers take for a number, of at least 2: torch fixes extents of 0 and 1.

    A symbol without a lower bound and an example (*unbacked*) would need no such bound, but Inductor of torch 2.11
    fuses nothing of unknown size.
    """
    from torch._dynamo.source import ConstantSource  # a second of importing, for those who compile alone

    largest = max(3, largest)  # a range of one number is that number
    bounds = StrictMinMaxConstraint(vr=ValueRanges(2, largest), warn_only=False)
    context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[bounds]
    )
    example = torch.empty(largest, dtype=torch.uint8)
    rows: Any = mode.from_tensor(example, source=ConstantSource("rows"), symbolic_context=context).shape[0]
    # Whether an index fits into 32 bits depends on the range. The key of Inductor's cache has no ranges, but it has
    # this; else an artifact for fewer rows would be found, and overflow.
    environment.var_to_hint_override[rows.node.expr] = largest
    return cast(int, rows)


def _in_rows(extent: int, rows: int) -> int:
    factor, dynamic = _factor(extent)
    return rows * factor if dynamic else factor


def _factor(extent: int | SymInt) -> tuple[int, bool]:
    """A fixed extent and False, or by how much a dynamic one is more than the rows and True."""
    if isinstance(extent, int):
        return extent, False
    factor, symbol = extent.node.expr.as_coeff_Mul()
    if not symbol.is_Symbol:
        raise GraphError(f"extent {extent} is no multiple of the rows")
    return int(factor), True
