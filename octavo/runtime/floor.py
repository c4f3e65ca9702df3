"""The floor of a step on an H200: what no implementation can go below, by component, from the configuration alone.

Each component of each layer must move some bytes and multiply some numbers, at the datasheet's rates; the slower of the
two bounds it, and the bounds are summed (spec/performance.md, conventions and 1.1). Weights count as they are stored:
F8 matrices and F4 experts with their scales, head, router and compressor in BF16. Values that pass from one component
to the next are written by the one and read by the other, in BF16; what stays inside a component costs nothing. Rows
that choose experts elsewhere skip them: R rows make R x (experts a token) x (resident share) pairs on average, if they
are dealt evenly. A floor can count what routers chose in fact instead.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import UsageError
from octavo.graphs.tables import size, table
from octavo.kernels.storage import packed_entry_bytes, packed_key_bytes
from octavo.model.config import SCALE_BLOCK, TextConfig
from octavo.model.plan import LayerPlan, plan_layers
from octavo.runtime.bench_kernels.case import BF16_PER_SECOND, BYTES_PER_SECOND, FP8_PER_SECOND
from octavo.runtime.pools import Storage

_BF16_BYTES, _F32_BYTES = 2, 4


class Component(enum.Enum):
    """What a step consists of, in the order of the model."""

    EMBEDDING = "embedding"
    ENGRAM = "Engram"
    MHC = "mHC"
    PROJECTIONS = "projections"
    COMPRESSOR = "compressor"
    INDEX_PROJECTIONS = "index projections"
    INDEX_SCORING = "index scoring"
    ATTENTION = "attention"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared expert"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Rows of a step. Raises :class:`UsageError` unless every request brings the same number of them."""

    rows: int
    requests: int = 1
    context: int = 0
    """Tokens of each request before the step."""
    sampled: int = 1
    """Rows whose logits are computed."""

    def __post_init__(self) -> None:
        if self.requests < 1 or self.rows < self.requests or self.rows % self.requests:
            raise UsageError(f"{self.rows} rows of {self.requests} requests: each brings as many rows, one at least")

    @property
    def each(self) -> int:
        """Rows of a request."""
        return self.rows // self.requests

    def visible(self, ratio: int, most: int | None = None) -> int:
        """Entries of ``ratio`` tokens that all rows see together, of which each takes ``most``; its own included."""
        counts = (position // ratio for position in range(self.context + 1, self.context + self.each + 1))
        return self.requests * sum(count if most is None else min(count, most) for count in counts)

    def present(self, ratio: int) -> int:
        """Entries of ``ratio`` tokens that all requests have together after the step."""
        return self.requests * ((self.context + self.each) // ratio)


@dataclass(frozen=True, slots=True)
class Routing:
    """What one layer's router deals to resident experts."""

    pairs: float
    """Of row and resident expert."""
    experts: float
    """Resident ones that some row chooses."""


@dataclass(frozen=True, slots=True)
class Part:
    """One component in one layer."""

    component: Component
    layer: int | None
    bytes: float
    """That must be read and written, each once."""
    operations: float
    """Floating-point operations: two for a multiplication and its addition."""
    operations_per_second: float = BF16_PER_SECOND

    @property
    def seconds(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.operations / self.operations_per_second)


@dataclass(frozen=True, slots=True)
class ComponentFloor:
    """One component in all layers together."""

    component: Component
    bytes: float
    operations: float
    operations_per_second: float
    seconds: float
    """Of the layers' floors."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of a step and what it is made of."""

    shape: StepShape
    routing: Routing
    """On average over the layers."""
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def components(self) -> list[ComponentFloor]:
        """By component, in the order of the model; those that the model lacks are missing."""
        found = []
        for component in Component:
            mine = [part for part in self.parts if part.component is component]
            if mine:
                found.append(
                    ComponentFloor(
                        component,
                        sum(part.bytes for part in mine),
                        sum(part.operations for part in mine),
                        mine[0].operations_per_second,
                        sum(part.seconds for part in mine),
                    )
                )
        return found

    def describe(self) -> list[str]:
        """The parts as a table."""
        rows = [
            (
                floor.component.value,
                size(floor.bytes),
                f"{floor.operations / 1e9:,.1f}",
                f"{floor.operations_per_second / 1e12:,.0f}",
                f"{floor.seconds * 1e3:,.3f}",
            )
            for floor in self.components()
        ]
        headings = ("component", "bytes", "GFLOP", "peak TFLOP/s", "floor ms")
        return table(headings, [*rows, ("all", "", "", "", f"{self.seconds * 1e3:,.3f}")], right="|".join(headings[1:]))


def step_floor(
    text: TextConfig,
    shape: StepShape,
    experts: int | None = None,
    storage: Storage = Storage.PACKED,
    expert_peak: float = BF16_PER_SECOND,
    routed: Sequence[Routing] | None = None,
) -> Floor:
    """The floor of prelude, body and head of one step.

    ``experts`` are those resident, all by default; ``storage`` is that of entries and keys. ``expert_peak`` is the rate
    of the routed experts' products: kernels that keep the rows' 8 bits reach for that of FP8. ``routed`` says what the
    router of every layer chose; by default rows are dealt evenly.
    """
    resident = text.n_routed_experts if experts is None else experts
    if routed is None:
        routed = [_even_routing(text, shape, resident)] * text.num_hidden_layers
    if len(routed) != text.num_hidden_layers:
        raise ValueError(f"routing of {len(routed)} layers, of a model of {text.num_hidden_layers}")
    state = _State(text, storage)
    parts = [_embedding(text, shape)]
    for plan in plan_layers(text):
        if plan.engram is not None:
            parts.append(_engram(text, shape, plan))
        parts += [_mhc(text, shape, plan), _projections(text, shape, plan)]
        if plan.publishes:
            parts.append(_compressor(text, shape, plan, state))
        if plan.selects:
            parts += [_index_projections(text, shape, plan), _index_scoring(text, shape, plan, state)]
        parts += [
            _attention(text, shape, plan, state),
            _router(text, shape, plan),
            _experts(text, shape, plan, routed[plan.layer], expert_peak),
            _shared_expert(text, shape, plan),
        ]
    parts += [
        Part(Component.MHC, None, _BF16_BYTES * shape.rows * text.hidden_size, 0.0),
        _head(text, shape),
    ]
    mean = Routing(statistics.mean(r.pairs for r in routed), statistics.mean(r.experts for r in routed))
    return Floor(shape, mean, tuple(parts))


def _even_routing(text: TextConfig, shape: StepShape, resident: int) -> Routing:
    """Expected if every row chooses its experts by chance."""
    pairs = shape.rows * text.num_experts_per_tok * resident / text.n_routed_experts
    return Routing(pairs, resident * (1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** shape.rows))


class _State:
    """Bytes of one entry and of one index key."""

    def __init__(self, text: TextConfig, storage: Storage) -> None:
        packed = storage is Storage.PACKED
        width = _F32_BYTES if storage is Storage.F32 else _BF16_BYTES
        self.entry = packed_entry_bytes(text.head_dim) if packed else width * text.head_dim
        self.key = packed_key_bytes(text.index_head_dim) if packed else width * text.index_head_dim


Matrix = tuple[int, int]
"""Outputs and inputs."""


def _elements(matrices: Sequence[Matrix]) -> int:
    return sum(outputs * inputs for outputs, inputs in matrices)


def _f8_bytes(matrices: Sequence[Matrix]) -> int:
    """A byte an element, and one a tile."""
    return _elements(matrices) + sum(_blocks(outputs) * _blocks(inputs) for outputs, inputs in matrices)


def _blocks(extent: int) -> int:
    return -(-extent // SCALE_BLOCK)


def _embedding(text: TextConfig, shape: StepShape) -> Part:
    return Part(Component.EMBEDDING, None, 2.0 * _BF16_BYTES * shape.rows * text.hidden_size, 0.0)


def _engram(text: TextConfig, shape: StepShape, plan: LayerPlan) -> Part:
    """Table rows in F8 are read, and the streams read and written."""
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
    matrix = ((text.hc_mult + 1) * text.hidden_size, columns * text.engram_head_dim)
    table_row = columns * (text.engram_head_dim + text.engram_head_dim // SCALE_BLOCK)
    streams = 2 * _BF16_BYTES * text.hc_mult * text.hidden_size
    return Part(
        Component.ENGRAM,
        plan.layer,
        _f8_bytes([matrix]) + float(shape.rows) * (table_row + streams),
        2.0 * shape.rows * _elements([matrix]),
    )


def _mhc(text: TextConfig, shape: StepShape, plan: LayerPlan) -> Part:
    """Two sites: streams in and out, the sublayer's input out and its output in. Coefficients are stored in F32."""
    sites, mixes = 2, text.hc_mult * (2 + text.hc_mult)
    row = sites * (2 * text.hc_mult + 2) + plan.draft_feature
    return Part(
        Component.MHC,
        plan.layer,
        float(sites * _F32_BYTES * mixes * text.hc_mult * text.hidden_size)
        + float(shape.rows) * _BF16_BYTES * row * text.hidden_size,
        2.0 * shape.rows * sites * mixes * (text.hc_mult + 1) * text.hidden_size,
    )


def _projections(text: TextConfig, shape: StepShape, plan: LayerPlan) -> Part:
    """Into the query and the latent, and out of the heads. Each of the products is written and read by the next."""
    query, low, middle = text.num_attention_heads * text.head_dim, text.q_lora_rank, text.o_groups * text.o_lora_rank
    matrices = [
        (low, text.hidden_size),
        (text.head_dim, text.hidden_size),
        (query, low),
        (middle, query // text.o_groups),
        (text.hidden_size, middle),
    ]
    row = 2 * text.hidden_size + 2 * low + text.head_dim + 2 * query + 2 * middle
    return Part(
        Component.PROJECTIONS,
        plan.layer,
        _f8_bytes(matrices) + float(shape.rows) * _BF16_BYTES * row,
        2.0 * shape.rows * _elements(matrices),
    )


def _compressor(text: TextConfig, shape: StepShape, plan: LayerPlan, state: _State) -> Part:
    """Entries and their index keys; a pair of tokens needs gates too."""
    made = shape.rows / plan.ratio
    matrices = [(text.head_dim, text.hidden_size)] * (1 if plan.pending is None else 2)
    key = (text.index_head_dim, text.head_dim)
    return Part(
        Component.COMPRESSOR,
        plan.layer,
        _BF16_BYTES * (_elements([*matrices, key]) + float(shape.rows) * text.hidden_size)
        + made * (state.entry + state.key),
        2.0 * shape.rows * _elements(matrices) + 2.0 * made * _elements([key]),
    )


def _index_projections(text: TextConfig, shape: StepShape, plan: LayerPlan) -> Part:
    query = (text.index_n_heads * text.index_head_dim, text.q_lora_rank)
    weights = (text.index_n_heads, text.hidden_size)
    row = text.q_lora_rank + query[0] + text.hidden_size + text.index_n_heads
    return Part(
        Component.INDEX_PROJECTIONS,
        plan.layer,
        _f8_bytes([query]) + _BF16_BYTES * (_elements([weights]) + float(shape.rows) * row),
        2.0 * shape.rows * _elements([query, weights]),
    )


def _index_scoring(text: TextConfig, shape: StepShape, plan: LayerPlan, state: _State) -> Part:
    """Products of keys in FP8, whose 4 bits and powers of two it holds. Rows of a request share its keys."""
    most = text.candidate_topk_blocks * text.candidate_block_size if plan.reads_candidates else None
    scored = shape.visible(plan.ratio, most)
    lists = text.index_topk + (plan.makes_candidates + plan.reads_candidates) * text.candidate_topk_blocks
    row = _BF16_BYTES * text.index_n_heads * (text.index_head_dim + 1) + 4 * lists
    return Part(
        Component.INDEX_SCORING,
        plan.layer,
        float(min(scored, shape.present(plan.ratio))) * state.key + float(shape.rows) * row,
        2.0 * text.index_n_heads * text.index_head_dim * scored,
        FP8_PER_SECOND,
    )


def _attention(text: TextConfig, shape: StepShape, plan: LayerPlan, state: _State) -> Part:
    """Queries in, heads out; the window's latents and the selected entries. Rows of a request share both."""
    window = text.sliding_window
    keys = shape.visible(1, window)
    latents = shape.requests * (min(shape.context, window - 1) + shape.each + min(shape.each, window))
    moved = _BF16_BYTES * (2.0 * shape.rows * text.num_attention_heads + latents) * text.head_dim
    if plan.ratio:
        selected = shape.visible(plan.ratio, text.index_topk)
        keys += selected
        moved += float(min(selected, shape.present(plan.ratio))) * state.entry + 4.0 * shape.rows * text.index_topk
    return Part(Component.ATTENTION, plan.layer, moved, 4.0 * text.num_attention_heads * text.head_dim * keys)


def _router(text: TextConfig, shape: StepShape, plan: LayerPlan) -> Part:
    """Every row is scored against all experts, resident or not."""
    matrix = (text.n_routed_experts, text.hidden_size)
    return Part(
        Component.ROUTER,
        plan.layer,
        _BF16_BYTES * (_elements([matrix]) + float(shape.rows) * text.hidden_size),
        2.0 * shape.rows * _elements([matrix]),
    )


def _experts(
    text: TextConfig, shape: StepShape, plan: LayerPlan, routing: Routing, operations_per_second: float
) -> Part:
    """Three F4 matrices of each expert that some row chooses; rows in, and out as an F32 sum over ranks."""
    matrices = [(text.moe_intermediate_size, text.hidden_size)] * 3
    return Part(
        Component.EXPERTS,
        plan.layer,
        routing.experts * _elements(matrices) * (1 / 2 + 1 / SCALE_BLOCK)
        + float(shape.rows) * (_BF16_BYTES + _F32_BYTES) * text.hidden_size,
        2.0 * routing.pairs * _elements(matrices),
        operations_per_second,
    )


def _shared_expert(text: TextConfig, shape: StepShape, plan: LayerPlan) -> Part:
    matrices = [(text.moe_intermediate_size, text.hidden_size)] * 2
    matrices.append((text.hidden_size, text.moe_intermediate_size))
    return Part(
        Component.SHARED_EXPERT,
        plan.layer,
        _f8_bytes(matrices) + 2.0 * _BF16_BYTES * shape.rows * text.hidden_size,
        2.0 * shape.rows * _elements(matrices),
    )


def _head(text: TextConfig, shape: StepShape) -> Part:
    matrix = (text.vocab_size, text.hidden_size)
    return Part(
        Component.HEAD,
        None,
        _BF16_BYTES * (_elements([matrix]) + float(shape.sampled) * text.hidden_size)
        + float(_F32_BYTES * shape.sampled) * text.vocab_size,
        2.0 * shape.sampled * _elements([matrix]),
    )
