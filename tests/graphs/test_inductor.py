"""Compiled regions compute what their operators compute, at every number of rows, with one artifact for each kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_inductor_cache
from torch.fx import Node
from torch.fx.node import map_arg

from octavo.errors import OctavoError
from octavo.graphs import inductor
from octavo.graphs.inductor import CompiledRegion, CompiledRegions, compile_regions, probe_casts
from octavo.graphs.regions import Compilable, compilable_backend, find_regions
from octavo.kernels.operator import Backend
from octavo.passes.base import VALUE, GraphError, PassContext, backend_of, operator_of
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction
from octavo.passes.runner import run_passes
from tests.conftest import ReportCount
from tests.graphs.mini_program import export
from tests.passes.compiled import RankProgram, batch, compiled, new_pools

ROWS = (1, 2, 3, 16, 61, 300)
LARGEST = 512
NAMES = ("mhc_collapse", "rms_norm", "mhc_expand")


def declared(*names: str, function: Callable[..., object] | None = None) -> Compilable:
    """A rule by which these operators are compilable, through another function if one is given."""

    def compilable(node: Node) -> Backend | None:
        known = operator_of(node)
        if known is None or known.name not in names:
            return None
        backend = backend_of(node)
        return replace(backend, function=function or backend.function)

    return compilable


def compile_named(instructions: list[Instruction], *names: str, **changes: Any) -> CompiledRegions:
    return compile_regions(
        instructions, **{"device": "cpu", "largest_rows": LARGEST, "compilable": declared(*names), **changes}
    )


def compile_two_layers(*names: str) -> list[bool]:
    """Of a smaller model: which kinds are found in the cache."""
    compilation = export(layers=2)
    run_passes(compilation, PassContext())
    return [kind.cached for kind in compile_named(compilation.instructions, *names).kinds]


@pytest.fixture(scope="module", autouse=True)
def empty_cache() -> Iterator[None]:
    """Inductor's cache on disk, empty at first, for these tests and the processes that they start."""
    with fresh_inductor_cache():
        yield


@pytest.fixture(scope="module")
def made() -> CompiledRegions:
    return compile_named(compiled().instructions, *NAMES)


def artifacts(made: CompiledRegions, instructions: list[Instruction]) -> dict[Node, CompiledRegion]:
    """The artifact in the place of each node; all other nodes are as they were."""
    found = {}
    for instruction in instructions:
        if instruction.number in made.modules:
            module = made.modules[instruction.number]
            for node, copy in zip(instruction.module.graph.nodes, module.graph.nodes, strict=True):
                if copy.op == "call_module":
                    artifact = module.get_submodule(str(copy.target))
                    assert isinstance(artifact, CompiledRegion)
                    found[node] = artifact
                else:
                    assert (copy.op, copy.target) == (node.op, node.target)
    return found


