"""Prelude, body and epilogue of an engine's steps as programs on its weights and pools; how they ran is counted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from octavo.graphs.buckets import worst_padding
from octavo.graphs.cuda import Recorder
from octavo.graphs.dump import PAGE, REPLAY_LOG, DumpWriter, write_overview, write_page
from octavo.graphs.facts import facts_of
from octavo.graphs.footprint import buffer_bytes, peak_bytes
from octavo.graphs.inductor import compile_regions
from octavo.graphs.measured import measured_of
from octavo.kernels.collectives import Communicator
from octavo.model.inputs import Rows, Tokens
from octavo.model.memory import check_memory
from octavo.passes.base import PassContext
from octavo.runtime.assemble import Assembly
from octavo.runtime.config import GraphMode
from octavo.runtime.parts import Part, body_part, epilogue_part, prelude_part
from octavo.runtime.pools import Pools
from octavo.runtime.step_program import Compiled, NotReplayed, Ran, StepProgram, compile_part, head_buckets

_LOG = logging.getLogger("octavo.graphs")
_SECONDS_BETWEEN_LOGS = 10.0
RESERVE = 1.15
"""Times the peak of an eager step that is kept free: allocators keep more than what is asked of them."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A program to be made."""

    name: str
    part: Part
    buckets: tuple[int, ...]
    context: PassContext


