"""What a batch would do and why: rows on each rank, the bucket, the padding, the instructions, the bytes that move.

Nothing runs: the answer follows from the compilations and their buckets alone, so it can be asked of a model that
fits on no machine at hand.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from octavo.errors import UsageError
from octavo.graphs.buckets import bucket_for, local_rows
from octavo.graphs.moves import Move, moves_of
from octavo.graphs.tables import counted, layer_span, size
from octavo.passes.base import Compilation, PassContext
from octavo.passes.breaks import PieceKind

_LABEL = 14


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step and the requests that they belong to."""

    rows: int
    requests: int

    def check(self, max_requests: int) -> None:
        """Raise :class:`UsageError` for what no step can be."""
        if self.rows < 1 or self.requests < 1:
            raise UsageError(f"{self.rows} rows of {self.requests} requests: a step has at least one of each")
        if self.requests > self.rows:
            raise UsageError(
                f"{self.rows} rows of {self.requests} requests: every request of a step brings a row, so there are at "
                "least as many rows. Lower --requests or raise --rows."
            )
        if self.requests > max_requests:
            raise UsageError(
                f"{self.requests} requests: at most {max_requests} are in work at once, and more wait. "
                "Raise --max-requests."
            )

    def steps(self, chunk: int) -> list[Batch]:
        """The steps that the batch takes if one computes at most ``chunk`` rows."""
        counts = [chunk] * (self.rows // chunk) + [self.rows % chunk] * (self.rows % chunk > 0)
        return [Batch(count, min(self.requests, count)) for count in counts]


@dataclass(frozen=True, slots=True)
class Placed:
    """How the rows of a batch lie on the ranks."""

    sharded: bool
    why: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A lowered compilation and the local row counts that it is prepared for."""

    compilation: Compilation
    context: PassContext
    buckets: tuple[int, ...]


def placement_of(batch: Batch, ranks: int) -> Placed:
    """Which of the two programs a batch takes (design sections 4 and 5)."""
    if ranks == 1:
        return Placed(False, "whole, since there is one rank")
    if batch.rows < ranks:
        return Placed(False, f"replicated, since {counted(batch.rows, 'row')} cannot be dealt to {ranks} ranks")
    if batch.rows == batch.requests:
        return Placed(False, "replicated, since every request brings one row (a decode step)")
    return Placed(True, f"sharded: row g of the step lies on rank g % {ranks}")


def explain(
    batch: Batch, prepared: Prepared, *, max_requests: int, head_buckets: tuple[int, ...], align: int = 1
) -> list[str]:
    """Lines for people. ``prepared`` is the body's program for the placement of the batch (:func:`placement_of`).

    Raises :class:`UsageError` for a batch that cannot be.
    """
    batch.check(max_requests)
    ranks, buckets = prepared.context.ranks, prepared.buckets
    placed = placement_of(batch, ranks)
    assert ranks == 1 or placed.sharded == prepared.context.sharded, "the program for the other placement"
    needed = local_rows(batch.rows, ranks, align) if placed.sharded else local_rows(batch.rows, 1, align)
    bucket = bucket_for(needed, buckets)
    dealt = f" ({batch.rows:,} / {ranks}, rounded up)" if placed.sharded else ""
    lines = [
        f"{counted(batch.rows, 'row')} of {counted(batch.requests, 'request')} on {counted(ranks, 'rank')}",
        _line("placement", placed.why),
        _line("local rows", f"{needed:,} on every rank{dealt}"),
        *_bucket(batch, placed, needed, bucket, prepared),
        _line(
            "requests",
            f"{batch.requests} of {max_requests} slots; how many there are changes no shape. The head sees at most "
            f"{counted(batch.requests, 'row')}, in its bucket of {bucket_for(batch.requests, head_buckets)}",
        ),
    ]
    return lines + _instructions(prepared.compilation) + _collectives(prepared, needed if bucket is None else bucket)


def _bucket(batch: Batch, placed: Placed, needed: int, bucket: int | None, prepared: Prepared) -> list[str]:
    buckets = prepared.buckets
    if bucket is None:
        return [
            _line("bucket", f"none: the largest holds {buckets[-1]:,} local rows, so the step runs as plain calls"),
            _line("", "(not replayed: beyond the largest bucket). Prepare a larger one with --buckets."),
        ]
    place = buckets.index(bucket)
    smaller = f"{buckets[place - 1]:,} is too small" if place else "the smallest"
    ranks = prepared.context.ranks if placed.sharded else 1
    physical = bucket * ranks
    padding = physical - batch.rows
    row_bytes = sum({b.storage: b.row_bytes for b in prepared.compilation.buffers.values()}.values())
    over = f" over {ranks} ranks" if placed.sharded else ""
    return [
        _line("bucket", f"{bucket:,} ({smaller}; {len(buckets)} prepared, up to {buckets[-1]:,})"),
        _line("padding", f"{padding:,} of {physical:,} rows{over}, {padding / physical:.1%}"),
        _line("buffers", f"{size(bucket * row_bytes)} of {size(buckets[-1] * row_bytes)} allocated on each rank"),
    ]


def _instructions(compilation: Compilation) -> list[str]:
    counts: dict[PieceKind, int] = defaultdict(int)
    reasons: dict[str, list[int]] = defaultdict(list)
    for instruction in compilation.instructions:
        counts[instruction.kind] += 1
        if instruction.kind is PieceKind.BREAK:
            for reason in instruction.reasons:
                reasons[reason] += instruction.layers
    total = counted(len(compilation.instructions), "instruction")
    lines = [
        _line("runs", f"{total} of the body: {', '.join(counted(count, kind.value) for kind, count in counts.items())}")
    ]
    for number, (reason, layers) in enumerate(reasons.items()):
        where = f" ({layer_span(layers)})" if layers else ""
        lines.append(_line("" if number else "breaks", f"{len(layers):3} x {reason}{where}"))
    return lines if reasons else [*lines, _line("breaks", "none")]


def _collectives(prepared: Prepared, rows: int) -> list[str]:
    moves = moves_of(prepared.compilation, prepared.context)
    if not moves:
        return [_line("collectives", "none")]
    groups: dict[tuple[str, tuple[str, ...]], list[Move]] = defaultdict(list)
    for move in moves:
        groups[move.operation, move.readers].append(move)
    lines = []
    for number, ((operation, readers), members) in enumerate(groups.items()):
        purpose = f" for {' and '.join(readers)}" if readers else " of the sums over ranks"
        sent = sum(move.bytes_sent for move in members) * rows
        text = f"{len(members):3} x {operation}{purpose}: {size(sent)} sent by each rank"
        lines.append(_line("" if number else "collectives", text))
    total = sum(move.bytes_sent for move in moves) * rows
    return [*lines, _line("", f"{len(moves):3} in all, {size(total)} sent by each rank")]


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"
