"""The body of DeepSeek-V4.1: every layer, from embeddings to normed hidden rows, traceable as one graph.

It knows rows, not requests, batches or ranks. Rounding happens inside operators alone; reshapes are written with
-1, ``unflatten`` and ``flatten(1)`` so that no number of rows enters the graph. Shape letters as in
``octavo.model.inputs``; H attention heads. Source: spec/model.md 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.kernels.rope import plain_frequencies, yarn_frequencies
from octavo.model.config import ModelConfig, TextConfig
from octavo.model.inputs import Output, Rows, State
from octavo.model.plan import LayerPlan, plan_layers
from octavo.model.weights import (
    DenseF8,
    HeldInBF16,
    Linear,
    LinearF8,
    LinearF32,
    PackedExperts,
    TiledWeight,
    Weight,
    parameter,
)

Selection = tuple[Tensor | None, Tensor | None]
"""What index sources hand on to later layers: selected entries [R, top_k] and candidate blocks [R, blocks]."""


class Body(nn.Module):
    """All layers. ``experts`` is the range of routed experts resident here; rows routed elsewhere add nothing."""

    plain: Tensor
    """[rope_dim / 2] F32: frequencies of layers that read the window alone."""
    yarn: Tensor
    """[rope_dim / 2] F32: frequencies of layers that read entries."""
    first_stream: Tensor
    """[1, S] F32: the first layer reads the first stream alone."""

    def __init__(self, config: ModelConfig, experts: range) -> None:
        super().__init__()
        text = config.text_config
        self.streams = text.hc_mult
        self.epsilon = text.rms_norm_eps
        layers = nn.ModuleList(Layer(config, plan, experts) for plan in plan_layers(text))
        self.layers = cast("Sequence[Layer]", layers)
        self.norm = Weight(text.hidden_size)
        scaling = text.rope_scaling
        self._constant("plain", plain_frequencies, text.qk_rope_head_dim, text.rope_theta)
        self._constant(
            "yarn",
            yarn_frequencies,
            text.qk_rope_head_dim,
            text.compress_rope_theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
        )
        self._constant("first_stream", torch.eye, 1, text.hc_mult)

    def _constant(self, name: str, make: Callable[..., Tensor], *args: float) -> None:
        """Constants are computed on the host and moved: a device's own ``pow`` may round otherwise."""
        device = torch.get_default_device()
        with torch.device("cpu"):
            value = make(*args)
        self.register_buffer(name, value.to(device), persistent=False)

    def forward(self, rows: Rows, state: State) -> Output:
        streams = rows.embeds.unsqueeze(1).repeat(1, self.streams, 1)
        pre = rows.live.unsqueeze(1) * self.first_stream
        selection: Selection = (None, None)
        features = []
        for layer in self.layers:
            frequencies = self.yarn if layer.plan.ratio else self.plain
            streams, pre, selection, feature = layer(streams, pre, selection, frequencies, rows, state)
            features += feature
        return Output(kernels.mhc_collapse(streams, pre, self.norm.weight, self.epsilon), features)


