"""Prelude, body and epilogue of an engine's steps as programs to measure, on pools filled as if requests were there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.graphs.compile import input_names, leaves_of
from octavo.graphs.cuda import Recorder
from octavo.graphs.inductor import CompiledRegions, compile_regions
from octavo.graphs.program import BucketCapture, Program
from octavo.kernels.operator import OPERATORS
from octavo.kernels.paging import pages_for
from octavo.model.inputs import Tokens
from octavo.passes.base import Compilation, InputKind, PassContext
from octavo.runtime.assemble import Assembly, Progress
from octavo.runtime.bench_steps.shapes import tokens_of
from octavo.runtime.floor import StepShape
from octavo.runtime.parts import Part, body_part, classify, epilogue_part, prelude_part
from octavo.runtime.pools import Pools, Storage
from octavo.runtime.step_program import compile_part


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the three parts of a step."""

    part: Part
    compilation: Compilation
    regions: CompiledRegions | None
    resident: Mapping[str, Tensor]
    """Weights, constants and pools by path."""
    program: Program
    names: Mapping[str, str]
    """Input names of the program by path."""

    def values(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the program is given each time: pools stay where they are, and what nobody reads has no buffer."""
        named = ((self.names[path], leaf) for path, leaf in leaves_of(inputs))
        return {name: leaf for name, leaf in named if name in self.program.buffers}

    def results(self, rows: int) -> tuple[Tensor, ...]:
        """Of the last replay."""
        return tuple(self.program.view(name, rows) for name in self.program.outputs)


Run = Callable[[Stage, dict[str, Tensor], int], tuple[Tensor, ...]]
"""Runs a stage on its inputs by name for so many rows -> its program's outputs."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens, on the device."""

    shape: StepShape
    tokens: Tokens
    last: Tensor
    """[sampled] int64: the rows that sample."""


class Steps:
    """The stages of one model with one choice of backends, and the ways to run them."""

    def __init__(
        self,
        assembly: Assembly,
        pools: Pools,
        shapes: tuple[StepShape, ...],
        backends: Mapping[str, str],
        compiled: bool,
        replayed: bool,
        progress: Progress,
    ) -> None:
        """Prepared for exactly the sizes of the shapes. With ``compiled`` regions are compiled with Inductor, without
        ``replayed`` there are no buffers to replay on."""
        self._pools, self._device = pools, assembly.device
        rows = tuple(sorted({shape.rows for shape in shapes}))
        sampled = tuple(sorted({shape.sampled for shape in shapes}))
        text = assembly.config.text_config
        make = functools.partial(
            _stage, PassContext(device=assembly.device.type, backends=backends), compiled, replayed, progress
        )
        largest = max(rows[-1], assembly.chunk)
        """As an engine of this chunk compiles them, so that its artifacts are found in the cache."""
        self.prelude = make(prelude_part(assembly.prelude, pools), rows, largest)
        self.body = make(body_part(assembly.model.body, text, pools, assembly.dtype), rows, largest)
        head = epilogue_part(assembly.model.head, text, assembly.dtype, assembly.device)
        self.epilogue = make(head, sampled, sampled[-1])
        self.stages = (self.prelude, self.body, self.epilogue)

    @property
    def captures(self) -> list[BucketCapture]:
        return [capture for stage in self.stages for capture in stage.program.captures]

    def capture(self, progress: Callable[[], None]) -> None:
        """Turn all segments into CUDA graphs, in one private pool as an engine's."""
        recorder = Recorder(self._device)
        for stage in self.stages:
            stage.program.capture(recorder, progress)

    def replay(self, step: StepInputs) -> Tensor:
        """As an engine runs it: inputs into static buffers, and all instructions on them -> logits [sampled, V] F32."""
        return self.run(step, _replayed)

    def eager(self, step: StepInputs) -> Tensor:
        """The same instructions one after another, without buffers."""
        return self.run(step, lambda stage, values, rows: stage.program.run_eager(values))

    def run(self, step: StepInputs, run: Run) -> Tensor:
        """One stage after another, each as ``run`` does it -> logits."""
        rows = run(self.prelude, self.prelude_inputs(step), step.shape.rows)
        results = run(self.body, self.body_inputs(step, rows), step.shape.rows)
        return run(self.epilogue, self.epilogue_inputs(step, results), step.shape.sampled)[0]

    def prelude_inputs(self, step: StepInputs) -> dict[str, Tensor]:
        return self.prelude.values({"tokens": step.tokens, "history": self._pools.history})

    def body_inputs(self, step: StepInputs, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """From what the prelude gave."""
        tokens = step.tokens
        state = self._pools.state(tokens.slots, tokens.positions, tokens.starts)
        return self.body.values({"rows": self.prelude.part.restore(results), "state": state})

    def epilogue_inputs(self, step: StepInputs, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """From what the body gave: the hidden rows that sample."""
        return self.epilogue.values({"hidden": results[0].index_select(0, step.last)})


def _replayed(stage: Stage, values: dict[str, Tensor], rows: int) -> tuple[Tensor, ...]:
    stage.program.load(values, rows)
    return stage.program.replay(rows)


def _stage(
    context: PassContext,
    compiled: bool,
    replayed: bool,
    progress: Progress,
    part: Part,
    buckets: tuple[int, ...],
    largest_rows: int,
) -> Stage:
    compilation = compile_part(part, buckets, context).compilation
    regions = None
    if compiled:
        regions = compile_regions(
            compilation.instructions,
            device=context.device,
            largest_rows=largest_rows,
            progress=lambda done, total: progress(f"compiling {part.name}", done, total),
        )
    leaves = leaves_of(part.inputs)
    resident: dict[str, Tensor] = dict(part.module.named_parameters()) | dict(part.module.named_buffers())
    resident |= {path: leaf for path, leaf in leaves if classify(path).kind is InputKind.POOL}
    modules = regions.modules if regions is not None else None
    program = Program(compilation, resident, buckets, leaves[0][1].device, modules=modules)
    if replayed:
        program.warm_up()
    return Stage(part, compilation, regions, resident, program, input_names(compilation))


def filled_pools(assembly: Assembly) -> Pools:
    """Pools with random contents, all finite: what a step costs depends on how much is there, not on what."""
    text, capacity, device = assembly.config.text_config, assembly.capacity, assembly.device
    pools = Pools(text, capacity.sizes, capacity.storage, device)
    random = torch.Generator(device).manual_seed(0)
    for ring in (*pools.rings, *pools.pending):
        ring.normal_(generator=random)
    if capacity.storage is not Storage.PACKED:
        for pool in (*pools.entries, *pools.keys):
            pool.normal_(generator=random)
        return pools
    for pool in (*pools.entries, *pools.keys):
        pool.random_(0, 256, generator=random)
    for pool in pools.entries:
        pool[..., text.head_dim // 2 :].remainder_(64)  # scales of E4M3 below 2
    for pool in pools.keys:
        pool[..., text.index_head_dim // 2 :].remainder_(3).add_(126)  # scales of a half to two
    return pools


def step_inputs(assembly: Assembly, pools: Pools, shape: StepShape) -> StepInputs:
    """Random tokens of a step, and the page table of its requests: theirs are the first pages, one after another."""
    device, vocabulary = assembly.device, assembly.config.text_config.vocab_size
    pages = pages_for(tokens_of(shape))
    numbers = torch.arange(shape.requests * pages, dtype=torch.int32, device=device)
    pools.page_table[: shape.requests, :pages] = numbers.view(shape.requests, pages)
    row = torch.arange(shape.rows, dtype=torch.int32, device=device)
    slots, positions = row // shape.each, shape.context + row % shape.each
    live = torch.ones(shape.rows, dtype=torch.bool, device=device)
    ids = torch.randint(vocabulary, (shape.rows,), generator=torch.Generator().manual_seed(shape.rows)).to(device)
    tokens = Tokens(ids, slots, positions, torch.full_like(positions, shape.context), live, ~live)
    last = torch.arange(1, shape.requests + 1, device=device) * shape.each - 1
    return StepInputs(shape, tokens, last)


def plain_backends(backends: Iterable[str]) -> dict[str, str]:
    """By operator: PyTorch's own operations, the backend ``torch``, or the reference where there is none."""
    return {name: "torch" if "torch" in OPERATORS[name].backends else "reference" for name in backends}
