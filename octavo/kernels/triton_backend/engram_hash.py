"""``engram_hash``: the n-grams of some tokens, looked back for and hashed in one kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment, misc"
# ruff: noqa: RUF005 - Triton adds tuples and unpacks none; their lengths are no types to mypy

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.engram import DEAD_CLASS, engram_hash

_ROWS = 16


@engram_hash.implement("triton", devices=frozenset({"cuda"}))
def engram_hash_triton(
    classes: Tensor,
    history: Tensor,
    primes: Tensor,
    offsets: Tensor,
    multipliers: Tensor,
    write_slots: Tensor,
    write_positions: Tensor,
    write_starts: Tensor,
    pad_class: int,
) -> Tensor:
    """See the reference. A request's rows are contiguous: the token before a row's is in the row before it, down to the
    request's first row of this step."""
    rows, columns = classes.shape[0], primes.shape[0]
    hashes = classes.new_empty(rows, columns)
    if rows == 0:
        return hashes
    if not history.is_contiguous():
        raise ValueError(
            f"engram_hash, backend triton: history has strides {history.stride()}; allowed are contiguous pools. Use "
            "one tensor for it."
        )
    depth = history.shape[1]
    heads = columns // depth
    hash_rows[(triton.cdiv(rows, _ROWS),)](
        *(classes.contiguous(), history, primes.contiguous(), offsets.contiguous(), multipliers.contiguous()),
        *(write_slots.contiguous(), write_positions.contiguous(), write_starts.contiguous(), hashes),
        *(rows, pad_class),
        dead_class=DEAD_CLASS,
        depth=depth,
        heads=heads,
        ROWS=_ROWS,
        HEADS=triton.next_power_of_2(heads),
        num_warps=4,
    )
    return hashes


@triton.jit(do_not_specialize=["rows", "pad_class"])
def hash_rows(
    classes,
    history,
    primes,
    offsets,
    multipliers,
    write_slots,
    write_positions,
    write_starts,
    hashes,
    rows,
    pad_class,
    dead_class: tl.constexpr,
    depth: tl.constexpr,
    heads: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """ROWS rows of hashes [R, depth * heads]. Tensors as in the operator, contiguous; HEADS pads to a power of two.

    Remainders take long, and no load passes one: all loads come first.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    position = tl.load(write_positions + row, mask=there, other=-1)
    start = tl.load(write_starts + row, mask=there, other=0)
    slot = tl.load(write_slots + row, mask=there, other=0).to(tl.int64)
    head = tl.arange(0, HEADS)
    moduli = ()
    firsts = ()
    for order in tl.static_range(depth):
        moduli = moduli + (tl.load(primes + order * heads + head, mask=head < heads, other=1),)
        firsts = firsts + (tl.load(offsets + order * heads + head, mask=head < heads, other=0),)
    terms = ()
    unbroken = there
    for back in tl.static_range(depth + 1):
        wanted = position - back
        in_request = wanted >= 0
        here = wanted >= start
        own = tl.load(classes + row - back, mask=in_request & here, other=dead_class)
        before = history + slot * depth + wanted % depth
        found = tl.where(here, own, tl.load(before, mask=in_request & (here == 0), other=dead_class))
        unbroken = unbroken & in_request & (found != dead_class)
        terms = terms + (tl.where(unbroken, found, pad_class) * tl.load(multipliers + back),)

    written = there[:, None] & (head < heads)[None, :]
    mixed = terms[0]
    for order in tl.static_range(depth):
        mixed = mixed ^ terms[order + 1]
        prime = tl.expand_dims(moduli[order], 0)
        rest = mixed[:, None] % prime
        rest = tl.where(rest < 0, rest + prime, rest)  # a remainder has its dividend's sign here
        goal = hashes + row[:, None] * (depth * heads) + (order * heads + head)[None, :]
        tl.store(goal, rest + tl.expand_dims(firsts[order], 0), mask=written)
