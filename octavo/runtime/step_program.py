"""One part of a step as a compiled program, and the ways to run it.

Start: export, passes and proof, buffers, capture; nothing is compiled or captured afterwards. On a machine without a
GPU a replay calls the program's pieces on the same static buffers (design section 5).
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UsageError
from octavo.graphs.buckets import bucket_for, check_buckets, ladder, thinned
from octavo.graphs.compile import compilation_of, copy_of, input_names, leaves_of
from octavo.graphs.cuda import Recorder
from octavo.graphs.dump import DumpWriter
from octavo.graphs.inductor import CompiledRegions
from octavo.graphs.program import BucketCapture, Program
from octavo.graphs.tables import counted
from octavo.kernels.collectives import Communicator
from octavo.passes.base import Compilation, InputKind, PassContext
from octavo.passes.runner import PassResult, run_passes
from octavo.runtime.config import GraphMode
from octavo.runtime.parts import Part, classify

DEFAULT_BUCKETS = 24
PROMPT_ROWS = 128
"""Rows whose prompt log probabilities are computed at once: the vocabulary is wide."""


class NotReplayed(enum.Enum):
    """Why a step did not run as a replay; counted, logged at a limited rate, and shown in the engine's stats."""

    GRAPHS_OFF = "graphs off"
    EAGER_MODE = "eager mode"
    BEYOND_LARGEST_BUCKET = "beyond the largest bucket"


_REASONS: dict[GraphMode, NotReplayed] = {"off": NotReplayed.GRAPHS_OFF, "eager": NotReplayed.EAGER_MODE}


@dataclass(frozen=True, slots=True)
class Ran:
    """How a part ran: the bucket of its replay, or the reason why there was none."""

    bucket: int | None
    reason: NotReplayed | None


def choose_buckets(text: str, chunk: int) -> tuple[int, ...]:
    """``default``, ``dense`` or sizes such as ``1,8,64``. Raises :class:`UsageError` for what cannot be used."""
    if text == "default":
        return thinned(ladder(chunk), DEFAULT_BUCKETS)
    if text == "dense":
        return ladder(chunk)
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--buckets {text}: default, dense, or row counts such as 1,8,64") from error
    return check_buckets(sizes, chunk)


