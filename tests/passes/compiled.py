"""Bodies compiled for tests, batches for them, and what ranks compute: exported once, copied for every use."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from octavo.graphs.buckets import bucket_for, local_rows
from octavo.graphs.compile import compilation_of, input_names
from octavo.graphs.emulation import EmulatedCommunicator, run_ranks
from octavo.graphs.program import Program
from octavo.kernels.collectives import Capturable, Communicator, gather_rows, reduce_rows
from octavo.kernels.experts import experts
from octavo.model.config import ModelConfig
from octavo.model.inputs import Rows
from octavo.model.model import Model, empty_model
from octavo.model.presets import preset
from octavo.model.random_weights import randomise
from octavo.passes.base import Compilation, Pass, PassContext, operator_of
from octavo.passes.normalise import Normalise
from octavo.passes.runner import all_passes, run_passes
from octavo.runtime.parts import body_inputs, classify
from octavo.runtime.pools import Pools, PoolSizes, Storage

CPU = torch.device("cpu")
SIZES = PoolSizes(slots=4, pages=80, max_pages=20)
"""Room for four requests of 1280 tokens."""
BUCKETS = (1, 2, 4, 8, 16, 24, 64)
FUSED = PassContext(backends={"mhc_site": "triton", "linear_f8_pair": "triton"})
"""As on a device that has kernels for all that can be fused."""

Edit = Callable[[Compilation], None]


@cache
def config() -> ModelConfig:
    return preset("mini")


@cache
def model() -> Model:
    """The mini model with all its experts."""
    made = empty_model(config(), CPU)
    randomise(made.official_parameters(), 0)
    return made


def resident_experts(rank: int, ranks: int) -> range:
    count = config().text_config.n_routed_experts
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def export_body(experts: range, device: torch.device = CPU) -> Compilation:
    """The body of a rank that holds these experts; its weights do not matter, nor, if they are fake, whether there is
    such a device.
    """
    body = empty_model(config(), device, experts).body
    inputs = body_inputs(config().text_config, Pools(config().text_config, SIZES, Storage.BF16, device), torch.bfloat16)
    return compilation_of(body, inputs, classify)


@cache
def _exported(ranks: int) -> Compilation:
    return export_body(resident_experts(0, ranks))


def fresh(ranks: int = 1, rank: int = 0) -> Compilation:
    """A compilation no pass has seen. Ranks differ in the first expert alone: one export serves them all."""
    source = _exported(ranks)
    module = GraphModule(nn.Module(), copy.deepcopy(source.graph))
    place = [argument.name for argument in experts.overload._schema.arguments].index("first_expert")
    for node in module.graph.nodes:
        if operator_of(node) is experts:
            node.update_arg(place, resident_experts(rank, ranks).start)
    module.recompile()
    return Compilation(module, dict(source.inputs), source.outputs)


def run_all(
    compilation: Compilation, context: PassContext, edits: dict[str, Edit] | None = None, last: str = "prove"
) -> Compilation:
    """All passes up to ``last``, with the edits made behind the passes that they are named after."""
    passes = all_passes()
    passes = passes[: [each.name for each in passes].index(last) + 1]
    used = set()

    def after(each: Pass, seen: Compilation) -> None:
        if edits and each.name in edits:
            used.add(each.name)
            edits[each.name](seen)

    run_passes(compilation, context, passes=passes, after=after)
    assert used == set(edits or {}), "an edit was not made"
    return compilation


@cache
def compiled(
    ranks: int = 1,
    rank: int = 0,
    sharded: bool = True,
    capturable: frozenset[str] | None = None,
    captured: bool = False,
    replicated_experts: bool = False,
) -> Compilation:
    """Finished, shared by all tests: not to be changed. ``captured``: collectives may stand in segments."""
    context = PassContext(
        ranks=ranks,
        sharded=sharded,
        capturable=capturable,
        replicated_experts=replicated_experts,
        collectives=Capturable(captured, "as the test says"),
    )
    return run_all(fresh() if replicated_experts else fresh(ranks, rank), context)


def normal() -> Compilation:
    """In the form that passes behind ``normalise`` are given."""
    compilation = fresh()
    run_passes(compilation, PassContext(), passes=[Normalise()])
    return compilation


def fused(ranks: int = 1, rank: int = 0) -> Compilation:
    """Fused, and through all other passes with the reference."""
    compilation = fresh(ranks, rank)
    run_passes(compilation, FUSED, passes=all_passes()[:2])
    run_passes(compilation, PassContext(ranks=ranks), passes=all_passes()[2:])
    return compilation


def layer_nodes(compilation: Compilation, name: str, layer: int | None = None) -> list[Node]:
    """Calls of an operator, in order."""
    found = []
    for node in compilation.calls():
        known = operator_of(node)
        if known is not None and known.name == name and layer in (None, node.meta.get("layer")):
            found.append(node)
    return found


def collectives(compilation: Compilation) -> list[Node]:
    return [node for node in compilation.calls() if operator_of(node) in (gather_rows, reduce_rows)]


@dataclass(frozen=True)
class Batch:
    """Rows in global order and their write metadata."""

    rows: Rows
    slots: Tensor
    positions: Tensor
    starts: Tensor

    @property
    def count(self) -> int:
        return len(self.slots)

    def values(self, rank: int, ranks: int, sharded: bool) -> dict[str, Tensor]:
        """What a rank loads, by input path."""
        whole = self.rows
        rows = {
            "rows.embeds": whole.embeds,
            "rows.slots": whole.slots,
            "rows.positions": whole.positions,
            "rows.live": whole.live,
            "rows.image": whole.image,
        }
        rows |= {f"rows.engram.{place}": value for place, value in enumerate(self.rows.engram)}
        if sharded:
            rows = {path: value[rank::ranks] for path, value in rows.items()}
        written = {"slots": self.slots, "positions": self.positions, "starts": self.starts}
        return rows | {f"state.write_{name}": value for name, value in written.items()}


def batch(lengths: Sequence[int], starts: Sequence[int] | None = None, seed: int = 0) -> Batch:
    """One request a length, in slots of their own; some rows belong to images."""
    starts = starts if starts is not None else [0] * len(lengths)
    text = config().text_config
    generator = torch.Generator().manual_seed(seed)
    requests = list(enumerate(zip(lengths, starts, strict=True)))
    slots = torch.tensor([slot for slot, (length, _) in requests for _ in range(length)], dtype=torch.int32)
    positions = torch.tensor([s + i for _, (length, s) in requests for i in range(length)], dtype=torch.int32)
    firsts = torch.tensor([start for _, (length, start) in requests for _ in range(length)], dtype=torch.int32)
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    count = len(slots)

    def draw(width: int) -> Tensor:
        return torch.randn(count, width, generator=generator).bfloat16()

    image = torch.rand(count, generator=generator) < 0.2
    live = torch.ones(count, dtype=torch.bool)
    rows = Rows(draw(text.hidden_size), slots, positions, live, image, [draw(columns) for _ in text.engram_layer_ids])
    return Batch(rows, slots, positions, firsts)


def new_pools() -> Pools:
    """Empty pools whose pages are dealt to the slots in a scrambled order."""
    pools = Pools(config().text_config, SIZES, Storage.BF16, CPU)
    order = torch.randperm(SIZES.pages, generator=torch.Generator().manual_seed(5))
    pools.page_table[:] = order.view(SIZES.slots, SIZES.max_pages).int()
    return pools


def state_tensors(pools: Pools) -> dict[str, Tensor]:
    groups = {"rings": pools.rings, "entries": pools.entries, "keys": pools.keys, "pending": pools.pending}
    named = {f"state.{name}.{place}": t for name, group in groups.items() for place, t in enumerate(group)}
    return named | {"state.page_table": pools.page_table}


def state_digest(pools: Pools) -> str:
    digest = hashlib.blake2b()
    for tensor in state_tensors(pools).values():
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def copied(pools: Pools) -> Pools:
    return copy.deepcopy(pools)


def body_outputs(work: Batch, pools: Pools) -> list[Tensor]:
    """What the module computes; the pools move on."""
    with torch.no_grad():
        output = model().body(work.rows, pools.state(work.slots, work.positions, work.starts))
    return [output.hidden, *output.features]


def resident_tensors(rank: int, ranks: int, pools: Pools) -> dict[str, Tensor]:
    """Weights, constants and pools by path; of the experts only this rank's."""
    body = model().body
    mine = resident_experts(rank, ranks)
    named = {
        path: value[mine.start : mine.stop] if ".ffn.experts." in path else value
        for path, value in body.named_parameters()
    }
    return named | dict(body.named_buffers()) | state_tensors(pools)


