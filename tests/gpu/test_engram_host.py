"""Engram tables in host memory that a GPU reads over the bus: the same answers, in captured graphs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import Engine, EngineConfig, OctavoError, SamplingParams, kernels
from octavo.kernels.choice import choose_backends
from octavo.runtime.bus_memory import seen_from
from tests.gpu.test_capturable_state import waits


def test_lookups_are_the_hosts() -> None:
    """Called without a wait, captured and replayed; what the host writes is seen by the next kernel."""
    assert choose_backends("fast", "cuda")["engram_lookup"] == "triton"
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 120, (4096 * 256,), dtype=torch.uint8, generator=generator)
    scale = torch.randint(115, 125, (4096, 8), dtype=torch.uint8, generator=generator)
    rows = torch.randint(0, 4096, (33, 5), generator=generator)
    table, lookup = seen_from(torch.device("cuda:0"), memory), kernels.engram_lookup.backends["triton"].overload
    assert table.is_cuda and table.data_ptr() and torch.equal(table.cpu(), memory)
    codes, on_device = table.view(torch.float8_e4m3fn).view(-1, 256), (scale.cuda(), rows.cuda(), torch.bfloat16)

    def expected() -> torch.Tensor:
        return kernels.engram_lookup.reference(
            memory.view(torch.float8_e4m3fn).view(-1, 256), scale, rows, torch.bfloat16
        )

    lookup(codes, *on_device)
    with waits("error"):
        found = lookup(codes, *on_device)
    assert torch.equal(found.cpu(), expected())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lookup(codes, *on_device)
    memory.copy_(memory.flip(0))
    graph.replay()
    assert torch.equal(captured.cpu(), expected()) and not torch.equal(captured, found)


def test_memory_can_be_locked_again_when_nothing_holds_it() -> None:
    memory, device = torch.zeros(1 << 20, dtype=torch.uint8), torch.device("cuda:0")
    view = seen_from(device, memory)
    with pytest.raises(OctavoError, match=r"cannot be locked for the GPU \(CUDA error \d+\).*Use --engram mmap"):
        seen_from(device, memory)
    del view
    gc.collect()
    assert seen_from(device, memory).is_cuda


@pytest.mark.timeout(300)
def test_an_engine_needs_no_break_for_them(tmp_path: Path) -> None:
    prompts, found = [[300 + i] * (3 + 20 * i) for i in range(3)], {}
    for engram in ("device", "host"):
        fields: dict[str, Any] = {"engram": engram, "buckets": "16,64", "dump_dir": tmp_path / engram}
        settings = EngineConfig(device="cuda", compile="none", chunk=64, max_requests=8, kv_tokens=4096, **fields)
        with Engine(settings) as engine:
            found[engram] = [r.ids for r in engine.generate(prompts, SamplingParams(max_tokens=6))]
        report = json.loads((tmp_path / engram / "prelude" / "report.json").read_text())
        assert [piece["kind"] for piece in report["pieces"]] == ["segment"], engram
    assert found["device"] == found["host"]