def ladders(text: str, chunk: int, max_requests: int, ranks: int) -> dict[bool, tuple[int, ...]]:
    """Local row counts of the programs that there are, by whether rows are dealt over the ranks.

    Steps whose rows are dealt reach a rank's share of a chunk; those that every rank computes whole are decode steps
    and batches of fewer rows than ranks, and with one rank all steps. ``text`` as in :func:`choose_buckets`.
    """
    given = choose_buckets(text, chunk)
    if ranks == 1:
        return {False: given}
    tops = {True: -(-chunk // ranks), False: max(max_requests, ranks - 1)}
    if text in ("default", "dense"):
        return {sharded: choose_buckets(text, top) for sharded, top in tops.items()}
    return {sharded: tuple(size for size in given if size <= top) or (top,) for sharded, top in tops.items()}


def head_buckets(max_requests: int) -> tuple[int, ...]:
    """Rows that the epilogue is prepared for: one for each request that samples, and those of prompts."""
    return choose_buckets("default", max(max_requests, PROMPT_ROWS))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A part after all passes, and the row counts that it is prepared for."""

    part: Part
    buckets: tuple[int, ...]
    compilation: Compilation
    context: PassContext
    passes: list[PassResult]
    export_seconds: float
    dump: DumpWriter | None
    """Has noted the graph behind every pass."""
    regions: CompiledRegions | None = None
    """Compiled forms of the segments, if there are any."""

    @property
    def pass_seconds(self) -> float:
        return sum(result.seconds for result in self.passes)


@dataclass(frozen=True, slots=True)
class Exported:
    """A part before all passes."""

    compilation: Compilation
    seconds: float


def export_part(part: Part) -> Exported:
    began = time.perf_counter()
    return Exported(compilation_of(part.module, part.inputs, classify), time.perf_counter() - began)


def compile_part(
    part: Part,
    buckets: tuple[int, ...],
    context: PassContext,
    dump: DumpWriter | None = None,
    exported: Exported | None = None,
) -> Compiled:
    """Rewrite a part, or a copy of its export if it is given."""
    if exported is None:
        exported = export_part(part)
        compilation = exported.compilation
    else:
        compilation = copy_of(exported.compilation)
    if dump is not None:
        dump.captured(compilation)
    passes = run_passes(compilation, context, after=dump.after if dump is not None else None)
    return Compiled(part, buckets, compilation, context, passes, exported.seconds, dump)


class StepProgram:
    """Runs one part of every step as the mode says; its inputs keep the structure of the part's examples."""

    def __init__(
        self,
        part: Part,
        buckets: tuple[int, ...],
        mode: GraphMode,
        compiled: Compiled | None,
        communicator: Communicator | None = None,
    ) -> None:
        """``compiled`` is the part after all passes, or None to call its module (mode ``off``).

        Mode ``off`` with a compiled part runs its instructions one by one: that is how the backends of numerics
        ``fast``, which are chosen in the graph, are called plainly.
        """
        self.mode = mode
        self.buckets = buckets
        self._part = part
        self._program: Program | None = None
        self._row_invariant = True
        self._names: dict[str, str] = {}
        """Input names of the program by path."""
        if compiled is None:
            return
        resident: dict[str, Tensor] = dict(part.module.named_parameters()) | dict(part.module.named_buffers())
        resident |= {path: leaf for path, leaf in leaves_of(part.inputs) if classify(path).kind is InputKind.POOL}
        device = next(iter(leaves_of(part.inputs)))[1].device
        modules = compiled.regions.modules if compiled.regions is not None else None
        self._program = Program(compiled.compilation, resident, buckets, device, communicator, modules)
        # Gathered rows lie rank by rank, so padding moves them.
        self._row_invariant = set(compiled.context.backends.values()) == {"reference"} and compiled.context.ranks == 1
        self._names = input_names(compiled.compilation)
        if mode != "off":
            self._program.warm_up()

    def capture(self, recorder: Recorder, progress: Callable[[], None]) -> None:
        """Turn the program's segments into CUDA graphs; ``progress`` after every bucket. Modes ``off`` and ``eager``
        replay nothing."""
        if self._program is not None and self.mode not in ("off", "eager"):
            self._program.capture(recorder, progress)

    def close(self) -> None:
        """Give the graphs up; the program cannot run afterwards."""
        if self._program is not None:
            self._program.close()

    @property
    def captures(self) -> list[BucketCapture]:
        return self._program.captures if self._program is not None else []

    @property
    def buffer_bytes(self) -> int:
        return self._program.buffer_bytes if self._program is not None and self.mode != "off" else 0

    def describe(self) -> str:
        """Instructions by kind."""
        if self._program is None:
            return f"{self._part.name}: plain calls"
        kinds = Counter(instruction.kind.value for instruction in self._program.instructions)
        return f"{self._part.name}: {', '.join(counted(count, kind) for kind, count in kinds.items())}"

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Any], rows: int) -> tuple[Any, Ran]:
        """What the module returns for ``rows`` local rows, and how it ran.

        Results may be views of static buffers: the next run of this part overwrites them.
        """
        program = self._program
        if program is None:
            return self._part.module(*inputs.values()), Ran(None, NotReplayed.GRAPHS_OFF)
        # Pools stay where they are, and what a model without Engram does not read has no buffer.
        named = ((self._names[path], leaf) for path, leaf in leaves_of(inputs))
        values = {name: leaf for name, leaf in named if name in program.buffers}
        bucket = bucket_for(rows, self.buckets)
        reason = _REASONS.get(self.mode)
        if bucket is None or reason is not None:
            results = self._part.restore(program.run_eager(values))
            return results, Ran(None, reason or NotReplayed.BEYOND_LARGEST_BUCKET)
        replayed = self._replay(program, values, bucket)
        return self._part.restore([result[:rows] for result in replayed]), Ran(bucket, None)

    def _replay(self, program: Program, values: dict[str, Tensor], bucket: int) -> tuple[Tensor, ...]:
        if self.mode == "compare":
            return program.compare(values, bucket, self._row_invariant)
        if self.mode == "poison":
            program.poison()
        program.load(values, bucket)
        if self.mode == "poison":
            program.soil_dead_rows({name: value.shape[0] for name, value in values.items()}, bucket)
        return program.replay(bucket)
