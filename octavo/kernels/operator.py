"""How an operator is registered, and the contract that the compiler reads instead of lists of names.

An operator is declared once: a plain PyTorch function (its *reference*, the CPU path and the judge of every other
backend), a fake implementation for tracing, and a :class:`Contract`. The function becomes ``torch.ops.octavo.NAME``
with a schema inferred from its annotations, and calling the resulting :class:`Operator` calls that overload. Every
other backend is an overload of its own, ``torch.ops.octavo.NAME.BACKEND``: the compiler puts it in the place of the
reference, so a graph says what runs.

Activations decide the numeric mode (design section 8): BF16 activations round at every point of spec/model.md 3.0
(modes ``reference`` and ``fast``), F32 activations round nowhere (mode ``plain``). Backends decide between
``reference`` and ``fast``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, ParamSpec, Protocol, TypeVar, cast

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", covariant=True)

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
EVERYWHERE = frozenset({"cpu", "cuda"})
"""Devices of a backend in plain PyTorch."""


class Need(enum.Enum):
    """Which rows of an argument a call must be given, when rows are dealt over ranks."""

    ROWS = "rows"
    """This rank's rows suffice: row i of the result depends on row i alone."""
    EVERY = "every"
    """All rows, in any stated order."""
    ORDERED = "ordered"
    """All rows, in global order."""
    ANY = "any"
    """Not rows: weights, pools, tables; the same on every rank."""


class Gives(enum.Enum):
    """What rows a result holds."""

    ROWS = "rows"
    EVERY = "every"
    PARTIAL = "partial"
    """Every row, as one addend of a sum over ranks."""


class DeadRows(enum.Enum):
    """What a result holds on dead rows (padding)."""

    ZERO = "zero"
    MINUS_ONE = "minus one"
    CARRIED = "carried"
    """The row function of the dead input row; it can never reach a live row."""


@dataclass(frozen=True, slots=True)
class Returns:
    """One result: which rows it holds and what stands on the dead ones."""

    gives: Gives
    dead: DeadRows


@dataclass(frozen=True, slots=True)
class Contract:
    """What the passes may assume of an operator. ``arguments`` names every tensor argument of the schema."""

    arguments: Mapping[str, Need]
    results: tuple[Returns, ...]
    source: str
    """The section of spec/model.md that the operator implements."""
    before_write: frozenset[str] = frozenset()
    """Pools that it reads as they were before this step; every other pool it reads after they were written."""
    collective: bool = False
    """It moves rows between ranks, carried out by a communicator."""

    @property
    def partial(self) -> bool:
        """Whether a rank computes its part of a sum, with its part of the weights."""
        return any(result.gives is Gives.PARTIAL for result in self.results)

    def complete(self) -> Contract:
        """The same where every rank holds the weights of all. What a partial sum needs every row for is that each rank
        has other weights; with all of them, row i of the result depends on row i alone."""
        if not self.partial:
            return self
        arguments = {name: Need.ROWS if need is Need.EVERY else need for name, need in self.arguments.items()}
        results = tuple(Returns(Gives.ROWS, result.dead) for result in self.results)
        return dataclasses.replace(self, arguments=arguments, results=results)


class ModelWidths(Protocol):
    """Widths of a model, by the names of its official configuration: what a backend may find too narrow or too wide."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def hc_mult(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def index_n_heads(self) -> int: ...
    @property
    def index_head_dim(self) -> int: ...
    @property
    def index_topk(self) -> int: ...
    @property
    def candidate_topk_blocks(self) -> int: ...
    @property
    def candidate_block_size(self) -> int: ...


Refusal = Callable[[ModelWidths], str | None]
"""Why a backend cannot compute a model: what is wrong and what is allowed. None if it can."""

WeightRefusal = Callable[[Mapping[str, torch.Tensor]], str | None]
"""Why a backend cannot compute with weights, given by their official names: which tensor, what is wrong and what is
allowed. None if it can."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an operator."""

    name: str
    overload: torch._ops.OpOverload
    function: Callable[..., object]
    devices: frozenset[str]
    capturable: frozenset[str]
    """Devices on which a call may stand inside a captured graph (static shapes, no host synchronisation)."""
    compilable: bool
    """A compiler may fuse the function's insides: it writes no argument and waits for nothing. Its results are rounded
    where they are stored, whatever is fused before."""
    like_reference: bool
    """Shapes and dtypes of its results are the reference's."""
    refuses: Refusal
    """Asked when backends are chosen."""
    refuses_weights: WeightRefusal
    """Asked when the weights are on the device. It may wait for the device."""


