"""How an operator is registered, and the contract that the compiler reads instead of lists of names.

An operator is declared once: a plain PyTorch function (its *reference*, the CPU path and the judge of every other
backend), a fake implementation for tracing, and a :class:`Contract`. The function becomes ``torch.ops.octavo.NAME``
with a schema inferred from its annotations, and calling the resulting :class:`Operator` calls that overload.

Activations decide the numeric mode (design section 8): BF16 activations round at every point of spec/model.md 3.0
(modes ``reference`` and ``fast``), F32 activations round nowhere (mode ``plain``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar, cast

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", covariant=True)

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")


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
    """It moves rows between ranks: an instruction of its own, carried out by a communicator."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an operator."""

    name: str
    devices: frozenset[str]
    capturable: frozenset[str]
    """Devices on which a call may stand inside a captured graph (static shapes, no host synchronisation)."""


class Operator(Generic[Parameters, Result]):
    """A registered operator; call it like the function it was made from."""

    def __init__(
        self, reference: Callable[Parameters, Result], contract: Contract, mutates: tuple[str, ...], capturable: bool
    ) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.contract = contract
        self.mutates = frozenset(mutates)
        self.reference = reference
        devices = frozenset({"cpu", "cuda"})
        self.backends = (Backend("reference", devices, devices if capturable else frozenset()),)
        _LIBRARY.define(
            self.name + torch.library.infer_schema(reference, mutates_args=mutates), tags=(torch.Tag.pt2_compliant_tag,)
        )
        _LIBRARY.impl(self.name, reference, "CompositeExplicitAutograd")
        packet = getattr(torch.ops.octavo, self.name)
        self.overload: torch._ops.OpOverload = packet.default
        self._check_contract()

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return cast(Result, self.overload(*args, **kwargs))

    def reads_before_write(self, argument: str) -> bool:
        """Whether a pool is read as it was before this step's write."""
        return argument in self.contract.before_write

    def backend(self, name: str) -> Backend:
        """The backend called ``name``. Raises ValueError naming those there are."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise ValueError(f"octavo::{self.name} has no backend {name!r}, only {[b.name for b in self.backends]}")

    def fake(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Decorator: shape and dtype of the results without data. Results are contiguous, however arguments lie."""
        torch.library.register_fake(f"octavo::{self.name}", function, lib=_LIBRARY)
        return function

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
) -> Callable[[Callable[Parameters, Result]], Operator[Parameters, Result]]:
    """Register the decorated function as ``octavo::<its name>``.

    ``capturable`` says whether the reference has static shapes and never waits for the device; ``mutates`` names
    the arguments that it writes, ``before_write`` the pools that it reads as they were before the step.
    """

    def register(reference: Callable[Parameters, Result]) -> Operator[Parameters, Result]:
        registered = Operator(
            reference, Contract(arguments, results, source, frozenset(before_write), collective), mutates, capturable
        )
        OPERATORS[registered.name] = registered
        return registered

    return register


CARRIED = Returns(Gives.ROWS, DeadRows.CARRIED)
"""The common case: a function of each row."""
