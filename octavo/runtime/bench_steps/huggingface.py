"""Hugging Face's ``deepseek_v4`` at the sizes of the model: the closest third-party code, for its time a layer.

It is DeepSeek-V4, not V4.1: every layer compresses its own entries, four tokens each, there is no Engram, and weights
are BF16. It gets as many experts as are resident here, and each row chooses one of them, where here it meets
(experts a token) x (resident share) on average. Attention is its eager one. Rows of one request from its start alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.runtime.assemble import Assembly
from octavo.runtime.bench_steps.steps import StepInputs
from octavo.runtime.floor import StepShape

_LAYERS = 4
"""The time of a layer is that of so many, divided."""
_MODULE = "transformers.models.deepseek_v4"


class HuggingFaceLayers:
    """Random layers of the other model. A baseline, see :mod:`octavo.runtime.bench_steps.baselines`."""

    name = "huggingface"
    layers = _LAYERS

    @staticmethod
    def require() -> None:
        """Raise :class:`OctavoError` unless a transformers with the model is installed."""
        if find_spec("transformers") is None or find_spec(_MODULE) is None:
            raise OctavoError(
                "--baselines huggingface measures the deepseek_v4 of Hugging Face's transformers, which is not "
                "installed here or too old. Install transformers>=5.17, or leave this baseline out."
            )

    def __init__(self, assembly: Assembly) -> None:
        configuration: Any = import_module(f"{_MODULE}.configuration_deepseek_v4")
        modeling: Any = import_module(f"{_MODULE}.modeling_deepseek_v4")
        text = assembly.config.text_config
        self._experts = len(assembly.model.experts)
        config = configuration.DeepseekV4Config(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            moe_intermediate_size=text.moe_intermediate_size,
            num_hidden_layers=_LAYERS,
            num_attention_heads=text.num_attention_heads,
            head_dim=text.head_dim,
            qk_rope_head_dim=text.qk_rope_head_dim,
            q_lora_rank=text.q_lora_rank,
            o_groups=text.o_groups,
            o_lora_rank=text.o_lora_rank,
            n_routed_experts=self._experts,
            num_experts_per_tok=1,
            sliding_window=text.sliding_window,
            index_n_heads=text.index_n_heads,
            index_head_dim=text.index_head_dim,
            index_topk=text.index_topk,
            hc_mult=text.hc_mult,
            hc_sinkhorn_iters=text.hc_sinkhorn_iters,
            layer_types=["compressed_sparse_attention"] * _LAYERS,
            mlp_layer_types=["moe"] * _LAYERS,
            attn_implementation="eager",
            experts_implementation="grouped_mm",
        )
        with torch.device(assembly.device):
            model = modeling.DeepseekV4Model(config).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=text.initializer_range)
        self._model: Callable[..., Any] = model

    def has(self, shape: StepShape) -> bool:
        return shape.requests == 1 and shape.context == 0

    def call(self, step: StepInputs) -> Callable[[], object]:
        return functools.partial(self._layers, step.tokens.ids.unsqueeze(0))

    def describe(self) -> dict[str, Any]:
        return {
            "what": f"{_LAYERS} layers of transformers' deepseek_v4, {self._experts} experts, one a row; no head",
        }

    def _layers(self, ids: Tensor) -> object:
        return self._model(input_ids=ids, use_cache=False)
