"""The independent judge: the text model as one brute-force pass over a whole sequence in fp64.

Written from spec/model.md 3.0 to 3.12 and 7 alone, and from nothing of the engine but its config classes. There are
masks in place of caches: no state, no pages, no chunks, every expert and every entry is computed for every token. No
activation is quantised, as in the engine's ``plain`` numerics. Sizes: t tokens, k streams, D hidden, h heads, d head
dimension, n entries, e experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.model.config import ModelConfig, TextConfig

INFINITY = math.inf


@dataclass
class Trace:
    """What a pass computed, by layer. Every tensor is fp64, bool or int64; rows are positions."""

    layer_inputs: list[Tensor] = field(default_factory=list)
    """``[t, k, D]``: streams before each block, after Engram."""
    streams: list[Tensor] = field(default_factory=list)
    """``[t, k, D]``: streams after each block."""
    pre: list[Tensor] = field(default_factory=list)
    """``[t, k]``: the mix that each block hands on."""
    mixes: list[dict[str, tuple[Tensor, Tensor, Tensor]]] = field(default_factory=list)
    """Of sublayer ``attn`` and ``ffn``: pre ``[t, k]``, post ``[t, k]``, comb ``[t, k, k]`` (source, destination)."""
    sublayer_inputs: list[dict[str, Tensor]] = field(default_factory=list)
    """Of sublayer ``attn`` and ``ffn``: ``[t, D]``, normed."""
    sublayer_outputs: list[dict[str, Tensor]] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    """``[t, d]``: window keys, rotated."""
    experts: list[Tensor] = field(default_factory=list)
    """bool ``[t, e]``: those chosen."""
    expert_weights: list[Tensor] = field(default_factory=list)
    """``[t, e]``: zero where not chosen."""
    entries: dict[int, Tensor] = field(default_factory=dict)
    """By KV source ``[n, d]``: compressed entries, rotated."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    """By KV source ``[n, index dimension]``: index keys, rotated."""
    scores: dict[int, Tensor] = field(default_factory=dict)
    """By index source ``[t, n]``: -inf where an entry may not be selected."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """By index source, bool ``[t, n]``."""
    block_scores: dict[int, Tensor] = field(default_factory=dict)
    """By candidate source ``[t, blocks]``: the newest block is +inf."""
    candidates: dict[int, Tensor] = field(default_factory=dict)
    """By candidate source, bool ``[t, n]``."""
    hash_ids: dict[int, Tensor] = field(default_factory=dict)
    """By Engram layer ``[t, columns]``: rows of the table."""
    engram_projection: dict[int, Tensor] = field(default_factory=dict)
    """By Engram layer ``[t, (k + 1) D]``: one key a stream, then the value."""
    gates: dict[int, Tensor] = field(default_factory=dict)
    """By Engram layer ``[t, k]``."""
    margins: dict[str, Tensor] = field(default_factory=dict)
    """``[t]`` for each decision made: how near it was. See :func:`relative_margin`."""
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    """``[t, D]``: streams collapsed after the last block, before the norm."""
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    """``[t, targets x D]``: what the draft model reads."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """``[t, vocabulary]``."""


class Judge:
    """The model of one config. ``weights`` has official names and fp64 values; ``classes`` is the class of each id.

    Each method is one formula of the specification, so that a test can replace one by a wrong one.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], classes: Sequence[int]) -> None:
        self.text: TextConfig = config.text_config
        self.weights = weights
        self.classes = [int(c) for c in classes]
        self.pad = self.classes[self.text.engram_pad_token_id]

    def forward(self, ids: Sequence[int], image: Sequence[bool] = (), embeddings: Tensor | None = None) -> Trace:
        """All positions of one sequence (3.1). ``image`` marks span positions, whose rows ``embeddings`` must have."""
        text, trace = self.text, Trace()
        span = list(image) or [False] * len(ids)
        rows = self.weights["embed.weight"][list(ids)] if embeddings is None else embeddings.double()
        streams = torch.stack([rows] * text.hc_mult, dim=1)
        pre = torch.zeros(len(ids), text.hc_mult, dtype=torch.float64)
        pre[:, 0] = 1
        for layer in range(text.num_hidden_layers):
            if layer in text.engram_layer_ids:
                streams = self.engram(layer, streams, ids, span, trace)
            trace.layer_inputs.append(streams)
            streams, pre = self.block(layer, streams, pre, span, trace)
            trace.streams.append(streams)
            trace.pre.append(pre)
        trace.hidden = collapse(streams, pre)
        means = [trace.layer_inputs[layer].mean(1) for layer in text.dspark_target_layer_ids]
        trace.features = torch.cat(means, dim=1) if means else torch.empty(len(ids), 0)
        trace.logits = self.norm(trace.hidden, "norm") @ self.weights["head.weight"].T
        return trace

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] * x / ((x * x).mean(-1, keepdim=True) + self.text.rms_norm_eps).sqrt()

    # 3.2: streams

    def block(self, layer: int, streams: Tensor, pre: Tensor, span: list[bool], trace: Trace) -> tuple[Tensor, Tensor]:
        trace.mixes.append({})
        trace.sublayer_inputs.append({})
        trace.sublayer_outputs.append({})
        streams, pre = self.sublayer(layer, "attn", streams, pre, lambda x: self.attention(layer, x, trace), trace)
        return self.sublayer(layer, "ffn", streams, pre, lambda x: self.moe(layer, x, span, trace), trace)

    def sublayer(
        self, layer: int, name: str, streams: Tensor, pre: Tensor, function: Callable[[Tensor], Tensor], trace: Trace
    ) -> tuple[Tensor, Tensor]:
        """``pre`` is the mix of the sublayer before; the own one is handed on."""
        own, post, comb = self.mix(layer, name, streams)
        x = self.norm(collapse(streams, pre), f"layers.{layer}.{name}_norm")
        y = function(x)
        trace.mixes[layer][name] = own, post, comb
        trace.sublayer_inputs[layer][name] = x
        trace.sublayer_outputs[layer][name] = y
        return torch.einsum("tk,tc->tkc", post, y) + torch.einsum("tjk,tjc->tkc", comb, streams), own

    def mix(self, layer: int, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre ``[t, k]``, post ``[t, k]`` and comb ``[t, k, k]`` of one sublayer."""
        text, prefix = self.text, f"layers.{layer}.hc_{name}_"
        count, eps = text.hc_mult, text.hc_eps
        x = streams.flatten(1)
        m = x @ self.weights[prefix + "fn"].T / ((x * x).mean(1, keepdim=True) + text.rms_norm_eps).sqrt()
        scale, base = self.weights[prefix + "scale"], self.weights[prefix + "base"]
        pre = sigmoid(m[:, :count] * scale[0] + base[:count]) + eps
        post = 2 * sigmoid(m[:, count : 2 * count] * scale[1] + base[count : 2 * count])
        comb = (m[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
        comb = softmax(comb, 2) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(text.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    # 3.3 to 3.9: attention

    def attention(self, layer: int, x: Tensor, trace: Trace) -> Tensor:
        text, name = self.text, f"layers.{layer}.attn"
        positions = torch.arange(len(x))
        frequencies = self.frequencies(text.compress_ratios[layer])
        rank = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        query = self.linear(rank, f"{name}.wq_b").unflatten(1, (text.num_attention_heads, text.head_dim))
        query = rotate(query, positions, frequencies)
        latents = rotate(self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm"), positions, frequencies)
        trace.latents.append(latents)

        entries = torch.empty(0, text.head_dim, dtype=torch.float64)
        selected = torch.empty(len(x), 0, dtype=torch.bool)
        if text.compress_ratios[layer]:
            if layer in text.kv_source_layer_ids:
                self.compress(layer, x, trace)
            if layer in text.index_source_layer_ids:
                self.select(layer, x, rank, trace)
            entries = trace.entries[latest(text.kv_source_layer_ids, layer)]
            selected = self.selection(layer, trace)

        sink = self.weights[f"{name}.attn_sink"]
        out = attend(query, positions, latents, entries, selected, sink, text.sliding_window)
        return self.project(layer, self.rotate_back(out, positions, frequencies))

    def frequencies(self, ratio: int) -> Tensor:
        return rope_frequencies(self.text, ratio)

    def selection(self, layer: int, trace: Trace) -> Tensor:
        """3.8: what the layer attends to, bool ``[t, n]``."""
        return trace.selected[latest(self.text.index_source_layer_ids, layer)]

    def rotate_back(self, out: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
        return rotate(out, -positions, frequencies)

    def project(self, layer: int, out: Tensor) -> Tensor:
        """3.9: ``[t, h, d]`` -> ``[t, D]``. A group is a run of consecutive heads."""
        text, name = self.text, f"layers.{layer}.attn"
        per_group = text.num_attention_heads // text.o_groups
        parts = []
        for group in range(text.o_groups):
            matrix = self.weights[f"{name}.wo_a.weight"][group * text.o_lora_rank : (group + 1) * text.o_lora_rank]
            parts.append(out[:, group * per_group : (group + 1) * per_group].flatten(1) @ matrix.T)
        return self.linear(torch.cat(parts, dim=1), f"{name}.wo_b")

    def compress(self, layer: int, x: Tensor, trace: Trace) -> None:
        """3.6 and the key side of 3.7: entries and index keys of all complete groups."""
        name, ratio = f"layers.{layer}.attn", self.text.compress_ratios[layer]
        value = self.linear(x, f"{name}.compressor.wkv")
        groups = []
        for j in range(len(x) // ratio):
            group = value[j * ratio : (j + 1) * ratio]
            if ratio > 1:
                gate = self.linear(x[j * ratio : (j + 1) * ratio], f"{name}.compressor.wgate")
                group = softmax(gate, 0) * group
            groups.append(group.sum(0))
        pooled = torch.stack(groups) if groups else value[:0]
        entries = self.norm(pooled, f"{name}.compressor.norm")
        keys = self.norm(self.linear(entries, f"{name}.indexer.wk"), f"{name}.indexer.k_norm")
        positions = torch.arange(len(entries)) * ratio
        frequencies = self.frequencies(ratio)
        trace.entries[layer] = rotate(entries, positions, frequencies)
        trace.keys[layer] = rotate(keys, positions, frequencies)

    def select(self, layer: int, x: Tensor, rank: Tensor, trace: Trace) -> None:
        """3.7: scores, candidates where this layer names them, and the selection."""
        text, name = self.text, f"layers.{layer}.attn.indexer"
        source, ratio = latest(text.kv_source_layer_ids, layer), text.compress_ratios[layer]
        keys, positions = trace.keys[source], torch.arange(len(x))
        query = self.linear(rank, f"{name}.wq_b").unflatten(1, (text.index_n_heads, text.index_head_dim))
        query = rotate(query, positions, self.frequencies(ratio))
        weight = self.linear(x, f"{name}.weights_proj") * text.index_head_dim**-0.5 * text.index_n_heads**-0.5
        scores = torch.einsum("th,thn->tn", weight, torch.einsum("thd,nd->thn", query, keys).clamp(min=0))

        visible = self.visible(positions, ratio)
        scores = scores.masked_fill(torch.arange(len(keys)) >= visible[:, None], -INFINITY)
        if layer == text.candidate_source_layer_id:
            self.name_candidates(layer, scores, visible, trace)
        elif self.is_restricted(layer):
            assert text.candidate_source_layer_id is not None
            scores = scores.masked_fill(~trace.candidates[text.candidate_source_layer_id], -INFINITY)
        trace.scores[layer] = scores
        trace.selected[layer] = largest(scores, text.index_topk)
        trace.margins[f"selection {layer}"] = relative_margin(scores, text.index_topk)

    def visible(self, positions: Tensor, ratio: int) -> Tensor:
        """How many entries each position may see: those of complete groups."""
        return (positions + 1) // ratio

    def is_restricted(self, layer: int) -> bool:
        """Whether ``layer`` selects among candidates: later selections from the entries that the blocks are made of."""
        text, candidate = self.text, self.text.candidate_source_layer_id
        sources = text.kv_source_layer_ids
        return candidate is not None and layer > candidate and latest(sources, layer) == latest(sources, candidate)

    def name_candidates(self, layer: int, scores: Tensor, visible: Tensor, trace: Trace) -> None:
        text, size = self.text, self.text.candidate_block_size
        count = -(-scores.shape[1] // size)
        blocks = torch.full((len(scores), count), -INFINITY, dtype=torch.float64)
        for block in range(count):
            blocks[:, block] = scores[:, block * size : (block + 1) * size].max(1).values
        for row, length in enumerate(visible.tolist()):
            if length:
                blocks[row, (length - 1) // size] = INFINITY
        kept = largest(blocks, text.candidate_topk_blocks)
        trace.block_scores[layer] = blocks
        trace.candidates[layer] = kept.repeat_interleave(size, 1)[:, : scores.shape[1]]
        trace.margins[f"candidates {layer}"] = relative_margin(blocks, text.candidate_topk_blocks)

    # 3.10: experts

    def moe(self, layer: int, x: Tensor, span: list[bool], trace: Trace) -> Tensor:
        name, weight = f"layers.{layer}.ffn", self.route(layer, x, span, trace)
        trace.expert_weights.append(weight)
        total = self.expert(x, f"{name}.shared_experts", torch.ones(len(x), 1, dtype=torch.float64))
        for expert in range(self.text.n_routed_experts):
            total = total + self.expert(x, f"{name}.experts.{expert}", weight[:, expert : expert + 1])
        return total

    def route(self, layer: int, x: Tensor, span: list[bool], trace: Trace) -> Tensor:
        """``[t, e]``: what each expert's output counts, zero where it is not chosen."""
        text, gate = self.text, f"layers.{layer}.ffn.gate"
        scores = self.router_scores(layer, x)
        biased = scores + self.weights[f"{gate}.bias"]
        if any(span):
            rows = torch.tensor(span)
            biased[rows] = scores[rows] + self.weights[f"{gate}.bias_vl"]
        chosen = largest(biased, text.num_experts_per_tok)
        trace.experts.append(chosen)
        trace.margins[f"experts {layer}"] = relative_margin(biased, text.num_experts_per_tok)
        weight: Tensor = torch.where(chosen, scores, 0.0)
        return weight / (weight.sum(1, keepdim=True) + 1e-20) * text.routed_scaling_factor

    def router_scores(self, layer: int, x: Tensor) -> Tensor:
        logits = self.linear(x, f"layers.{layer}.ffn.gate")
        return (logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()

    def expert(self, x: Tensor, name: str, weight: Tensor) -> Tensor:
        limit = self.text.swiglu_limit
        gate, up = self.clamp_gate(self.linear(x, f"{name}.w1")), self.linear(x, f"{name}.w3").clamp(-limit, limit)
        return self.linear(weight * (gate * sigmoid(gate) * up), f"{name}.w2")

    def clamp_gate(self, gate: Tensor) -> Tensor:
        return gate.clamp(max=self.text.swiglu_limit)

    # 3.11: Engram

    def engram(self, layer: int, streams: Tensor, ids: Sequence[int], span: list[bool], trace: Trace) -> Tensor:
        text, name = self.text, f"layers.{layer}.engram"
        hashed = torch.tensor(self.hash_rows(layer, ids, span))
        rows = self.weights[f"{name}.embed.weight"][hashed].flatten(1)
        projection = self.linear(rows, f"{name}.wkv")
        keys: Tensor = projection.unflatten(1, (text.hc_mult + 1, text.hidden_size))
        value = keys[:, -1]
        gates = torch.zeros(len(ids), text.hc_mult, dtype=torch.float64)
        distance = torch.full((len(ids),), INFINITY, dtype=torch.float64)
        for k in range(text.hc_mult):
            x, key = streams[:, k], keys[:, k]
            product = x * key * self.weights[f"{name}.q_weight"][k] * self.weights[f"{name}.k_weight"][k]
            inverse_x = ((x * x).mean(1) + text.rms_norm_eps) ** -0.5
            inverse_key = ((key * key).mean(1) + text.rms_norm_eps) ** -0.5
            d = product.sum(1) * inverse_x * inverse_key / math.sqrt(text.hidden_size)
            distance = torch.minimum(distance, d.abs())
            gates[:, k] = sigmoid(torch.sign(d) * d.abs().clamp(min=1e-6).sqrt())
        gates[torch.tensor(span)] = 0
        # The gate jumps where d changes sign.
        trace.margins[f"gate {layer}"] = distance
        trace.hash_ids[layer], trace.engram_projection[layer], trace.gates[layer] = hashed, projection, gates
        return streams + gates[:, :, None] * value[:, None]

    def hash_rows(self, layer: int, ids: Sequence[int], span: list[bool]) -> list[list[int]]:
        """Rows of the table for each position: columns order-major, then head."""
        text = self.text
        primes, factors = engram_primes(text)[text.engram_layer_ids.index(layer)], engram_factors(text, layer)
        rows = []
        for position in range(len(ids)):
            history, dead = [], False
            for back in range(text.engram_max_ngram_size):
                dead = dead or back > position or span[position - back]
                history.append(self.pad if dead else self.classes[ids[position - back]])
            row, offset, mixed = [], 0, history[0] * factors[0]
            for order in range(2, text.engram_max_ngram_size + 1):
                mixed ^= history[order - 1] * factors[order - 1]
                for prime in primes[order - 2]:
                    row.append(mixed % prime + offset)
                    offset += prime
            rows.append(row)
        return rows


def engram_primes(text: TextConfig) -> list[list[list[int]]]:
    """Table sizes by Engram layer, order (from 2) and head (3.11). A layer's sum is the rows of its table."""
    used: set[int] = set()
    layers = []
    for _ in text.engram_layer_ids:
        orders = []
        for _ in range(2, text.engram_max_ngram_size + 1):
            heads: list[int] = []
            number = text.engram_vocab_size
            while len(heads) < text.engram_n_heads:
                if number not in used and is_prime(number):
                    used.add(number)
                    heads.append(number)
                number += 1
            orders.append(heads)
        layers.append(orders)
    return layers


def engram_factors(text: TextConfig, layer: int) -> list[int]:
    bound = (2**63 - 1) // text.engram_compressed_vocab_size // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=text.engram_max_ngram_size, dtype=np.int64)
    return [2 * int(number) + 1 for number in drawn]


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def attend(
    query: Tensor,
    positions: Tensor,
    latents: Tensor,
    entries: Tensor,
    selected: Tensor,
    sink: Tensor,
    window: int,
) -> Tensor:
    """Attention alone (3.5), before the rotation back: ``[rows, h, d]``.

    ``query [rows, h, d]`` at ``positions [rows]``; ``latents [t, d]`` of positions 0 to t - 1; ``entries [n, d]`` with
    ``selected`` bool ``[rows, n]``; ``sink [h]``. One softmax over the last ``window`` latents up to the own one, the
    selected entries and the sink.
    """
    places = torch.arange(len(latents))
    inside = (places <= positions[:, None]) & (places > positions[:, None] - window)
    keys = torch.cat([latents, entries])
    allowed = torch.cat([inside, selected], dim=1)
    scores = torch.einsum("thd,nd->thn", query, keys) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~allowed[:, None], -INFINITY)
    top = torch.maximum(scores.max(2).values, sink)
    weights = torch.exp(scores - top[:, :, None])
    denominator = weights.sum(2) + torch.exp(sink - top)
    return torch.einsum("thn,nd->thd", weights, keys) / denominator[:, :, None]


def rope_frequencies(text: TextConfig, ratio: int) -> Tensor:
    """Angle per position of each pair (3.4), YaRN's limits clamped to the pairs (7): ``[rope dimension / 2]``."""
    dim, scaling = text.qk_rope_head_dim, text.rope_scaling
    theta = text.compress_rope_theta if ratio else text.rope_theta
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if ratio:

        def turns(rotations: float) -> float:
            span = scaling.original_max_position_embeddings / (2 * math.pi * rotations)
            return dim * math.log(span) / (2 * math.log(theta))

        low = min(max(math.floor(turns(scaling.beta_fast)), 0), dim // 2 - 1)
        high = min(max(math.ceil(turns(scaling.beta_slow)), 0), dim // 2 - 1)
        assert low < high, "the specification does not say what a ramp without width is"
        for i, frequency in enumerate(frequencies):
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            frequencies[i] = frequency * (1 - ramp) + frequency / scaling.factor * ramp
    return torch.tensor(frequencies, dtype=torch.float64)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn the last channels of ``[t, ..., channels]``, adjacent pairs as complex numbers; negative turns back."""
    plain = x.shape[-1] - 2 * len(frequencies)
    pairs = torch.view_as_complex(x[..., plain:].unflatten(-1, (-1, 2)).contiguous())
    angles = positions.double()[:, None] * frequencies
    angles = angles.view(len(x), *[1] * (x.ndim - 2), len(frequencies))
    turned = pairs * torch.complex(angles.cos(), angles.sin())
    return torch.cat([x[..., :plain], torch.view_as_real(turned).flatten(-2)], dim=-1)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("tk,tkc->tc", pre, streams)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softmax(x: Tensor, dim: int) -> Tensor:
    weights = torch.exp(x - x.max(dim, keepdim=True).values)
    return weights / weights.sum(dim, keepdim=True)


def latest(layers: Sequence[int], layer: int) -> int:
    """The source that ``layer`` reads (3.8): the last one up to and including itself."""
    return max(source for source in layers if source <= layer)


def largest(scores: Tensor, count: int) -> Tensor:
    """bool like ``scores [t, n]``: the ``count`` largest of each row above -inf, the lower index at ties."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        allowed = [i for i, value in enumerate(values) if value > -INFINITY]
        chosen[row, sorted(allowed, key=lambda i: (-values[i], i))[:count]] = True
    return chosen


def relative_margin(scores: Tensor, count: int) -> Tensor:
    """``[t]``: gap between the last chosen and the first rejected score, relative to the row's largest finite one.

    inf where nothing is rejected; 0 at an exact tie, which the rule "lower index first" decides.
    """
    margins = []
    for values in scores.tolist():
        ordered = sorted((value for value in values if value > -INFINITY), reverse=True)
        gap = ordered[count - 1] - ordered[count] if len(ordered) > count else INFINITY
        largest_finite = max((abs(value) for value in ordered if value < INFINITY), default=0.0)
        margins.append(gap / largest_finite if largest_finite else gap)
    return torch.tensor(margins, dtype=torch.float64)
