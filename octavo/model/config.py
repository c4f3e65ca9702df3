"""The official nested ``config.json`` as frozen dataclasses.

Every key of the file is a field of the same name, in the same block; an unknown, missing or contradictory key is
an error that names it. Source: spec/model.md 1.1 (keys), 3.8 (sharing rules). What follows from the keys (who owns
a cache, whose selection a layer reads) is derived in ``octavo.model.plan``.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError, UsageError

MODEL_TYPE = "deepseek_v41"
SCALE_BLOCK = 32
"""Edge of a quantisation block: F8 tiles are 32 x 32, F4 and activation groups 32 along K (spec/model.md 2)."""

_CONSTANTS: dict[str, object] = {
    "architectures": ("DeepseekV41ForCausalLM",),
    "model_type": MODEL_TYPE,
    "dtype": "bfloat16",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": (SCALE_BLOCK, SCALE_BLOCK),
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.attention_dropout": 0.0,
    "text_config.tie_word_embeddings": False,
    "text_config.n_shared_experts": 1,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "text_config.rope_scaling.rope_type": "yarn",
    "vision_config.model_type": "deepseek_v41_vision",
}
"""Keys whose only known value is built into the architecture: another value would be another model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN, for the layers that read compressed entries (spec/model.md 3.4)."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    quant_method: str
    activation_scheme: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    expert_dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    attention_dropout: float
    initializer_range: float
    use_cache: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """What each layer reads: 0 the window alone, 1 or 2 also entries of that many tokens. Drafts come last."""
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One ``config.json``. ``vision_config`` may be null or absent: a text-only model."""

    architectures: tuple[str, ...]
    model_type: str
    dtype: str
    transformers_version: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None = None
    quantization_config: QuantizationConfig
    text_config: TextConfig
    vision_config: VisionConfig | None = None

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ModelConfig:
        """Parse and validate. Raises :class:`OctavoError` listing every wrong key by its dotted name."""
        model_type = data.get("model_type") if isinstance(data, dict) else None
        if model_type != MODEL_TYPE:
            raise OctavoError(
                f"config.json: model_type is {model_type!r}; Octavo serves {MODEL_TYPE!r} (DeepSeek-V4.1) only. "
                "Point --model at a DeepSeek-V4.1 checkpoint."
            )
        problems: list[str] = []
        config: ModelConfig = _parse(ModelConfig, data, "", problems)
        if not problems:
            problems = _contradictions(config)
        if problems:
            raise OctavoError("config.json is not usable:\n" + "\n".join(f"  - {p}" for p in problems))
        return config

    @staticmethod
    def from_path(path: Path) -> ModelConfig:
        """Read ``config.json`` in the directory ``path``. A missing directory or file is a :class:`UsageError`."""
        file = path / "config.json"
        if not file.is_file():
            raise UsageError(
                f"{path}: no config.json there. --model takes the directory of a checkpoint; "
                "`octavo checkpoint init --preset tiny PATH` makes one."
            )
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise OctavoError(f"{file}: not valid JSON ({error})") from error
        return ModelConfig.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The nested form, as written to ``config.json``."""
        return dataclasses.asdict(self)


def _parse(cls: type, data: Any, prefix: str, problems: list[str]) -> Any:
    """Build dataclass ``cls`` from a JSON object, collecting problems under dotted names."""
    if not isinstance(data, dict):
        problems.append(f"{prefix.rstrip('.') or 'config.json'}: expected an object, got {type(data).__name__}")
        return None
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    problems.extend(f"{prefix}{key}: unknown key" for key in data if key not in fields)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], prefix + name, problems)
        elif field.default is dataclasses.MISSING:
            problems.append(f"{prefix}{name}: missing")
            values[name] = None
    return cls(**values)


