"""Sampling on a device: rows by themselves, and no wait before all tokens are drawn."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from octavo import EngineConfig, SamplingParams
from octavo.runtime.assemble import assemble
from octavo.runtime.runner import Chunk, Runner
from octavo.runtime.sampler import Draw, draw_tokens, sample
from octavo.runtime.step_program import ladders
from tests.gpu.test_capturable_state import waits
from tests.runtime.test_sampler import assorted

WIDTH = 517


def test_a_token_depends_on_its_own_row_alone() -> None:
    """Again and again the same, in any company; what the host draws may differ where rounded numbers meet."""
    generator = torch.Generator().manual_seed(4)
    draws = assorted(60, generator)
    logits = 2 * torch.randn(60, WIDTH, generator=generator)
    host, device = sample(logits, draws).read(), logits.cuda()
    together = sample(device, draws).read()
    assert together == sample(device, draws).read()
    for size in (1, 7, 16):
        parts = [sample(device[low : low + size], draws[low : low + size]).read() for low in range(0, 60, size)]
        assert list(itertools.chain(*parts)) == together
    assert sum(a != b for a, b in zip(together, host, strict=True)) <= 1


def test_filters_are_the_same_in_any_company_at_the_full_vocabulary() -> None:
    generator = torch.Generator().manual_seed(6)
    device = 3 * torch.randn(20, 129_280, generator=generator).cuda()
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=5000, min_p=1e-4)
    draws = [Draw(params, row, 0, range(5 + row), 5, ()) for row in range(20)]
    together = sample(device, draws).read()
    assert [sample(device[row : row + 1], draws[row : row + 1]).read()[0] for row in range(20)] == together
    assert len(set(together)) > 10


@pytest.mark.timeout(300)
def test_a_step_waits_for_nothing_but_its_tokens() -> None:
    """From token ids to drawn tokens, replayed; :func:`sample` then reads them."""
    settings = EngineConfig(device="cuda", chunk=16, buckets="16", max_requests=4, kv_tokens=1024, compile="none")
    assembly = assemble(settings)
    runner = Runner(assembly, ladders(settings.buckets, settings.chunk, settings.max_requests, 1), "on")
    draws = [Draw(SamplingParams(temperature=0.7), row, 0, range(4), 4, ()) for row in range(2)]

    def step(start: int) -> Tensor:
        chunks = [Chunk(slot, start, [5, 6, 7, 8]) for slot in range(2)]
        return draw_tokens(runner.logits(runner.run(chunks), [3, 7]), draws)

    runner.set_pages([(0, 0, 0), (1, 0, 1)])
    step(0)
    with waits("error"):
        tokens = step(4)
    assert bool((tokens >= 0).all())


def test_nothing_waits() -> None:
    generator = torch.Generator().manual_seed(5)
    draws = [draw for draw in assorted(60, generator) if draw.params.temperature > 0.0]
    device = torch.randn(len(draws), WIDTH, generator=generator).cuda()
    draw_tokens(device, draws)
    with waits("error"):
        tokens = draw_tokens(device, draws)
    assert bool((tokens >= 0).all())