class RankProgram:
    """One rank's program over its pools."""

    def __init__(
        self,
        pools: Pools,
        *,
        ranks: int = 1,
        rank: int = 0,
        sharded: bool = True,
        buckets: tuple[int, ...] = BUCKETS,
        communicator: Communicator | None = None,
        compilation: Compilation | None = None,
        all_experts: bool = False,
    ) -> None:
        compilation = compilation or compiled(ranks, rank, sharded)
        self.rank, self.ranks, self.sharded = rank, ranks, sharded
        self.resident = resident_tensors(0, 1, pools) if all_experts else resident_tensors(rank, ranks, pools)
        self.program = Program(compilation, self.resident, buckets, CPU, communicator)
        self.names = input_names(compilation)
        self.program.warm_up()

    def step(self, work: Batch, bucket: int | None = None) -> list[Tensor]:
        """Replay one batch -> this rank's live rows of every result."""
        needed = local_rows(work.count, self.ranks) if self.sharded else work.count
        bucket = bucket or bucket_for(needed, self.program.buckets)
        assert bucket is not None, f"no bucket for {needed} rows"
        values = work.values(self.rank, self.ranks, self.sharded)
        with torch.no_grad():
            self.program.load({self.names[p]: v for p, v in values.items() if p in self.names}, bucket)
            live = len(values["rows.slots"])
            return [result[:live].clone() for result in self.program.replay(bucket)]