class Programs:
    """The three programs of a step, run one after another."""

    def __init__(
        self,
        assembly: Assembly,
        pools: Pools,
        buckets: tuple[int, ...],
        mode: GraphMode,
        dump_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        communicator: Communicator | None = None,
        replicated: tuple[int, ...] = (),
    ) -> None:
        """``buckets`` are local row counts of prelude and body; ``dump_dir`` has been claimed.

        With a ``communicator`` prelude and body exist twice: for rows dealt over its ranks, and, with the row counts
        ``replicated``, for rows that every rank has. ``progress(done, total)`` counts programs.
        """
        self._communicator = communicator
        self._ranks = communicator.ranks if communicator is not None else 1
        self.replays: Counter[int] = Counter()
        """Steps by bucket."""
        self.not_replayed: Counter[NotReplayed] = Counter()
        self._pools = pools
        self._logged = float("-inf")
        self._steps = 0
        self._dump_dir = dump_dir
        self._log_file: TextIO | None = None
        text, dtype = assembly.config.text_config, assembly.dtype
        prelude, body = prelude_part(assembly.prelude, pools), body_part(assembly.model.body, text, pools, dtype)
        epilogue = epilogue_part(assembly.model.head, text, dtype, assembly.device)
        context = PassContext(device=assembly.device.type, backends=assembly.backends)
        plan = []
        for sharded in (True, False) if self._ranks > 1 else (True,):
            ladder = buckets if sharded else replicated
            placed = dataclasses.replace(context, ranks=self._ranks, sharded=sharded)
            suffix = "" if self._ranks == 1 else "-sharded" if sharded else "-replicated"
            plan += [_Planned(part.name + suffix, part, ladder, placed) for part in (prelude, body)]
        plan.append(_Planned(epilogue.name, epilogue, head_buckets(pools.sizes.slots), context))
        self.timeline: list[tuple[str, float]] = []
        """Phases of the start and their seconds, over all programs."""
        self.description = "graphs off"
        self.plan_hash = ""
        """Of all programs, equal on ranks that fit together; made where there are several."""
        if mode == "off" and assembly.numerics != "fast" and self._ranks == 1:
            made = [StepProgram(each.part, each.buckets, mode, None) for each in plan]
        else:
            made = self._start(plan, mode, assembly, dump_dir, progress)
        *placed_programs, self._epilogue = made
        pairs = zip(placed_programs[::2], placed_programs[1::2], strict=True)
        self._placed = dict(zip((True, False), pairs, strict=False))
        """Prelude and body by whether rows are dealt over ranks."""
        self.buffer_bytes = sum(program.buffer_bytes for program in made)
        """Of static memory."""
        self.captures = {
            each.name: program.captures for each, program in zip(plan, made, strict=True) if program.captures
        }
        """What capturing took, by part; nothing where there are no CUDA graphs."""

    def _start(
        self,
        plan: Sequence[_Planned],
        mode: GraphMode,
        assembly: Assembly,
        dump_dir: Path | None,
        progress: Callable[[int, int], None] | None,
    ) -> list[StepProgram]:
        """Compile all parts, make sure that they fit, make their buffers, capture them, and write the dump."""
        device = assembly.device
        captured = device.type == "cuda" and mode not in ("off", "eager")
        total = len(plan) * (1 + assembly.inductor) + sum(len(each.buckets) for each in plan) * captured
        done = itertools.count()

        def advance() -> None:
            if progress is not None:
                progress(next(done), total)

        advance()
        times = [time.perf_counter()]
        compiled = []
        for each in plan:
            writer = DumpWriter(dump_dir / each.name) if dump_dir is not None else None
            compiled.append(compile_part(each.part, each.buckets, each.context, writer))
            advance()
        times.append(time.perf_counter())
        if assembly.inductor:
            for place, done_part in enumerate(compiled):
                # Steps beyond the largest bucket run the same kernels.
                prepared = done_part.buckets[-1] * self._ranks
                chunk = -(-assembly.chunk // self._ranks) * self._ranks
                largest_rows = prepared if done_part.part.name == "epilogue" else max(prepared, chunk)
                regions = compile_regions(
                    done_part.compilation.instructions,
                    device=device.type,
                    largest_rows=largest_rows,
                )
                compiled[place] = dataclasses.replace(done_part, regions=regions)
                advance()
        times.append(time.perf_counter())
        if mode != "off":
            self._reserve(compiled, device)
        made = [StepProgram(each.part, each.buckets, mode, each, self._communicator) for each in compiled]
        if self._ranks > 1:
            hashes = [facts_of(each.compilation, each.context, each.buckets)["plan_hash"] for each in compiled]
            self.plan_hash = ",".join(hashes)
        times.append(time.perf_counter())
        if captured:
            recorder = Recorder(device, debug=mode in ("compare", "poison"))
            for program in made:
                program.capture(recorder, advance)
        times.append(time.perf_counter())
        buckets = made[0].buckets
        described = (program.describe(each.name) for each, program in zip(plan, made, strict=True))
        title = (
            f"graphs {mode}: {'; '.join(described)}; {len(buckets)} buckets to "
            f"{buckets[-1]:,} rows, at most {worst_padding(buckets):.0%} padding; "
            f"{sum(program.buffer_bytes for program in made) / 1e6:.0f} MB of buffers"
        )
        self.description = "\n".join(
            (title, *(f"{each.part.name}: {each.regions.describe()}" for each in compiled if each.regions is not None))
        )
        if dump_dir is not None:
            compiler = "inductor" if assembly.inductor else "none"
            names = [each.name for each in plan]
            self._dump(dump_dir, [title, f"compile {compiler}, torch {torch.__version__}"], names, compiled, made)
        times.append(time.perf_counter())
        exports, passes = sum(each.export_seconds for each in compiled), sum(each.pass_seconds for each in compiled)
        tracing, compiling, making, capturing, dumping = (end - begin for begin, end in itertools.pairwise(times))
        self.timeline = [("export", exports), ("passes and proof", passes)]
        if assembly.inductor:
            self.timeline.append(("compilation", compiling))
        self.timeline.append(("buffers", making))
        if captured:
            self.timeline.append(("capture", capturing))
        if dump_dir is not None:  # notes on every pass are taken while compiling
            self.timeline.append(("dump", tracing - exports - passes + dumping))
        return made

    def _reserve(self, compiled: Sequence[Compiled], device: torch.device) -> None:
        """Refuse, before buffers are made, what the largest bucket would need more than there is.

        An eager step of that many rows stays possible beside the buffers: debug modes take it.
        """
        needed = 0 if device.type == "cuda" else self._pools.bytes  # fresh host pages are counted as free until used
        needed += sum(buffer_bytes(each.compilation, each.buckets[-1]) for each in compiled)
        peak = max(peak_bytes(each.compilation, each.buckets[-1]) for each in compiled)
        check_memory(needed + int(RESERVE * peak), device)

    def _dump(
        self,
        directory: Path,
        title: Sequence[str],
        names: Sequence[str],
        compiled: Sequence[Compiled],
        made: Sequence[StepProgram],
    ) -> None:
        reports = {}
        for name, each, program in zip(names, compiled, made, strict=True):
            assert each.dump is not None
            timeline = {"export": each.export_seconds, "passes and proof": each.pass_seconds}
            if each.regions is not None:
                timeline["compilation"] = each.regions.seconds
            if program.captures:
                timeline["capture"] = sum(capture.seconds for capture in program.captures)
            reports[name] = each.dump.finish(
                each.compilation,
                each.context,
                each.buckets,
                each.passes,
                title,
                timeline,
                measured_of(program.captures, each.regions),
            )
        write_overview(directory, title, reports)
        self._log_file = (directory / REPLAY_LOG).open("w", encoding="utf-8", buffering=1)

    def hidden(self, tokens: Tokens, sharded: bool = True) -> Tensor:
        """Prelude and body of a step -> hidden rows [R, D]; the pools move on. Valid until the next step.

        With ``sharded`` T is a multiple of the ranks, and R this rank's share; else every rank has all rows.
        """
        began = time.perf_counter()
        prelude, body = self._placed[sharded]
        count = tokens.ids.shape[0] // (self._ranks if sharded else 1)
        rows, _ = prelude.run({"tokens": tokens, "history": self._pools.history}, count)
        assert isinstance(rows, Rows)
        state = self._pools.state(tokens.slots, tokens.positions, tokens.starts)
        output, ran = body.run({"rows": rows, "state": state}, count)
        self._note(count, ran, time.perf_counter() - began)
        hidden: Tensor = output.hidden
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Epilogue: chosen hidden rows [n, D] -> logits [n, V] F32, at most as many as requests or ``PROMPT_ROWS``.

        Valid until the next call.
        """
        logits: Tensor = self._epilogue.run({"hidden": hidden}, len(hidden))[0]
        return logits

    def close(self) -> None:
        """Close the log of steps, if there is one, and show it on the dump's page."""
        if self._log_file is None:
            return
        self._log_file.close()
        self._log_file = None
        assert self._dump_dir is not None
        try:
            write_page(self._dump_dir)
        except OSError as error:
            _LOG.warning("%s does not show the history of steps: %s", self._dump_dir / PAGE, error)

    def _note(self, rows: int, ran: Ran, seconds: float) -> None:
        """Count the step; log a surprising reason at a limited rate; one line to the log of steps."""
        self._steps += 1
        if ran.bucket is not None:
            self.replays[ran.bucket] += 1
        if ran.reason is not None:
            self.not_replayed[ran.reason] += 1
        beyond = ran.reason is NotReplayed.BEYOND_LARGEST_BUCKET
        if beyond and time.monotonic() - self._logged > _SECONDS_BETWEEN_LOGS:
            self._logged = time.monotonic()
            _LOG.warning("a step of %d rows was not replayed: %s", rows, NotReplayed.BEYOND_LARGEST_BUCKET.value)
        if self._log_file is not None:
            line = {
                "step": self._steps,
                "rows": rows,
                "bucket": ran.bucket,
                "microseconds": round(seconds * 1e6),
                "not_replayed": ran.reason.value if ran.reason is not None else None,
            }
            self._log_file.write(json.dumps(line) + "\n")