class Operator(Generic[Parameters, Result]):
    """A registered operator; call it like the function it was made from."""

    def __init__(
        self,
        reference: Callable[Parameters, Result],
        contract: Contract,
        mutates: tuple[str, ...],
        capturable: bool,
        compilable: bool,
    ) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.contract = contract
        self.mutates = frozenset(mutates)
        self.reference = reference
        self.backends: dict[str, Backend] = {}
        """By name, ``reference`` first."""
        self._register("reference", "default", reference, EVERYWHERE, capturable, compilable, True)
        self.overload = self.backends["reference"].overload
        self._check_contract()

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return cast(Result, self.overload(*args, **kwargs))

    def reads_before_write(self, argument: str) -> bool:
        """Whether a pool is read as it was before this step's write."""
        return argument in self.contract.before_write

    def fake(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Decorator: shape and dtype of the results without data. Results are contiguous, however arguments lie."""
        self._fake = function
        torch.library.register_fake(f"octavo::{self.name}", function, lib=_LIBRARY)
        return function

    def implement(
        self,
        name: str,
        *,
        devices: frozenset[str] = EVERYWHERE,
        capturable: bool = True,
        compilable: bool = False,
        dtype: torch.dtype | None = None,
        refuses: Refusal = lambda widths: None,
        refuses_weights: WeightRefusal = lambda weights: None,
    ) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
        """Decorator: another backend, with the signature of the reference.

        ``capturable``, ``compilable``, ``refuses`` and ``refuses_weights`` as in :class:`Backend`, on all its devices.
        ``dtype`` is that of its one result where the reference gives another.
        """

        def fake(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            result = self._fake(*args, **kwargs)
            return result if dtype is None else cast(Result, cast(torch.Tensor, result).to(dtype))

        def register(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
            self._register(
                name, name, function, devices, capturable, compilable, dtype is None, refuses, refuses_weights
            )
            torch.library.register_fake(f"octavo::{self.name}.{name}", fake, lib=_LIBRARY)
            return function

        return register

    def _register(
        self,
        name: str,
        overload: str,
        function: Callable[Parameters, Result],
        devices: frozenset[str],
        capturable: bool,
        compilable: bool,
        like_reference: bool,
        refuses: Refusal = lambda widths: None,
        refuses_weights: WeightRefusal = lambda weights: None,
    ) -> None:
        """An overload of the operator that calls the function. Its schema is read from the function's annotations."""
        schema = torch.library.infer_schema(function, mutates_args=sorted(self.mutates))
        if self.backends:
            expected = str(self.overload._schema).partition("(")[2]
            assert schema == f"({expected}", f"octavo::{self.name}.{name}: {schema} instead of ({expected}"
        full = self.name if overload == "default" else f"{self.name}.{overload}"
        _LIBRARY.define(full + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(full, function, "CompositeExplicitAutograd")
        registered: torch._ops.OpOverload = getattr(getattr(torch.ops.octavo, self.name), overload)
        capturable_on = devices if capturable else frozenset()
        self.backends[name] = Backend(
            name, registered, function, devices, capturable_on, compilable, like_reference, refuses, refuses_weights
        )

    def _check_contract(self) -> None:
        """A contract that does not fit its schema is a programming error; it fails at import."""
        schema = self.overload._schema
        tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        assert tensors == set(self.contract.arguments), (
            f"octavo::{self.name}: tensor arguments {sorted(tensors)}, contract {sorted(self.contract.arguments)}"
        )
        assert len(schema.returns) == len(self.contract.results), (
            f"octavo::{self.name}: {len(schema.returns)} results, contract {len(self.contract.results)}"
        )


OPERATORS: dict[str, Operator[..., object]] = {}
"""Every operator by name; filled while ``octavo.kernels`` is imported, constant afterwards."""


def operator(
    *,
    arguments: Mapping[str, Need],
    results: tuple[Returns, ...],
    source: str,
    mutates: tuple[str, ...] = (),
    before_write: tuple[str, ...] = (),
    collective: bool = False,
    capturable: bool = True,
    compilable: bool = False,
) -> Callable[[Callable[Parameters, Result]], Operator[Parameters, Result]]:
    """Register the decorated function as ``octavo::<its name>``.

    ``capturable`` and ``compilable`` say so of the reference (see :class:`Backend`); ``mutates`` names the arguments
    that it writes, ``before_write`` the pools that it reads as they were before the step.
    """

    def register(reference: Callable[Parameters, Result]) -> Operator[Parameters, Result]:
        contract = Contract(arguments, results, source, frozenset(before_write), collective)
        registered = Operator(reference, contract, mutates, capturable, compilable)
        OPERATORS[registered.name] = registered
        return registered

    return register


CARRIED = Returns(Gives.ROWS, DeadRows.CARRIED)
"""The common case: a function of each row."""
