"""Which tensors a checkpoint holds: names, shapes and stored types, from the config alone.

Source: spec/model.md 2. ``weight`` and ``scale`` of a quantised matrix are two tensors. Classes:

=======  =======================  ================================================
class    weight                   scale (F8_E8M0)
=======  =======================  ================================================
F8       F8_E4M3 ``[out, in]``    ``[ceil(out/32), ceil(in/32)]``, one a tile
F4       I8 ``[out, in/2]``       ``[out, in/32]``, two E2M1 codes a weight byte
F8 rows  F8_E4M3 ``[rows, dim]``  ``[rows, dim/32]``, the Engram tables
=======  =======================  ================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.model.config import SCALE_BLOCK, ModelConfig, TextConfig, VisionConfig

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""Sizes of the safetensors dtypes. The official layout has I8, F8_E4M3, F8_E8M0, BF16 and F32."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and safetensors dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def parameters(self) -> int:
        """Logical parameters: scales count nothing, a byte of an F4 weight counts two."""
        return self.elements * {"F8_E8M0": 0, "I8": 2}.get(self.dtype, 1)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Entries = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the official layout for ``config``, by its official name (spec/model.md 2).

    Backbone layers come first and in order, then head and norms, Engram tables last within their layer. Without
    ``vision_config`` there is no vision tower, no aligner, no image embedding and no ``gate.bias_vl``.
    """
    text, vision = config.text_config, config.vision_config
    tensors: dict[str, TensorSpec] = {}
    tensors.update([_bf16("embed.weight", text.vocab_size, text.hidden_size)])
    for layer in range(text.num_hidden_layers):
        name = f"layers.{layer}"
        tensors.update(_block(name, text, experts=text.n_routed_experts, vision=vision is not None))
        tensors.update(_sources(f"{name}.attn", text, layer))
        tensors.update(_engram(f"{name}.engram", text, layer))
    tensors.update([_bf16("norm.weight", text.hidden_size), _bf16("head.weight", text.vocab_size, text.hidden_size)])
    tensors.update(_drafts(text, vision=vision is not None))
    if vision is not None:
        tensors.update(_vision(vision, text.hidden_size))
    return tensors


def _bf16(name: str, *shape: int) -> tuple[str, TensorSpec]:
    return name, TensorSpec(shape, "BF16")


def _f32(name: str, *shape: int) -> tuple[str, TensorSpec]:
    return name, TensorSpec(shape, "F32")