def _convert(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    """Check ``value`` against the annotation ``kind``; ints are accepted where floats are asked, never the reverse."""
    before = len(problems)
    converted = value
    if isinstance(kind, types.UnionType):
        (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
        if value is None:
            return None
        return _convert(kind, value, name, problems)
    if dataclasses.is_dataclass(kind):
        return _parse(typing.cast(type, kind), value, name + ".", problems)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            problems.append(f"{name}: expected a list, got {value!r}")
            return ()
        item = typing.get_args(kind)[0]
        converted = tuple(_convert(item, v, f"{name}[{i}]", problems) for i, v in enumerate(value))
    else:
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            problems.append(f"{name}: expected {kind.__name__}, got {value!r}")
            return value
    if len(problems) == before and name in _CONSTANTS and converted != _CONSTANTS[name]:
        problems.append(f"{name}: {value!r} is not known; the architecture has {_CONSTANTS[name]!r}")
    return converted


def _contradictions(config: ModelConfig) -> list[str]:
    """Everything that two keys say of each other and that does not fit."""
    text, problems = config.text_config, []

    def require(condition: bool, message: str) -> None:
        if not condition:
            problems.append(message)

    may_be_zero = {
        *("attention_dropout", "initializer_range", "num_nextn_predict_layers", "engram_pad_token_id"),
        *("dspark_noise_token_id", "candidate_source_layer_id"),
    }
    for field in dataclasses.fields(text):
        value = getattr(text, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = 0 if field.name in may_be_zero else None
            require(value > 0 or value == low, f"text_config.{field.name}: {value} must be positive")
    if problems:
        return problems

    layers, stages = text.num_hidden_layers, text.num_nextn_predict_layers
    ratios = text.compress_ratios
    require(
        len(ratios) == layers + stages,
        f"text_config.compress_ratios: {len(ratios)} entries for {layers} layers + {stages} draft stages",
    )
    require(set(ratios) <= {0, 1, 2}, "text_config.compress_ratios: entries must be 0, 1 or 2")
    require(not any(ratios[layers:]), "text_config.compress_ratios: draft stages read the window alone (0)")
    for key in ("head_dim", "hidden_size", "moe_intermediate_size", "q_lora_rank", "index_head_dim"):
        require(getattr(text, key) % SCALE_BLOCK == 0, f"text_config.{key}: must be a multiple of {SCALE_BLOCK}")
    require(
        text.num_attention_heads % text.o_groups == 0,
        f"text_config.o_groups: {text.o_groups} does not divide num_attention_heads {text.num_attention_heads}",
    )
    require(
        (text.o_groups * text.o_lora_rank) % SCALE_BLOCK == 0,
        f"text_config.o_lora_rank: o_groups x o_lora_rank must be a multiple of {SCALE_BLOCK}",
    )
    for key in ("head_dim", "index_head_dim"):
        require(
            text.qk_rope_head_dim <= getattr(text, key) and text.qk_rope_head_dim % 2 == 0,
            f"text_config.qk_rope_head_dim: {text.qk_rope_head_dim} must be even and at most {key}",
        )
    require(
        text.num_experts_per_tok <= text.n_routed_experts,
        f"text_config.num_experts_per_tok: {text.num_experts_per_tok} of only {text.n_routed_experts} experts",
    )
    problems += _source_contradictions(text) + _engram_contradictions(text) + _draft_contradictions(text)

    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key)
        require(0 <= value < text.vocab_size, f"{key}: {value} is outside the vocabulary of {text.vocab_size}")
    require(
        (config.vision_config is None) == (config.image_token_id is None),
        "image_token_id: present exactly when vision_config is",
    )
    if config.image_token_id is not None and config.vision_config is not None:
        require(
            0 <= config.image_token_id < text.vocab_size,
            f"image_token_id: {config.image_token_id} is outside the vocabulary of {text.vocab_size}",
        )
        vision = config.vision_config
        require(
            vision.hidden_size % vision.num_attention_heads == 0,
            "vision_config.num_attention_heads: must divide vision_config.hidden_size",
        )
    return problems


def _source_contradictions(text: TextConfig) -> list[str]:
    """The sharing rules of spec/model.md 3.8: who owns entries, keys, selections and candidates."""
    problems: list[str] = []
    ratios = text.compress_ratios[: text.num_hidden_layers]
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(text, key)
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < text.num_hidden_layers for i in ids):
            problems.append(f"text_config.{key}: {list(ids)} must ascend within the {text.num_hidden_layers} layers")
    if problems:
        return problems
    for source in text.kv_source_layer_ids:
        if source not in text.index_source_layer_ids:
            problems.append(f"text_config.index_source_layer_ids: KV source {source} must be an index source too")
    for source in text.index_source_layer_ids:
        if ratios[source] == 0:
            problems.append(f"text_config.index_source_layer_ids: layer {source} has compress ratio 0")
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            continue
        kv = max((s for s in text.kv_source_layer_ids if s <= layer), default=None)
        if kv is None:
            problems.append(f"text_config.kv_source_layer_ids: layer {layer} (ratio {ratio}) has no source before it")
        elif ratios[kv] != ratio:
            problems.append(
                f"text_config.compress_ratios: layer {layer} reads ratio {ratio}, its source {kv} makes {ratios[kv]}"
            )
    candidate = text.candidate_source_layer_id
    if candidate is not None and candidate not in text.index_source_layer_ids:
        problems.append(f"text_config.candidate_source_layer_id: layer {candidate} is not an index source")
    return problems


def _engram_contradictions(text: TextConfig) -> list[str]:
    problems: list[str] = []
    if len(text.engram_layer_ids) != len(text.engram_num_embeddings):
        problems.append("text_config.engram_num_embeddings: one entry for each of engram_layer_ids")
    if text.engram_max_ngram_size < 2:
        problems.append("text_config.engram_max_ngram_size: must be at least 2")
    if text.engram_head_dim % SCALE_BLOCK:
        problems.append(f"text_config.engram_head_dim: must be a multiple of {SCALE_BLOCK}")
    for key in ("engram_pad_token_id",):
        if getattr(text, key) >= text.vocab_size:
            problems.append(f"text_config.{key}: {getattr(text, key)} is outside the vocabulary")
    return problems


def _draft_contradictions(text: TextConfig) -> list[str]:
    problems: list[str] = []
    if text.num_nextn_predict_layers and not text.dspark_target_layer_ids:
        problems.append("text_config.dspark_target_layer_ids: draft stages need at least one target layer")
    if text.dspark_noise_token_id >= text.vocab_size:
        problems.append(f"text_config.dspark_noise_token_id: {text.dspark_noise_token_id} is outside the vocabulary")
    if text.dspark_num_experts_per_tok > text.dspark_n_routed_experts:
        problems.append("text_config.dspark_num_experts_per_tok: more than dspark_n_routed_experts")
    return problems
