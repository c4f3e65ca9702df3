"""``octavo bench ranks``: how far a prefill could scale over ranks, measured with one of them.

Rank 0's share of the last chunk of a prompt is computed at several numbers of ranks. It holds the experts that would be
its own, and copies of equal size stand in for collectives. So what is measured is a lower bound of a rank's time, and
the speed-up an upper one. Before the last chunk the state holds zeros: what a step costs depends on positions, not on
values.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UsageError
from octavo.graphs.tables import size, table
from octavo.kernels.collectives import Capturable, restored, shard_of
from octavo.kernels.paging import pages_for
from octavo.runtime.assemble import Progress, assemble, plan
from octavo.runtime.bench import describe_environment
from octavo.runtime.config import EngineConfig
from octavo.runtime.ranks.traffic import CountedCommunicator, Traffic
from octavo.runtime.runner import Chunk, Runner

_UNUSED = ("ranks", "buckets", "dump_dir", "max_requests")


class AloneCommunicator:
    """Rank 0 of a group whose other ranks are not there: what they would bring is a copy of its own."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks = 0, ranks
        self.capturable = Capturable(False, "copies stand in for collectives that are instructions of their own")

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        return [shard_of(value, self.rank, self.ranks) for value in values]

    def gather(self, values: list[Tensor], ordered: bool) -> list[Tensor]:
        joined = [torch.cat([value] * self.ranks) for value in values]
        return [restored(value, self.ranks) for value in joined] if ordered else joined

    def reduce(self, value: Tensor, scatter: bool) -> Tensor:
        return value.unflatten(0, (self.ranks, -1))[self.rank].clone() if scatter else value.clone()


def counts_of(text: str, option: str) -> tuple[int, ...]:
    """Numbers such as ``1,2,4``, ascending. Raises :class:`UsageError` for others."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or counts != sorted(set(counts)):
        raise UsageError(f"{option} {text}: expected ascending numbers of at least 1, such as 1,2,4,8")
    return tuple(counts)


def last_rows(prompt: int, chunk: int) -> int:
    """Rows of the last step of a prompt."""
    return prompt - (prompt - 1) // chunk * chunk


def measured_config(config: EngineConfig, ranks: tuple[int, ...], prompts: tuple[int, ...]) -> EngineConfig:
    """The configuration with state for one request of the longest prompt, unless it says how much state there is.

    Raises :class:`UsageError` for options that do not apply, for too little room, and for prompts and experts that
    cannot be dealt over so many ranks.
    """
    default = EngineConfig()
    for name in _UNUSED:
        if getattr(config, name) != getattr(default, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does not apply: bench ranks prepares what it measures, one request on "
                "each number of ranks of --cp. Leave it out."
            )
    longest = max(prompts)
    config = dataclasses.replace(config, max_requests=1)
    if config.kv_tokens is None and config.memory_fraction is None:
        config = dataclasses.replace(config, kv_tokens=max(longest, 2))
    planned = plan(config)
    if planned.capacity.max_model_len < longest:
        raise UsageError(
            f"--prompts {longest}: a request has room for {planned.capacity.max_model_len} tokens. Ask for shorter "
            "prompts, or raise --kv-tokens or --memory-fraction."
        )
    for count in ranks:
        if config.expert_placement == "sharded" and len(planned.experts) % count:
            raise UsageError(f"--cp {count}: {len(planned.experts)} experts cannot be dealt evenly")
        short = [prompt for prompt in prompts if count > 1 and last_rows(prompt, config.chunk) < max(count, 2)]
        if short:
            raise UsageError(
                f"--prompts {short[0]}: its last step has {last_rows(short[0], config.chunk)} rows, too few for "
                f"{count} ranks; choose another length or --chunk"
            )
    return config


@torch.no_grad()
def measure_ranks(
    config: EngineConfig, ranks: tuple[int, ...], prompts: tuple[int, ...], repeat: int, progress: Progress
) -> Iterator[dict[str, Any]]:
    """All figures, as ``--json`` writes them, again and again as they become complete. Seconds are medians of
    ``repeat`` steps after one that does not count."""
    config = measured_config(config, ranks, prompts)
    experts = len(plan(config).experts)
    report: dict[str, Any] = {"chunk": config.chunk, "repeat": repeat, "experts": experts, "shares": []}
    alone: dict[int, float] = {}
    """Seconds of one rank by prompt."""
    for count in ranks:
        held = experts // count if config.expert_placement == "sharded" else experts
        assembly = assemble(dataclasses.replace(config, experts=held), progress)
        device = assembly.device
        report.setdefault("environment", describe_environment(device, assembly.describe(config)))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            traffic = Traffic()
            communicator = CountedCommunicator(AloneCommunicator(count), traffic) if count > 1 else None
            local = sorted({-(-last_rows(prompt, config.chunk) // count) for prompt in prompts})
            runner = Runner(
                assembly,
                {count > 1: tuple(local)},
                config.graphs,
                None,
                lambda done, total: progress("programs", done, total),
                communicator,
            )
            pages = pages_for(max(prompts))
            runner.set_pages([(0, page, page) for page in range(pages)])
            for prompt in prompts:
                share: dict[str, Any] = {"cp": count, "prompt_tokens": prompt, "experts": held}
                share |= _measure(runner, prompt, config.chunk, repeat, traffic)
                if count == 1:
                    alone[prompt] = share["seconds"]
                share["speed_up_at_most"] = alone[prompt] / share["seconds"] if prompt in alone else None
                report["shares"].append(share)
                yield report
        del runner, assembly
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(runner: Runner, prompt: int, chunk: int, repeat: int, traffic: Traffic) -> dict[str, Any]:
    """One rank's share of the last step of a prompt."""
    device = runner.assembly.device
    rows = last_rows(prompt, chunk)
    vocabulary = runner.assembly.config.text_config.vocab_size
    ids = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(prompt)).tolist()
    seconds = []
    for _ in range(1 + repeat):
        traffic.collectives, traffic.bytes_sent = 0, 0.0
        began = time.perf_counter()
        hidden = runner.run([Chunk(slot=0, start=prompt - rows, ids=ids)])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return {
        "rows": rows,
        "local_rows": len(hidden),
        "seconds": statistics.median(seconds[1:]),
        "collectives": traffic.collectives,
        "bytes_sent": round(traffic.bytes_sent),
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as a table."""
    rows = [
        (
            share["cp"],
            f"{share['prompt_tokens']:,}",
            f"{share['rows']:,}",
            f"{share['local_rows']:,}",
            share["experts"],
            f"{share['seconds']:.3f}",
            share["collectives"],
            size(share["bytes_sent"]),
            "-" if share["speed_up_at_most"] is None else f"{share['speed_up_at_most']:.2f}",
        )
        for share in report["shares"]
    ]
    headings = ("cp", "prompt", "last step", "of a rank", "experts", "seconds", "collectives", "sent", "speed-up <=")
    return [
        f"The last step (at most {report['chunk']:,} rows) of a prompt, rank 0's share of it; copies of equal size "
        "stand in for collectives.",
        *table(headings, rows, right="|".join(headings)),
    ]
