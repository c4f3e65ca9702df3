"""Start-up at true shapes: export and all passes of the released body take seconds."""

from __future__ import annotations

import copy
import time

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from octavo.graphs.compile import compilation_of
from octavo.model.model import empty_model
from octavo.model.presets import preset
from octavo.passes.base import LAYER, Compilation, PassContext
from octavo.passes.runner import all_passes, run_passes
from octavo.runtime.parts import body_inputs, classify
from octavo.runtime.pools import Pools, PoolSizes, Storage
from tests.conftest import ReportCount

LIMIT_SECONDS = 90
"""Far above what it takes, so that a busy machine does not fail the test; the report shows what it took."""


def test_released_config(report_count: ReportCount) -> None:
    """40 layers without weights, for one rank and for eight: all is judged, and equal layers cost little."""
    config = preset("released")
    cpu = torch.device("cpu")
    began = time.perf_counter()
    with FakeTensorMode():
        body = empty_model(config, cpu, range(config.text_config.n_routed_experts // 8)).body
        sizes = PoolSizes(slots=3, pages=5, max_pages=4)
        inputs = body_inputs(config.text_config, Pools(config.text_config, sizes, Storage.PACKED, cpu), torch.bfloat16)
        exported = compilation_of(body, inputs, classify)
    export_seconds = time.perf_counter() - began
    report_count("start-up of 40 layers: export, ms", round(export_seconds * 1e3))
    for ranks in (1, 8):
        module = GraphModule(nn.Module(), copy.deepcopy(exported.graph))
        compilation = Compilation(module, dict(exported.inputs), exported.outputs)
        began = time.perf_counter()
        results = run_passes(compilation, PassContext(ranks=ranks))
        seconds = time.perf_counter() - began
        layers = {node.meta[LAYER] for node in compilation.calls()} - {None}
        assert len(layers) == config.text_config.num_hidden_layers
        assert len(results) == len(all_passes())
        modules = {id(instruction.module) for instruction in compilation.instructions}
        assert len(modules) < len(compilation.instructions) / 3
        assert export_seconds + seconds < LIMIT_SECONDS
        report_count(f"start-up of 40 layers: passes for {ranks} ranks, ms", round(seconds * 1e3))
