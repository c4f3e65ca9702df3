"""A program: a flat list of instructions over static buffers, and the loop that runs it.

Buffers are allocated once, at the largest bucket; every bucket works on slices of them, so addresses never change. At
the first replay of each bucket the addresses of weights, pools and buffers are noted, and compared at every later one's
start (:meth:`Program.check_addresses`). The loop knows nothing of the model.

Its phases are methods: ``warm_up`` makes the buffers, ``capture`` turns segments into CUDA graphs where there is a GPU,
``replay`` runs a step. A segment that is not captured is called in the same place, on the same buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.graphs.beside import SideStream, on_two_streams, runs_beside
from octavo.graphs.carried import carried_out, moves_rows
from octavo.graphs.cuda import Recorder
from octavo.kernels.collectives import Communicator
from octavo.passes.base import Compilation, GraphError, GraphInput, InputKind
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction, Source
from octavo.passes.plan_buffers import Buffer

Call = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Bound:
    """An instruction with its tensors for one bucket."""

    call: Call
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def run(self) -> None:
        """Compute the results and copy them into their buffers."""
        for place, value in zip(self.results, self.call(*self.operands), strict=True):
            place.copy_(value)


@dataclass(frozen=True, slots=True)
class BucketCapture:
    """What capturing one bucket took."""

    bucket: int
    segments: int
    seconds: float
    """Running it once and capturing it."""
    pool_bytes: int
    """By which the private pool grew; the largest bucket comes first, and smaller ones fit into what it left."""
    graph_bytes: int
    """Device memory of the graphs themselves."""


class Program:
    """Instructions, the tensors they work on, and their state of readiness."""

    def __init__(
        self,
        compilation: Compilation,
        resident: Mapping[str, Tensor],
        buckets: tuple[int, ...],
        device: torch.device,
        communicator: Communicator | None = None,
        modules: Mapping[int, GraphModule] | None = None,
    ) -> None:
        """``resident`` maps paths of weights, constants and pools to their tensors, which stay where they are.

        ``modules`` are run in place of the modules of some instructions, by number: compiled forms of them.
        """
        self._modules = dict(modules or {})
        self._carried: dict[GraphModule, GraphModule] = {}
        """Modules that move rows, with the communicator in them."""
        self._side: SideStream | None = None
        self._parted: dict[GraphModule, GraphModule] = {}
        """Modules with calls that run beside others, on two streams."""
        self.instructions: list[Instruction] = list(compilation.instructions)
        self.buffers: dict[str, Buffer] = dict(compilation.buffers)
        self.inputs: dict[str, GraphInput] = dict(compilation.inputs)
        self.outputs = tuple(node.name for node in compilation.graph.output_node().all_input_nodes)
        assert len(self.outputs) == len(compilation.outputs), "a tensor is given back twice"
        self.buckets = buckets
        self._communicator = communicator
        self._resident = {
            name: resident[entry.path]
            for name, entry in self.inputs.items()
            if entry.kind not in (InputKind.ROWS, InputKind.WRITES)
        }
        self._device = device
        self._sizes: dict[int, int] = {}
        """Bytes of every storage."""
        for buffer in self.buffers.values():
            size = buffer.row_bytes * buckets[-1]
            self._sizes[buffer.storage] = max(self._sizes.get(buffer.storage, 0), size)
        self._storages: dict[int, Tensor] = {}
        self._loaded = {name for name in self.buffers if name in self.inputs}
        self._bound: dict[int, list[Bound]] = {}
        self._launches: dict[int, list[Callable[[], object]]] = {}
        """What a replay calls: of each instruction a graph's launch, or its plain run."""
        self.captures: list[BucketCapture] = []
        self._views: dict[int, dict[str, Tensor]] = {}
        self._addresses: dict[int, list[int]] = {}

    @property
    def buffer_bytes(self) -> int:
        """Of static memory, as soon as the program is warm."""
        return sum(self._sizes.values())

    def warm_up(self) -> None:
        """Make the buffers and bind every bucket to its slices of them, largest first."""
        self._storages = {
            storage: torch.zeros(size, dtype=torch.uint8, device=self._device) for storage, size in self._sizes.items()
        }
        for bucket in reversed(self.buckets):
            self._views[bucket] = {name: self._view(buffer, bucket) for name, buffer in self.buffers.items()}
            self._bound[bucket] = [self._bind(instruction, bucket) for instruction in self.instructions]
            self._launches[bucket] = [bound.run for bound in self._bound[bucket]]

    def capture(self, recorder: Recorder, progress: Callable[[], None] | None = None) -> None:
        """Turn the segments of every bucket into CUDA graphs, largest bucket first; ``progress`` after each.

        Each bucket is run once before, so that kernels are compiled and workspaces exist, and replayed once after, so
        that a graph that cannot be launched ends the start and not a request. Both on dead rows: no pool changes.
        """
        with recorder.session():
            for bucket in reversed(self.buckets):
                began = time.perf_counter()
                torch.cuda.empty_cache()
                pool, reserved = recorder.pool_bytes(), torch.cuda.memory_reserved()
                free, _ = torch.cuda.mem_get_info()
                self._load_dead(bucket)
                for bound in self._bound[bucket]:
                    bound.run()
                launches = self._launches[bucket]
                for place, (instruction, bound) in enumerate(zip(self.instructions, self._bound[bucket], strict=True)):
                    if instruction.kind is PieceKind.SEGMENT:
                        launches[place] = recorder.record(bound.run, instruction.title).replay
                for launch in launches:
                    launch()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                taken = free - torch.cuda.mem_get_info()[0]
                self.captures.append(
                    BucketCapture(
                        bucket,
                        sum(instruction.kind is PieceKind.SEGMENT for instruction in self.instructions),
                        time.perf_counter() - began,
                        recorder.pool_bytes() - pool,
                        taken - (torch.cuda.memory_reserved() - reserved),
                    )
                )
                if progress is not None:
                    progress()

    def view(self, name: str, bucket: int) -> Tensor:
        """The slice of a buffer that a bucket works on."""
        return self._views[bucket][name]

    def load(self, values: Mapping[str, Tensor], bucket: int) -> None:
        """Write a step's inputs into their buffers, the live rows first, what dead rows hold behind them."""
        missing = self._loaded - set(values)
        if missing:
            raise GraphError(f"inputs without a value, whose buffers hold the last step's: {sorted(missing)}")
        for name, value in values.items():
            view = self._views[bucket][name]
            live = value.shape[0]
            view[:live].copy_(value)
            view[live:].fill_(self.inputs[name].fill)

    def launches(self, bucket: int) -> tuple[Callable[[], object], ...]:
        """What a replay calls, one for each instruction in order: to time or trace some of them."""
        return tuple(self._launches[bucket])

    def close(self) -> None:
        """Give the graphs up; nothing is replayed afterwards.

        NCCL ends no group while a graph holds one of its collectives.
        """
        self._launches.clear()

    def replay(self, bucket: int) -> tuple[Tensor, ...]:
        """Run all instructions -> the results of the program, slices of their buffers."""
        self.check_addresses(bucket)
        for launch in self._launches[bucket]:
            launch()
        return tuple(self._views[bucket][name] for name in self.outputs)

    def run_eager(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The same instructions on the values as they are: no buffers, no padding. ``values`` by input name."""
        live: dict[str, Tensor] = dict(values)
        for instruction in self.instructions:
            live.update(self._eager(instruction, live, self._resident))
            self._forget(instruction, live)
        return tuple(live[name] for name in self.outputs)

    def compare(self, values: Mapping[str, Tensor], bucket: int, row_invariant: bool = True) -> tuple[Tensor, ...]:
        """Run eagerly and replayed, one instruction after another; raise GraphError at the first difference.

        Results and all pools that an instruction writes must be equal to the bit. With ``row_invariant`` operators the
        eager run sees the live rows alone; else it sees the same padded buffers, since other heights may sum in
        another order.
        """
        live: dict[str, Tensor] = dict(values)
        self.load(values, bucket)
        if not row_invariant:
            live = {name: self._views[bucket][name] for name in values}
        for place, instruction in enumerate(self.instructions):
            pools = {o.name: self._resident[o.name] for o in instruction.operands if o.source is Source.POOL}
            copies = {name: pool.clone() for name, pool in pools.items()}
            eager = self._eager(instruction, live, {**self._resident, **copies})
            self._launches[bucket][place]()
            for name, value in eager.items():
                replayed = self._views[bucket][name][: value.shape[0]]
                self._expect_equal(instruction, name, value, replayed)
            for name, pool in pools.items():
                self._expect_equal(instruction, self.inputs[name].path, copies[name], pool)
            live.update(eager)
            self._forget(instruction, live)
        return tuple(self._views[bucket][name] for name in self.outputs)

    def poison(self) -> None:
        """Fill every buffer with bytes that read as NaN in any float type: whoever reads what nobody wrote shows it."""
        for storage in self._storages.values():
            storage.fill_(0xFF)

    def soil_dead_rows(self, live_rows: Mapping[str, int], bucket: int) -> None:
        """NaN in the dead rows of all float inputs; ``live_rows`` by input name."""
        for name, live in live_rows.items():
            view = self._views[bucket][name]
            if view.is_floating_point():
                view[live:].fill_(torch.nan)

    def _eager(
        self, instruction: Instruction, live: Mapping[str, Tensor], resident: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        operands = [
            live[operand.name] if operand.source is Source.STATIC else resident[operand.name]
            for operand in instruction.operands
        ]
        call = self._call_of(instruction)
        return dict(zip(instruction.results, call(*operands), strict=True))

    def _forget(self, instruction: Instruction, live: dict[str, Tensor]) -> None:
        """Drop the values that this instruction was the last to read."""
        for operand in instruction.operands:
            if operand.source is Source.STATIC and self.buffers[operand.name].last == instruction.number:
                live.pop(operand.name, None)

    @staticmethod
    def _expect_equal(instruction: Instruction, name: str, eager: Tensor, replayed: Tensor) -> None:
        same = eager == replayed
        if eager.is_floating_point():
            same |= eager.isnan() & replayed.isnan()
        if not bool(same.all()):
            first = (~same).nonzero()[0].tolist()
            raise GraphError(f"instruction {instruction.title}: {name} differs eager and replayed, first at {first}")

    def check_addresses(self, bucket: int) -> None:
        """Every operand lies where it lay at the first replay; a moved one would be read stale by a captured graph."""
        now = [tensor.data_ptr() for tensor in (*self._resident.values(), *self._storages.values())]
        first = self._addresses.setdefault(bucket, now)
        if now != first:
            names = [self.inputs[name].path for name in self._resident]
            names += [f"buffer storage {storage}" for storage in self._storages]
            moved = [name for name, a, b in zip(names, first, now, strict=True) if a != b]
            raise GraphError(f"moved since the first replay: {', '.join(moved)}")

    def _load_dead(self, bucket: int) -> None:
        """A step without a live row."""
        self.load({name: self._views[bucket][name][:0] for name in self._loaded}, bucket)

    def _view(self, buffer: Buffer, bucket: int) -> Tensor:
        shape = (bucket * buffer.rows_factor, *buffer.row_shape)
        count = buffer.row_bytes * bucket
        return self._storages[buffer.storage][:count].view(buffer.dtype).view(shape)

    def _bind(self, instruction: Instruction, bucket: int) -> Bound:
        operands = []
        for operand in instruction.operands:
            if operand.source is Source.STATIC:
                operands.append(self._views[bucket][operand.name])
            else:
                operands.append(self._resident[operand.name])
        results = tuple(self._views[bucket][name] for name in instruction.results)
        return Bound(self._call_of(instruction), tuple(operands), results)

    def _call_of(self, instruction: Instruction) -> Call:
        module = self._modules.get(instruction.number, instruction.module)
        if moves_rows(module):
            if self._communicator is None:
                raise GraphError(f"{instruction.title}: the program moves rows between ranks and has no communicator")
            if module not in self._carried:
                self._carried[module] = carried_out(module, self._communicator)
            module = self._carried[module]
        if self._device.type == "cuda" and runs_beside(list(module.graph.nodes)):
            self._side = self._side or SideStream(self._device)
            if module not in self._parted:
                self._parted[module] = on_two_streams(module, self._side)
            module = self._parted[module]
        return module.forward