class Layer(nn.Module):
    """Engram, attention and experts, each read from and written to the residual streams [R, S, D]."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, experts: range) -> None:
        super().__init__()
        text = config.text_config
        self.plan = plan
        self.epsilon = text.rms_norm_eps
        self.sinkhorn = (text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps)
        if plan.engram is not None:
            self.engram = Engram(text)
        self.attn_norm, self.ffn_norm = Weight(text.hidden_size), Weight(text.hidden_size)
        self.attn = Attention(text, plan)
        self.ffn = Experts(text, experts, vision=config.vision_config is not None)
        mixes = text.hc_mult * (2 + text.hc_mult)
        width = text.hc_mult * text.hidden_size
        self.hc_attn_fn = parameter(mixes, width, dtype=torch.float32)
        self.hc_attn_scale = parameter(3, dtype=torch.float32)
        self.hc_attn_base = parameter(mixes, dtype=torch.float32)
        self.hc_ffn_fn = parameter(mixes, width, dtype=torch.float32)
        self.hc_ffn_scale = parameter(3, dtype=torch.float32)
        self.hc_ffn_base = parameter(mixes, dtype=torch.float32)

    def forward(
        self, streams: Tensor, pre: Tensor, selection: Selection, frequencies: Tensor, rows: Rows, state: State
    ) -> tuple[Tensor, Tensor, Selection, list[Tensor]]:
        """New streams, pre and selection, and the draft feature if the layer has one.

        ``pre`` is deferred: each sublayer reads the streams through the mix of the sublayer before it.
        """
        if self.plan.engram is not None:
            streams = self.engram(streams, rows.engram[self.plan.engram], rows.image)
        feature = [kernels.stream_mean(streams)] if self.plan.draft_feature else []

        attn_pre, post, comb = kernels.mhc_mix(
            streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base, *self.sinkhorn
        )
        x = kernels.mhc_collapse(streams, pre, self.attn_norm.weight, self.epsilon)
        y, selection = self.attn(x, selection, frequencies, rows, state)
        streams = kernels.mhc_expand(streams, y, post, comb)

        ffn_pre, post, comb = kernels.mhc_mix(
            streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base, *self.sinkhorn
        )
        x = kernels.mhc_collapse(streams, attn_pre, self.ffn_norm.weight, self.epsilon)
        streams = kernels.mhc_expand(streams, self.ffn(x, rows), post, comb)
        return streams, ffn_pre, selection, feature


class Attention(nn.Module):
    """Single-latent attention over the window and the selected entries (spec/model.md 3.3 to 3.9)."""

    def __init__(self, text: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.heads, self.groups, self.epsilon = text.num_attention_heads, text.o_groups, text.rms_norm_eps
        self.wq_a = LinearF8(text.q_lora_rank, text.hidden_size)
        self.q_norm = Weight(text.q_lora_rank)
        self.wq_b = LinearF8(text.num_attention_heads * text.head_dim, text.q_lora_rank)
        self.wkv = LinearF8(text.head_dim, text.hidden_size)
        self.kv_norm = Weight(text.head_dim)
        group_width = text.num_attention_heads * text.head_dim // text.o_groups
        self.wo_a = DenseF8(text.o_groups * text.o_lora_rank, group_width)
        self.wo_b = LinearF8(text.hidden_size, text.o_groups * text.o_lora_rank)
        self.attn_sink = parameter(text.num_attention_heads, dtype=torch.float32)
        if plan.publishes:
            self.compressor = Compressor(text, plan)
        if plan.selects:
            self.indexer = Indexer(text, plan)

    def forward(
        self, x: Tensor, selection: Selection, frequencies: Tensor, rows: Rows, state: State
    ) -> tuple[Tensor, Selection]:
        low = kernels.rms_norm(self.wq_a(x), self.q_norm.weight, self.epsilon)
        query = self.wq_b(low).unflatten(1, (self.heads, -1))
        latents = kernels.window_latent(self.wkv(x), self.kv_norm.weight, rows.positions, frequencies, self.epsilon)
        if self.plan.publishes:
            self.compressor(x, self.indexer, frequencies, state)
        if self.plan.selects:
            selection = self.indexer(x, low, selection, frequencies, rows, state)
        ring = state.rings[self.plan.layer]
        attended = kernels.attend(
            query,
            latents,
            ring,
            self.attn_sink,
            frequencies,
            rows.slots,
            rows.positions,
            state.write_slots,
            state.write_positions,
            state.write_starts,
            state.page_table,
            None if self.plan.entries is None else state.entries[self.plan.entries],
            None if self.plan.entries is None else selection[0],
        )
        kernels.commit_window(ring, latents, state.write_slots, state.write_positions)
        wo_a = self.wo_a
        projected = kernels.grouped_linear(attended, wo_a.weight, wo_a.scale, self.groups, wo_a.weight_bf16)
        return self.wo_b(projected), selection


class Compressor(nn.Module):
    """Makes the entries and index keys that this layer and its readers share (spec/model.md 3.6)."""

    def __init__(self, text: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.epsilon = text.rms_norm_eps
        pairs = plan.pending is not None
        self.wkv: Linear | LinearF32
        if pairs:
            self.wkv = LinearF32(text.head_dim, text.hidden_size)
            self.wgate = LinearF32(text.head_dim, text.hidden_size)
        else:
            self.wkv = Linear(text.head_dim, text.hidden_size)
        self.norm = Weight(text.head_dim)

    def forward(self, x: Tensor, indexer: Indexer, frequencies: Tensor, state: State) -> None:
        assert self.plan.entries is not None
        pending = self.plan.pending
        kernels.publish(
            self.wkv(x),
            None if pending is None else self.wgate(x),
            self.norm.weight,
            indexer.wk.weight,
            indexer.k_norm.weight,
            frequencies,
            state.write_slots,
            state.write_positions,
            state.write_starts,
            state.page_table,
            state.entries[self.plan.entries],
            state.keys[self.plan.entries],
            None if pending is None else state.pending[pending],
            self.epsilon,
        )


class Indexer(nn.Module):
    """Chooses the entries that this layer and its readers attend to (spec/model.md 3.7)."""

    def __init__(self, text: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.heads = text.index_n_heads
        self.scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5
        self.top_k = text.index_topk
        self.top_blocks, self.block_size = text.candidate_topk_blocks, text.candidate_block_size
        self.wq_b = LinearF8(text.index_n_heads * text.index_head_dim, text.q_lora_rank)
        self.weights_proj = Linear(text.index_n_heads, text.hidden_size)
        if plan.publishes:
            self.wk = Weight(text.index_head_dim, text.head_dim)
            self.k_norm = Weight(text.index_head_dim)

    def forward(
        self, x: Tensor, low: Tensor, selection: Selection, frequencies: Tensor, rows: Rows, state: State
    ) -> Selection:
        assert self.plan.entries is not None
        query = self.wq_b(low).unflatten(1, (self.heads, -1))
        query = kernels.index_query(query, rows.positions, frequencies)
        weights, keys = self.weights_proj(x), state.keys[self.plan.entries]
        where = (keys, state.page_table, rows.slots, rows.positions)
        if self.plan.makes_candidates:
            return kernels.select_candidates(
                query, weights, *where, self.scale, self.top_k, self.top_blocks, self.block_size
            )
        candidates = selection[1] if self.plan.reads_candidates else None
        selected = kernels.select(query, weights, *where, candidates, self.scale, self.top_k, self.block_size)
        return selected, selection[1]


class Experts(nn.Module):
    """Routed experts and the shared one, which is begun first: a GPU computes it beside them (spec/model.md 3.10)."""

    def __init__(self, text: TextConfig, resident: range, vision: bool) -> None:
        super().__init__()
        self.first, self.top_k = resident.start, text.num_experts_per_tok
        self.route_scale, self.limit = text.routed_scaling_factor, text.swiglu_limit
        self.gate = Gate(text, vision)
        self.experts = ExpertWeights(text, len(resident))
        self.shared_experts = SharedExpert(text)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        gate, routed = self.gate, self.experts
        shared = self.shared_experts(x, self.limit)
        partial = kernels.experts(
            x,
            rows.live,
            rows.image,
            gate.weight,
            gate.bias,
            gate.bias_vl,
            routed.w1.weight,
            routed.w1.scale,
            routed.w2.weight,
            routed.w2.scale,
            routed.w3.weight,
            routed.w3.scale,
            self.first,
            self.top_k,
            self.route_scale,
            self.limit,
        )
        return kernels.combine(partial, shared)


class Gate(nn.Module):
    """Router matrix, used as F32, and the biases of the choice; image rows have ``bias_vl``, where there is vision."""

    def __init__(self, text: TextConfig, vision: bool) -> None:
        super().__init__()
        self.weight = parameter(text.n_routed_experts, text.hidden_size, dtype=torch.bfloat16)
        self.bias = parameter(text.n_routed_experts, dtype=torch.float32)
        self.bias_vl = parameter(text.n_routed_experts, dtype=torch.float32) if vision else None


class ExpertWeights(nn.Module):
    def __init__(self, text: TextConfig, count: int) -> None:
        super().__init__()
        self.w1 = PackedExperts(count, text.moe_intermediate_size, text.hidden_size)
        self.w2 = PackedExperts(count, text.hidden_size, text.moe_intermediate_size)
        self.w3 = PackedExperts(count, text.moe_intermediate_size, text.hidden_size)


class SharedExpert(HeldInBF16):
    """Gate (w1) and up (w3) are read together, and are one matrix where they are held in BF16."""

    def __init__(self, text: TextConfig) -> None:
        super().__init__()
        self.w1 = TiledWeight(text.moe_intermediate_size, text.hidden_size)
        self.w2 = DenseF8(text.hidden_size, text.moe_intermediate_size)
        self.w3 = TiledWeight(text.moe_intermediate_size, text.hidden_size)

    def f8_weights(self) -> list[TiledWeight]:
        return [self.w1, self.w3]

    def forward(self, x: Tensor, limit: float) -> Tensor:
        w1, w2, w3 = self.w1, self.w2, self.w3
        stored = (w1.weight, w1.scale, w2.weight, w2.scale, w3.weight, w3.scale)
        return kernels.shared_expert(x, *stored, limit, self.weight_bf16, w2.weight_bf16)


class Engram(nn.Module):
    """Projects looked-up table rows to a key per stream and one value, and gates the value in (spec/model.md 3.11)."""

    def __init__(self, text: TextConfig) -> None:
        super().__init__()
        columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
        self.epsilon = text.rms_norm_eps
        self.wkv = LinearF8((text.hc_mult + 1) * text.hidden_size, columns * text.engram_head_dim)
        self.q_weight = parameter(text.hc_mult, text.hidden_size, dtype=torch.bfloat16)
        self.k_weight = parameter(text.hc_mult, text.hidden_size, dtype=torch.bfloat16)

    def forward(self, streams: Tensor, table_rows: Tensor, image: Tensor) -> Tensor:
        return kernels.engram_gate(streams, self.wkv(table_rows), image, self.q_weight, self.k_weight, self.epsilon)
