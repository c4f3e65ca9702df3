"""Logits of a given text through an engine's runner, whatever its device, numerics and graph mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.runtime.assemble import assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.runner import Chunk, Runner
from octavo.runtime.step_program import choose_buckets
from tests.model.mini_run import relative


def teacher_forced(config: EngineConfig, ids: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Logits [len(ids), V] F32 on the CPU; ``steps`` are the numbers of tokens that each step computes."""
    assert sum(steps) == len(ids), (steps, len(ids))
    assembly = assemble(config)
    runner = Runner(assembly, {False: choose_buckets(config.buckets, config.chunk)}, config.graphs)
    runner.set_pages([(0, page, page) for page in range(assembly.capacity.sizes.pages)])
    logits, start = [], 0
    for count in steps:
        hidden = runner.run([Chunk(0, start, list(ids[start : start + count]))])
        logits.append(runner.logits(hidden, list(range(count))).float().cpu().clone())
        start += count
    return torch.cat(logits)


def judge_fast(logits: Tensor, reference: Tensor) -> str:
    """What is wrong with logits of numerics ``fast``, nothing if they are within the limits (design section 8)."""
    error = relative(logits, reference)
    agreement = (logits.argmax(1) == reference.argmax(1)).double().mean()
    found = f"relative L2 median {error.median():.3f}, largest {error.max():.3f}, top-1 agreement {agreement:.2f}"
    return "" if error.median() <= 0.1 and error.max() <= 0.2 and agreement >= 0.85 else found
