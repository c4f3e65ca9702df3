"""The body as a compiled program on this engine's weights and pools, and the ways to run it.

Start: export under fake tensors, passes and proof, buffers, warm-up; nothing is compiled or captured afterwards. On a
machine without a GPU a replay calls the program's pieces on the same static buffers (design section 5).
"""

from __future__ import annotations

import enum
import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.errors import UsageError
from octavo.graphs.buckets import bucket_for, check_buckets, ladder, thinned, worst_padding
from octavo.graphs.compile import compilation_of, input_names
from octavo.graphs.dump import DumpWriter
from octavo.graphs.program import Program
from octavo.model.inputs import Rows, State
from octavo.model.model import Model, empty_model
from octavo.passes.base import Compilation, PassContext
from octavo.passes.runner import PassResult, run_passes
from octavo.runtime.body_inputs import classify, example_inputs
from octavo.runtime.config import GraphMode
from octavo.runtime.pools import Pools

DEFAULT_BUCKETS = 24
_LOG = logging.getLogger("octavo.graphs")
_SECONDS_BETWEEN_LOGS = 10.0


class NotReplayed(enum.Enum):
    """Why a step did not run as a replay; counted, logged at a limited rate, and shown in the engine's stats."""

    GRAPHS_OFF = "graphs off"
    EAGER_MODE = "eager mode"
    BEYOND_LARGEST_BUCKET = "beyond the largest bucket"


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


def compile_body(
    model: Model, pools: Pools, dtype: torch.dtype, context: PassContext, dump: DumpWriter | None = None
) -> tuple[Compilation, list[PassResult], float]:
    """Export and rewrite the body -> the compilation, the passes' reports, seconds of the export."""
    began = time.perf_counter()
    text = model.config.text_config
    device = pools.page_table.device
    with FakeTensorMode():
        skeleton = empty_model(model.config, device, model.experts)
        inputs = example_inputs(text, pools.sizes, pools.storage, dtype, device)
    compilation = compilation_of(skeleton.body, inputs, classify)
    exported = time.perf_counter() - began
    if dump is not None:
        dump.captured(compilation)
    return compilation, run_passes(compilation, context, after=dump.after if dump is not None else None), exported


