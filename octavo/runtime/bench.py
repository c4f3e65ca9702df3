"""``octavo bench``: prefill and decode speed of an engine, and what the scheduler costs without a model."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
from torch import Tensor

import octavo
from octavo.errors import UsageError
from octavo.graphs.tables import size
from octavo.model.packaged import packaged_file
from octavo.model.presets import preset
from octavo.runtime.answer_text import AnswerText
from octavo.runtime.core import EngineCore
from octavo.runtime.engine import Engine
from octavo.runtime.request import Request
from octavo.runtime.runner import Chunk
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one measurement, all sent at once."""

    requests: int
    prompt_tokens: int
    max_tokens: int


def measure_engine(engine: Engine, load: Load, seed: int = 0) -> dict[str, Any]:
    """Tokens a second and latencies in seconds of one load, after a warm-up request."""
    if load.requests > engine.capacity.sizes.slots:
        raise UsageError(f"--requests {load.requests}: more than --max-requests {engine.capacity.sizes.slots} at once")
    draw = random.Random(seed)
    vocabulary = engine.model_config.text_config.vocab_size
    tokens = [token for token in range(3, vocabulary) if token != engine.model_config.image_token_id]
    prompts = [draw.choices(tokens, k=load.prompt_tokens) for _ in range(load.requests)]
    engine.generate([prompts[0]], SamplingParams(max_tokens=2, ignore_eos=True))
    before = engine.stats()
    began = time.perf_counter()
    results = engine.generate(prompts, SamplingParams(max_tokens=load.max_tokens, ignore_eos=True))
    seconds = time.perf_counter() - began
    after = engine.stats()
    answers = [result.answers[0] for result in results]
    made = sum(len(answer.ids) for answer in answers)
    prefill_end = max(answer.queue_seconds + answer.prefill_seconds for answer in answers)
    decode_seconds = max(seconds - prefill_end, 1e-9)
    steps = after["steps"] - before["steps"]
    return {
        "requests": load.requests,
        "prompt_tokens": load.prompt_tokens,
        "max_tokens": load.max_tokens,
        "seconds": seconds,
        "steps": steps,
        "overlapped_steps": after["overlapped_steps"] - before["overlapped_steps"],
        "prefill_tokens_per_second": load.requests * load.prompt_tokens / prefill_end,
        "decode_tokens_per_second": (made - load.requests) / decode_seconds if load.max_tokens > 1 else None,
        "time_to_first_token": percentiles([a.queue_seconds + a.prefill_seconds for a in answers]),
        "time_per_output_token": percentiles([a.decode_seconds / max(len(a.ids) - 1, 1) for a in answers]),
        "microseconds_per_step": {
            part: (after["seconds"][part] - before["seconds"][part]) / steps * 1e6 for part in after["seconds"]
        },
        "traffic_per_step": _traffic(before["traffic"], after["traffic"], steps),
    }


def _traffic(before: dict[str, float] | None, after: dict[str, float] | None, steps: int) -> dict[str, float] | None:
    """Collectives, bytes and seconds a step; None for one rank."""
    if before is None or after is None:
        return None
    return {name: (after[name] - before[name]) / steps for name in after}


def measure_scheduler(requests: int, steps: int = 300) -> dict[str, Any]:
    """Microseconds a decode step costs beside the model, by part, median of ``steps`` steps, with a stubbed model."""
    core = EngineCore(
        Scheduler(slots=requests, pages=requests * 64, row_budget=8192, max_length=4096), _StubRunner(requests)
    )
    backend = tokenizers.Tokenizer.from_str(packaged_file("mini", "tokenizer.json").decode())
    tokenizer = Tokenizer(backend, preset("mini"))
    for number in range(requests):
        core.add(_stub_request(number, tokenizer))
    core.step()
    parts: dict[str, list[float]] = {}
    for _ in range(steps):
        before = dict(core.stats.seconds)
        core.step()
        for part, total in core.stats.seconds.items():
            parts.setdefault(part, []).append((total - before[part]) * 1e6)
    medians = {part: statistics.median(values) for part, values in parts.items()}
    return {"requests": requests, "steps": steps, "microseconds": medians}


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 of some values."""
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in (50, 90, 99)}


class _StubRunner:
    """Answers every step at once, always with token 3."""

    def __init__(self, requests: int) -> None:
        self._hidden = torch.zeros(1, 1)
        self._logits = torch.zeros(requests, 8)
        self._logits[:, 3] = 1.0

    def set_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        pass

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        return self._hidden

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        return self._logits[: len(rows)]


def _stub_request(number: int, tokenizer: Tokenizer) -> Request:
    return Request(
        tokens=[1] * 16,
        max_length=4096,
        params=SamplingParams(max_tokens=4000),
        text=AnswerText(tokenizer, ()),
        sink=lambda delta: None,
        prompt=number,
        index=0,
        seed=0,
        ending=(2,),
        prompt_length=16,
        arrival=0.0,
    )


def describe_environment(device: torch.device, engine: str) -> dict[str, Any]:
    """Where and with what the numbers were measured; ``engine`` describes what is loaded."""
    return {
        "octavo": octavo.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "engine": engine,
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    engine, decode = report["engine"], report["engine"]["decode_tokens_per_second"]
    lines = [
        f"{engine['requests']} requests of {engine['prompt_tokens']} + {engine['max_tokens']} tokens: "
        f"{engine['seconds']:.2f} s in {engine['steps']} steps, {engine['overlapped_steps']} of them overlapped",
        f"prefill           {engine['prefill_tokens_per_second']:10.1f} tokens/s",
        f"decode            {decode:10.1f} tokens/s" if decode is not None else "decode                     -",
    ]
    for name, label in (("time_to_first_token", "first token"), ("time_per_output_token", "each later token")):
        values = "  ".join(f"{percentile} {value * 1e3:.1f} ms" for percentile, value in engine[name].items())
        lines.append(f"{label:<18}{values}")
    traffic = engine["traffic_per_step"]
    if traffic is not None:
        share = traffic["seconds"] * engine["steps"] / engine["seconds"]
        lines.append(
            f"between ranks     {traffic['collectives']:10.1f} collectives a step, {size(traffic['bytes_sent'])} sent, "
            f"{share:.0%} of rank 0's time (waiting for others included)"
        )
    lines.append(f"a step, microseconds (mean)  {_parts(engine['microseconds_per_step'])}")
    lines.append("a decode step beside the model, microseconds (model stubbed, median):")
    lines += [f"  {entry['requests']:>4} requests     {_parts(entry['microseconds'])}" for entry in report["scheduler"]]
    return lines


def _parts(microseconds: dict[str, float]) -> str:
    return "  ".join(f"{part} {value:.0f}" for part, value in microseconds.items())