def operands_of(node: Node, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    operands = []
    for operand in node.all_input_nodes:
        value = operand.meta[VALUE]
        extents = [extent if isinstance(extent, int) else rows for extent in value.shape]
        operands.append(torch.randn(extents, generator=generator).to(value.dtype))
    return operands


def eager(node: Node, operands: list[Tensor]) -> tuple[Tensor, ...]:
    values = dict(zip(node.all_input_nodes, operands, strict=True))
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    result = node.target(*args, **kwargs)
    return (result,) if isinstance(result, Tensor) else result


def test_artifacts_equal_operators(made: CompiledRegions, report_count: ReportCount) -> None:
    """Within two BF16 ulp, 2 * 2^-7 relative: sums over channels in another order, or a rounding inside that is left
    out, may move the one result to its neighbour and the next product too. F32 sums that cancel add 1e-5.
    """
    compared = 0
    by_artifact = {artifact: node for node, artifact in artifacts(made, compiled().instructions).items()}
    for artifact, node in by_artifact.items():
        for rows in ROWS:
            operands = operands_of(node, rows)
            actual = artifact(*operands)
            (expected,) = eager(node, operands)
            assert actual.is_contiguous()
            torch.testing.assert_close(actual, expected, rtol=2 * 2**-7, atol=1e-5)
            compared += 1
    assert compared == len(NAMES) * len(ROWS)
    report_count("compiled regions: results compared with eager ones", compared)


def test_kinds_are_few(made: CompiledRegions) -> None:
    """Forty layers compile what one does: kinds are counted, and every node of the program has its artifact."""
    calls = [node for i in compiled().instructions for node in i.module.graph.nodes if declared(*NAMES)(node)]
    assert sorted(kind.name for kind in made.kinds) == sorted(f"{name}.reference" for name in NAMES)
    assert sum(kind.count for kind in made.kinds) == len(calls) == 51
    assert not any(kind.cached for kind in made.kinds)
    assert all(kind.seconds > 0 for kind in made.kinds) and made.seconds > sum(kind.seconds for kind in made.kinds)
    assert made.describe().startswith("51 regions of 3 kinds compiled in ")


def test_modules_stay_as_they_were(made: CompiledRegions) -> None:
    """The dump and the proof read the originals. Equal instructions share one replaced module."""
    found = artifacts(made, compiled().instructions)
    segments = [each for each in compiled().instructions if each.kind is PieceKind.SEGMENT]
    assert sorted(made.modules) == [each.number for each in segments]
    for each in segments:
        assert all(node.op != "call_module" for node in each.module.graph.nodes)
        assert made.modules[each.number] is not each.module
        assert all((node in found) == bool(declared(*NAMES)(node)) for node in each.module.graph.nodes)
    originals = {each.module: made.modules[each.number] for each in segments}
    assert len(set(originals.values())) == len(originals) < len(segments)


def test_program_with_artifacts(made: CompiledRegions) -> None:
    """Ten layers replayed with and without artifacts: relative L2 of a row at most 0.1, the median that the mode
    ``fast`` is allowed; rounding differences pass through quantisers.
    """
    compilation = compiled()
    instructions = [replace(i, module=made.modules.get(i.number, i.module)) for i in compilation.instructions]
    plain = RankProgram(new_pools())
    replaced = RankProgram(new_pools(), compilation=replace(compilation, instructions=instructions))
    for lengths, starts in (([1], [0]), ([2, 9, 50], [1, 0, 0]), ([1, 1, 1], [3, 9, 50])):
        step = batch(lengths, starts)
        for expected, actual in zip(plain.step(step), replaced.step(step), strict=True):
            difference = (actual.double() - expected.double()).flatten(1).norm(dim=1)
            assert float((difference / expected.double().flatten(1).norm(dim=1)).max()) < 0.1


def test_several_results() -> None:
    """Unpacking nodes stay; operands that lie differently are put right; results have the operator's dtypes."""

    def function(
        streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, epsilon: float, norm_epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        pre = streams.sum(2, dtype=torch.float32) * scale[0] + epsilon
        return pre, pre.cos() * iterations, (pre.unsqueeze(2) * pre.unsqueeze(1)).transpose(1, 2)

    instructions = compiled().instructions
    compilable = declared("mhc_mix", function=function)
    made = compile_regions(instructions, device="cpu", largest_rows=LARGEST, compilable=compilable)
    node, artifact = next(iter(artifacts(made, instructions).items()))
    streams, fn, scale, base = operands_of(node, 5)
    scattered = streams.transpose(0, 2).contiguous().transpose(0, 2)
    assert not scattered.is_contiguous()
    iterations, epsilon, norm_epsilon = [value for value in node.args if not isinstance(value, Node)]
    assert isinstance(iterations, int) and isinstance(epsilon, float) and isinstance(norm_epsilon, float)
    results = artifact(scattered, fn, scale, base)
    expectations = function(streams, fn, scale, base, iterations, epsilon, norm_epsilon)
    for actual, expected in zip(results, expectations, strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # F32, sums in another order


def test_more_rows_than_promised(made: CompiledRegions) -> None:
    node, artifact = next(iter(artifacts(made, compiled().instructions).items()))
    artifact(*operands_of(node, LARGEST))
    with pytest.raises(GraphError, match="compiled for at most 512 rows, and 513 came"):
        artifact(*operands_of(node, LARGEST + 1))


def test_second_start_compiles_nothing(made: CompiledRegions) -> None:
    """Nor does a smaller model, whose symbols had other names when it was exported."""
    assert all(kind.cached for kind in compile_named(compiled().instructions, *NAMES).kinds)
    assert compile_two_layers(*NAMES) == [True] * len(NAMES)


def test_second_process_compiles_nothing(made: CompiledRegions) -> None:
    """Two equal processes: torch's key names the module through which torch was imported first, so neither has to find
    what this one compiled.
    """
    script = "from tests.graphs.test_inductor import compile_two_layers; print(compile_two_layers('rms_norm'))"
    command, project = [sys.executable, "-c", script], Path(__file__).parents[2]
    subprocess.run(command, cwd=project, check=True)
    second = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert second.stdout == "[True]\n"


def test_largest_rows_is_part_of_the_cache_key(made: CompiledRegions) -> None:
    """Inductor chooses the width of indices by the range of the row symbol, and its key has no ranges."""
    (kind,) = compile_named(compiled().instructions, "rms_norm", largest_rows=1 << 20).kinds
    assert not kind.cached


def test_progress_and_configuration() -> None:
    before = inductor_config.get_config_copy()
    seen: list[tuple[int, int]] = []
    compile_named(compiled().instructions, "rms_norm", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]
    assert inductor_config.get_config_copy() == before


def test_default_rule() -> None:
    """A backend says whether it is compilable."""
    for node in (node for i in compiled().instructions for node in i.module.graph.nodes):
        backend = compilable_backend(node)
        assert (backend is not None) == (operator_of(node) is not None and backend_of(node).compilable)
    breaks = [i for i in compiled().instructions if i.kind is not PieceKind.SEGMENT]
    assert find_regions(breaks, declared(*NAMES, "publish", "select")) == []


def _selects(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return streams[pre[:, 0] > 0].sum(1)


def _reads(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return streams.sum(1) * float(pre.max())


def _branches(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return streams.sum(1) if streams.shape[0] > 8 else streams.amax(1)


def _brings(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return streams.sum(1) * torch.tensor([1.0, 2.0], device=streams.device).sum().bfloat16()


@pytest.mark.parametrize("function", [_selects, _reads, _branches, _brings])
def test_functions_that_cannot_be_compiled(function: Callable[..., object], made: CompiledRegions) -> None:
    """Shapes or branches that depend on data or on the number of rows, and data from the host."""
    with pytest.raises(OctavoError, match=r"mhc_collapse.reference \(layer 0\) cannot be compiled: .*--compile none"):
        compile_named(compiled().instructions, compilable=declared("mhc_collapse", function=function))


def test_function_that_its_fake_belies(made: CompiledRegions) -> None:
    def function(streams: Tensor, pre: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return streams.sum(1, dtype=torch.float32)

    with pytest.raises(
        GraphError, match=r"torch.float32\[r, 128\], and its fake implementation torch.bfloat16\[r, 128\]"
    ):
        compile_named(compiled().instructions, compilable=declared("mhc_collapse", function=function))


def test_probe_of_casts() -> None:
    """It says whether a compiled round trip through BF16 gives eager's bits, on other numbers than its own."""

    def round_trip(x: Tensor) -> Tensor:
        return (x.float() * 1.7).bfloat16().float() * 3.3

    x = torch.linspace(-4, 4, 1000).bfloat16()
    compiled = torch.compile(round_trip, options={"emulate_precision_casts": True})
    assert probe_casts("cpu") is bool(compiled(x).equal(round_trip(x)))


def test_no_compiler_for_the_cpu() -> None:
    with (
        inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(
            OctavoError, match=r"needs a C\+\+ compiler, and there is none of no-such-compiler.*--compile none"
        ),
    ):
        compile_named(compiled().instructions, *NAMES)


def test_no_triton_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "find_spec", lambda name: None)
    with pytest.raises(OctavoError, match=r"needs triton, which is not installed.*--compile none"):
        compile_named(compiled().instructions, *NAMES, device="cuda")