class BodyProgram:
    """Runs the body's steps as the mode says, and counts how."""

    def __init__(
        self,
        model: Model,
        pools: Pools,
        dtype: torch.dtype,
        buckets: tuple[int, ...],
        mode: GraphMode,
        dump_dir: Path | None = None,
    ) -> None:
        self.mode = mode
        self.replays: Counter[int] = Counter()
        """Steps by bucket."""
        self.not_replayed: Counter[NotReplayed] = Counter()
        self.timeline: list[tuple[str, float]] = []
        """Phases of the start and their seconds."""
        self._body = model.body
        self._pools = pools
        self._program: Program | None = None
        self._names: dict[str, str] = {}
        """Input names of the program by path."""
        self._logged = float("-inf")
        self._steps = 0
        self._log_file: TextIO | None = None
        self.description = "graphs off"
        if mode != "off":
            self._start(model, pools, dtype, buckets, dump_dir)

    def _start(
        self, model: Model, pools: Pools, dtype: torch.dtype, buckets: tuple[int, ...], dump_dir: Path | None
    ) -> None:
        context = PassContext(device=pools.page_table.device.type)
        dump = DumpWriter(dump_dir) if dump_dir is not None else None
        compilation, passes, exported = compile_body(model, pools, dtype, context, dump)
        self.timeline.append(("export", exported))
        self.timeline.append(("passes and proof", sum(result.seconds for result in passes)))
        began = time.perf_counter()
        resident: dict[str, Tensor] = dict(model.body.named_parameters()) | dict(model.body.named_buffers())
        resident["state.page_table"] = pools.page_table
        listed = {"rings": pools.rings, "entries": pools.entries, "keys": pools.keys, "pending": pools.pending}
        for field, tensors in listed.items():
            resident |= {f"state.{field}.{place}": tensor for place, tensor in enumerate(tensors)}
        self._program = Program(compilation, resident, buckets, pools.page_table.device)
        self._names = input_names(compilation)
        self._program.warm_up()
        self.timeline.append(("buffers and warm-up", time.perf_counter() - began))
        kinds = Counter(instruction.kind.value for instruction in self._program.instructions)
        self.description = (
            f"graphs {self.mode}: {', '.join(f'{count} {kind}s' for kind, count in kinds.items())}; "
            f"{len(buckets)} buckets to {buckets[-1]:,} rows, at most {worst_padding(buckets):.0%} padding; "
            f"{self._program.buffer_bytes / 1e6:.0f} MB of buffers"
        )
        if dump is not None:
            dump.finish(compilation, context, buckets, passes, [self.description], dict(self.timeline))
            self._log_file = dump.replay_log.open("w", encoding="utf-8", buffering=1)

    def run(self, rows: Rows, state: State) -> Tensor:
        """Hidden rows [R, D] of a step."""
        began = time.perf_counter()
        count = rows.embeds.shape[0]
        program = self._program
        bucket = bucket_for(count, program.buckets) if program is not None else None
        reason = None
        if program is None or bucket is None:
            reason = NotReplayed.GRAPHS_OFF if program is None else NotReplayed.BEYOND_LARGEST_BUCKET
            with torch.no_grad():
                hidden: Tensor = self._body(rows, state).hidden
        else:
            reason = NotReplayed.EAGER_MODE if self.mode == "eager" else None
            hidden = self._run_program(program, self._values(rows, state), bucket, count)
        self._note(count, None if reason else bucket, reason, time.perf_counter() - began)
        return hidden

    def close(self) -> None:
        """Close the log of steps, if there is one."""
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    @torch.no_grad()
    def _run_program(self, program: Program, values: dict[str, Tensor], bucket: int, count: int) -> Tensor:
        if self.mode == "eager":
            return program.run_eager(values)[0]
        if self.mode == "compare":
            return program.compare(values, bucket)[0][:count].clone()
        if self.mode == "poison":
            program.poison()
        program.load(values, bucket)
        if self.mode == "poison":
            program.soil_dead_rows({name: value.shape[0] for name, value in values.items()}, bucket)
        return program.replay(bucket)[0][:count].clone()

    def _values(self, rows: Rows, state: State) -> dict[str, Tensor]:
        paths = {
            "rows.embeds": rows.embeds,
            "rows.slots": rows.slots,
            "rows.positions": rows.positions,
            "rows.live": rows.live,
            "rows.image": rows.image,
            "state.write_slots": state.write_slots,
            "state.write_positions": state.write_positions,
            "state.write_starts": state.write_starts,
        }
        paths |= {f"rows.engram.{place}": tensor for place, tensor in enumerate(rows.engram)}
        return {self._names[path]: tensor for path, tensor in paths.items()}

    def _note(self, rows: int, bucket: int | None, reason: NotReplayed | None, seconds: float) -> None:
        """Count the step; log a surprising reason at a limited rate; one line to the log of steps."""
        self._steps += 1
        if bucket is not None:
            self.replays[bucket] += 1
        if reason is not None:
            self.not_replayed[reason] += 1
        if reason is NotReplayed.BEYOND_LARGEST_BUCKET and time.monotonic() - self._logged > _SECONDS_BETWEEN_LOGS:
            self._logged = time.monotonic()
            _LOG.warning("a step of %d rows was not replayed: %s", rows, reason.value)
        if self._log_file is not None:
            line = {
                "step": self._steps,
                "rows": rows,
                "bucket": bucket,
                "microseconds": round(seconds * 1e6),
                "not_replayed": reason.value if reason is not None else None,
            }
            self._log_file.write(json.dumps(line) + "\n")
