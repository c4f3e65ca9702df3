"""Prelude, body and epilogue of an engine's steps as programs on its weights and pools; how they ran is counted."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from torch import Tensor

from octavo.graphs.dump import PAGE, REPLAY_LOG, write_page
from octavo.kernels.collectives import Communicator
from octavo.model.inputs import Rows, Tokens
from octavo.passes.base import PassContext
from octavo.runtime.assemble import Assembly
from octavo.runtime.config import GraphMode
from octavo.runtime.parts import body_part, epilogue_part, prelude_part
from octavo.runtime.pools import Pools
from octavo.runtime.program_start import Planned, Started, start_programs
from octavo.runtime.step_program import NotReplayed, Ran, StepProgram, head_buckets

_LOG = logging.getLogger("octavo.graphs")
_SECONDS_BETWEEN_LOGS = 10.0


class Programs:
    """The three programs of a step, run one after another."""

    def __init__(
        self,
        assembly: Assembly,
        pools: Pools,
        buckets: Mapping[bool, tuple[int, ...]],
        mode: GraphMode,
        dump_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """``buckets`` are local row counts of prelude and body by whether rows are dealt over the ``communicator``'s
        ranks, see :func:`ladders`; ``dump_dir`` has been claimed. ``progress(done, total)`` counts programs.
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
        context = PassContext(
            device=assembly.device.type, backends=assembly.backends, replicated_experts=assembly.replicated_experts
        )
        plan = []
        for sharded, ladder in buckets.items():
            placed = dataclasses.replace(context, ranks=self._ranks, sharded=sharded)
            if communicator is not None:
                placed = dataclasses.replace(placed, collectives=communicator.capturable)
            suffix = "" if self._ranks == 1 else "-sharded" if sharded else "-replicated"
            for part in (prelude, body):
                plan.append(Planned(dataclasses.replace(part, name=part.name + suffix), ladder, placed))
        plan.append(Planned(epilogue, head_buckets(pools.sizes.slots), context))
        if mode == "off" and assembly.numerics != "fast" and self._ranks == 1:
            made = [StepProgram(each.part, each.buckets, mode, None) for each in plan]
            started = Started(made, "graphs off", [], "")
        else:
            started = start_programs(plan, mode, assembly, pools, communicator, dump_dir, progress)
        self.timeline = started.timeline
        """Phases of the start and their seconds, over all programs."""
        self.description = started.description
        self.plan_hash = started.plan_hash
        """Of all programs, equal on ranks that fit together; made where there are several."""
        self._programs = started.programs
        *placed_programs, self._epilogue = self._programs
        pairs = zip(placed_programs[::2], placed_programs[1::2], strict=True)
        self._placed = dict(zip(buckets, pairs, strict=True))
        """Prelude and body by whether rows are dealt over ranks."""
        if dump_dir is not None:
            self._log_file = (dump_dir / REPLAY_LOG).open("w", encoding="utf-8", buffering=1)
        self.buffer_bytes = sum(program.buffer_bytes for program in started.programs)
        """Of static memory."""

    def hidden(self, tokens: Tokens, sharded: bool) -> Tensor:
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
        """Give the graphs up; close the log of steps, if there is one, and show it on the dump's page."""
        for program in self._programs:
            program.close()
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