@dataclass(frozen=True)
class StepResult:
    """What one rank has after a step."""

    outputs: list[Tensor]
    state: str
    """Digest of all its pools."""


def run_on_ranks(
    steps: Sequence[Batch],
    ranks: int,
    sharded: bool,
    *,
    buckets: tuple[int, ...] = BUCKETS,
    wrap: Callable[[EmulatedCommunicator], Communicator] | None = None,
    captured: bool = False,
    replicated_experts: bool = False,
    compilations: Sequence[Compilation] = (),
) -> tuple[list[list[StepResult]], list[Pools]]:
    """Replay the steps in turn on emulated ranks -> results by rank and step; and every rank's pools.

    ``compilations`` are the ranks' own where they are not :func:`compiled` as the other arguments say.
    """
    pools = [new_pools() for _ in range(ranks)]
    compilations = compilations or [
        compiled(ranks, rank, sharded, captured=captured, replicated_experts=replicated_experts)
        for rank in range(ranks)
    ]

    def work(communicator: EmulatedCommunicator) -> list[StepResult]:
        rank = communicator.rank
        program = RankProgram(
            pools[rank],
            ranks=ranks,
            rank=rank,
            sharded=sharded,
            buckets=buckets,
            communicator=wrap(communicator) if wrap else communicator,
            compilation=compilations[rank],
            all_experts=replicated_experts,
        )
        return [StepResult(program.step(each), state_digest(pools[rank])) for each in steps]

    return run_ranks(ranks, work), pools


def global_rows(by_rank: Sequence[Tensor], count: int, sharded: bool) -> Tensor:
    """Results of all ranks -> rows in global order. Replicated rows must agree."""
    if not sharded:
        assert all(torch.equal(by_rank[0], other) for other in by_rank), "ranks disagree"
        return by_rank[0]
    joined = by_rank[0].new_empty(count, *by_rank[0].shape[1:])
    for rank, rows in enumerate(by_rank):
        joined[rank :: len(by_rank)] = rows
    return joined


def differences(expected: Sequence[Tensor], actual: Sequence[Tensor], left: Pools, right: Pools) -> list[str]:
    """Names of results and pools that are not equal to the bit."""
    found = [f"result {place}" for place, (a, b) in enumerate(zip(expected, actual, strict=True)) if not _same(a, b)]
    mine, other = state_tensors(left), state_tensors(right)
    return found + [name for name in mine if not _same(mine[name], other[name])]


def _same(left: Tensor, right: Tensor) -> bool:
    """Equal bytes, so that NaN and the sign of zero count."""
    if left.shape != right.shape or left.dtype is not right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def changed_instruction(compilation: Compilation, place: int, **changes: Any) -> None:
    compilation.instructions[place] = replace(compilation.instructions[place], **changes)
