"""The shared expert on a second stream beside the routed ones: the same bits, however the two are begun."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from octavo import kernels
from octavo.graphs.beside import SideStream, on_two_streams, runs_beside
from octavo.kernels.choice import choose_backends
from octavo.runtime.bench_trace import record
from tests.gpu.test_triton_experts import true_shapes

DEVICE = torch.device("cuda", 0)


def layer(backend: str) -> GraphModule:
    """x, and arguments of both operators by name -> their sum, six layers one after another."""
    graph = Graph()
    x = graph.placeholder("x")
    given = {name: graph.placeholder(name) for name in NAMES}
    shared = [given[f"shared_{name}"] for name in ("w1", "s1", "w2", "s2", "w3", "s3")]
    routed = [given[name] for name in NAMES if not name.startswith("shared_")]
    for _ in range(6):
        first = graph.call_function(kernels.shared_expert.backends[backend].overload, (x, *shared, 10.0))
        partial = graph.call_function(kernels.experts.backends[backend].overload, (x, *routed, 0, 6, 1.5, 10.0))
        combined = graph.call_function(kernels.combine.overload, (partial, first))
        x = graph.call_function(torch.ops.aten.add.Tensor, (x, combined))
    graph.output((x,))
    return GraphModule({}, graph)


NAMES = (
    *("live", "image", "gate", "bias", "bias_vl", "w1", "s1", "w2", "s2", "w3", "s3"),
    *(f"shared_{name}" for name in ("w1", "s1", "w2", "s2", "w3", "s3")),
)


def arguments(rows: int) -> list[Tensor]:
    given: dict[str, Any] = true_shapes(rows, resident=8)
    random = torch.Generator("cuda").manual_seed(1)
    for name, shape in (("1", (2304, 5120)), ("2", (5120, 2304)), ("3", (2304, 5120))):
        codes = torch.randn(shape, device=DEVICE, generator=random) * 64 * shape[1] ** -0.5
        tiles = torch.randint(119, 124, (shape[0] // 32, shape[1] // 32), device=DEVICE, generator=random)
        given |= {f"shared_w{name}": codes.to(torch.float8_e4m3fn), f"shared_s{name}": tiles.to(torch.uint8)}
    return [given["x"], *(given[name] for name in NAMES)]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 16, 130, 700, 1500, 6000])
def test_the_same_bits(rows: int) -> None:
    """Called, captured, and replayed ten times."""
    choose_backends("fast", "cuda")
    module, given = layer("triton"), arguments(rows)
    assert len(runs_beside(list(module.graph.nodes))) == 6
    parted = on_two_streams(module, SideStream(DEVICE))
    (expected,) = module(*given)
    assert torch.equal(parted(*given)[0], expected) and expected.isfinite().all()
    graphs, results = {}, {}
    for name, call in (("one", module), ("two", parted)):
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            (results[name],) = call(*given)
        for _ in range(10):
            results[name].fill_(torch.nan)
            graphs[name].replay()
            assert torch.equal(results[name], expected), name
    traced = record({name: graph.replay for name, graph in graphs.items()}, DEVICE)
    assert len(traced["two"].work) == len(traced["one"].work) + 6, "a fill begins every branch, and nothing else is new"
    span = {name: max(stop for _, stop in one.work) - one.work[0][0] for name, one in traced.items()}
    print(f"{rows} rows: {1e6 * span['one'] / 6:.1f} us a layer on one stream, {1e6 * span['two'] / 6:.1f} on two")
