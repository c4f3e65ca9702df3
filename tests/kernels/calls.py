"""Calling operators on rows of a case, and comparing what they give to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.operator import Need, Operator
from tests.kernels.cases import Arguments

_ROWS = frozenset({Need.ROWS, Need.EVERY, Need.ORDERED})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call gave: its results, and its mutated arguments as it left them."""

    results: tuple[Tensor, ...]
    state: dict[str, Tensor]


def call(operator: Operator[..., object], arguments: Arguments) -> Outcome:
    """Call through the registered overload. ``arguments`` keep their values: what the operator mutates is cloned."""
    state = {name: arguments[name].clone() for name in mutated(operator) if arguments[name] is not None}
    given = operator(**{**arguments, **state})
    results = given if isinstance(given, tuple) else () if given is None else (given,)
    return Outcome(results, state)


def mutated(operator: Operator[..., object]) -> list[str]:
    """Names of the arguments that the schema says are written."""
    schema = operator.overload._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def row_arguments(operator: Operator[..., object], arguments: Arguments) -> list[str]:
    """Names of the given tensor arguments whose first dimension is rows."""
    needs = operator.contract.arguments
    return [name for name, need in needs.items() if need in _ROWS and arguments[name] is not None]


def is_ordered(operator: Operator[..., object]) -> bool:
    """Whether the operator sees requests: then whole requests can be moved, not single rows."""
    return Need.ORDERED in operator.contract.arguments.values()


def take(
    operator: Operator[..., object], arguments: Arguments, rows: Tensor, ordered: Tensor | None = None
) -> Arguments:
    """The same call on chosen rows; arguments that need rows in global order get the rows ``ordered``, if given."""
    needs = operator.contract.arguments
    kept = rows if ordered is None else ordered
    chosen = {
        name: arguments[name][kept if needs[name] is Need.ORDERED else rows]
        for name in row_arguments(operator, arguments)
    }
    return {**arguments, **chosen}


def laid_out(operator: Operator[..., object], arguments: Arguments, layout: str) -> Arguments:
    """The same values, with rows in another memory layout: ``contiguous``, ``transposed`` or ``padded``."""
    return arguments | {name: _laid_out(arguments[name], layout) for name in row_arguments(operator, arguments)}


def _laid_out(value: Tensor, layout: str) -> Tensor:
    """``transposed``: rows last in memory. ``padded``: every second row of a wider buffer, off its start."""
    if layout == "transposed":
        return value.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "padded":
        buffer = value.new_zeros(2 * value.shape[0] + 1, *(extent + 3 for extent in value.shape[1:]))
        view = buffer[(slice(1, None, 2), *(slice(2, 2 + extent) for extent in value.shape[1:]))]
        return view.copy_(value)
    assert layout == "contiguous"
    return value.contiguous()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself, and zero differs from negative zero."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(values: Tensor) -> Tensor:
    """The bit patterns as integers."""
    return values.contiguous().view(_INTEGERS[values.element_size()])


def assert_same(actual: Outcome, expected: Outcome, what: str) -> None:
    """Results and state agree to the bit."""
    assert len(actual.results) == len(expected.results)
    for number, (a, b) in enumerate(zip(actual.results, expected.results, strict=True)):
        assert same_bits(a, b), f"{what}: result {number} differs in rows {differing_rows(a, b)}"
    for name, value in expected.state.items():
        assert same_bits(actual.state[name], value), (
            f"{what}: {name} differs at {differing_rows(actual.state[name], value)}"
        )


def differing_rows(a: Tensor, b: Tensor) -> object:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"(shape or dtype: {tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype})"
    return (bits(a) != bits(b)).flatten(1).any(1).nonzero().squeeze(1).tolist()