def _f8(name: str, outputs: int, inputs: int) -> Entries:
    yield f"{name}.weight", TensorSpec((outputs, inputs), "F8_E4M3")
    yield f"{name}.scale", TensorSpec((-(-outputs // SCALE_BLOCK), -(-inputs // SCALE_BLOCK)), "F8_E8M0")


def _f4(name: str, weight: TensorSpec, scale: TensorSpec) -> Entries:
    yield f"{name}.weight", weight
    yield f"{name}.scale", scale


def _block(name: str, text: TextConfig, *, experts: int, vision: bool) -> Entries:
    """What every layer and every draft stage has."""
    hidden, heads, dim = text.hidden_size, text.num_attention_heads, text.head_dim
    yield _bf16(f"{name}.attn_norm.weight", hidden)
    yield _bf16(f"{name}.ffn_norm.weight", hidden)
    yield from _f8(f"{name}.attn.wq_a", text.q_lora_rank, hidden)
    yield _bf16(f"{name}.attn.q_norm.weight", text.q_lora_rank)
    yield from _f8(f"{name}.attn.wq_b", heads * dim, text.q_lora_rank)
    yield from _f8(f"{name}.attn.wkv", dim, hidden)
    yield _bf16(f"{name}.attn.kv_norm.weight", dim)
    yield from _f8(f"{name}.attn.wo_a", text.o_groups * text.o_lora_rank, heads * dim // text.o_groups)
    yield from _f8(f"{name}.attn.wo_b", hidden, text.o_groups * text.o_lora_rank)
    yield _f32(f"{name}.attn.attn_sink", heads)

    # pre and post take hc_mult numbers each, comb hc_mult squared (spec/model.md 3.2).
    streams, mixes = text.hc_mult, text.hc_mult * (2 + text.hc_mult)
    for sublayer in ("attn", "ffn"):
        yield _f32(f"{name}.hc_{sublayer}_fn", mixes, streams * hidden)
        yield _f32(f"{name}.hc_{sublayer}_base", mixes)
        yield _f32(f"{name}.hc_{sublayer}_scale", 3)

    inner = text.moe_intermediate_size
    yield _bf16(f"{name}.ffn.gate.weight", experts, hidden)
    yield _f32(f"{name}.ffn.gate.bias", experts)
    if vision:
        yield _f32(f"{name}.ffn.gate.bias_vl", experts)
    yield from _f8(f"{name}.ffn.shared_experts.w1", inner, hidden)
    yield from _f8(f"{name}.ffn.shared_experts.w2", hidden, inner)
    yield from _f8(f"{name}.ffn.shared_experts.w3", inner, hidden)
    # One spec for all experts: the released model has 95,000 of these entries.
    up = TensorSpec((inner, hidden // 2), "I8"), TensorSpec((inner, hidden // SCALE_BLOCK), "F8_E8M0")
    down = TensorSpec((hidden, inner // 2), "I8"), TensorSpec((hidden, inner // SCALE_BLOCK), "F8_E8M0")
    for expert in range(experts):
        yield from _f4(f"{name}.ffn.experts.{expert}.w1", *up)
        yield from _f4(f"{name}.ffn.experts.{expert}.w2", *down)
        yield from _f4(f"{name}.ffn.experts.{expert}.w3", *up)


def _sources(name: str, text: TextConfig, layer: int) -> Entries:
    """Compressor of a KV source, indexer of an index source (spec/model.md 3.6, 3.7)."""
    hidden, dim, index_dim = text.hidden_size, text.head_dim, text.index_head_dim
    owns_entries = layer in text.kv_source_layer_ids
    if owns_entries:
        yield _bf16(f"{name}.compressor.wkv.weight", dim, hidden)
        if text.compress_ratios[layer] > 1:
            yield _bf16(f"{name}.compressor.wgate.weight", dim, hidden)
        yield _bf16(f"{name}.compressor.norm.weight", dim)
    if layer in text.index_source_layer_ids:
        yield from _f8(f"{name}.indexer.wq_b", text.index_n_heads * index_dim, text.q_lora_rank)
        yield _bf16(f"{name}.indexer.weights_proj.weight", text.index_n_heads, hidden)
        if owns_entries:
            yield _bf16(f"{name}.indexer.wk.weight", index_dim, dim)
            yield _bf16(f"{name}.indexer.k_norm.weight", index_dim)


def _engram(name: str, text: TextConfig, layer: int) -> Entries:
    """One key a stream and one value from the gathered rows (spec/model.md 3.11)."""
    if layer not in text.engram_layer_ids:
        return
    rows, dim = text.engram_num_embeddings[text.engram_layer_ids.index(layer)], text.engram_head_dim
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
    yield from _f8(f"{name}.wkv", (text.hc_mult + 1) * text.hidden_size, columns * dim)
    yield _bf16(f"{name}.q_weight", text.hc_mult, text.hidden_size)
    yield _bf16(f"{name}.k_weight", text.hc_mult, text.hidden_size)
    yield f"{name}.embed.weight", TensorSpec((rows, dim), "F8_E4M3")
    yield f"{name}.embed.scale", TensorSpec((rows, dim // SCALE_BLOCK), "F8_E8M0")


def _drafts(text: TextConfig, *, vision: bool) -> Entries:
    """The DSpark stages: the first takes the target's features in, the last has the heads (spec/model.md 3.13)."""
    hidden, low_rank = text.hidden_size, text.dspark_markov_rank
    for stage in range(text.num_nextn_predict_layers):
        yield from _block(f"mtp.{stage}", text, experts=text.dspark_n_routed_experts, vision=vision)
    if text.num_nextn_predict_layers:
        yield from _f8("mtp.0.main_proj", hidden, len(text.dspark_target_layer_ids) * hidden)
        yield _bf16("mtp.0.main_norm.weight", hidden)
        last = f"mtp.{text.num_nextn_predict_layers - 1}"
        yield _bf16(f"{last}.norm.weight", hidden)
        yield _bf16(f"{last}.markov_head.embed.weight", text.vocab_size, low_rank)
        yield _bf16(f"{last}.markov_head.head.weight", text.vocab_size, low_rank)
        yield _bf16(f"{last}.confidence_head.proj.weight", 1, hidden + low_rank)


def _vision(vision: VisionConfig, hidden: int) -> Entries:
    """The tower, the aligner and the three embeddings around image rows (spec/model.md 3.14)."""
    width, inner = vision.hidden_size, vision.intermediate_size
    yield _bf16("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield _bf16("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        name = f"vision.blocks.{block}"
        yield _bf16(f"{name}.attn.wqkv.weight", 3 * width, width)
        yield _bf16(f"{name}.attn.wqkv.bias", 3 * width)
        yield _bf16(f"{name}.attn.wo.weight", width, width)
        yield _bf16(f"{name}.attn.wo.bias", width)
        yield _bf16(f"{name}.mlp.w1.weight", 2 * inner, width)
        yield _bf16(f"{name}.mlp.w2.weight", width, inner)
        yield _bf16(f"{name}.norm1.weight", width)
        yield _bf16(f"{name}.norm2.weight", width)
    yield _bf16("vision.norm.weight", width)
    for layer, inputs in (("w1", width * vision.downsample_ratio**2), ("w2", hidden)):
        yield _bf16(f"aligner.{layer}.weight", hidden, inputs)
        yield _bf16(f"aligner.{layer}.bias", hidden)
    for image in ("image_start", "image_end", "image_newline"):
        yield _bf16(image, hidden)
