"""Judges with one planted error each: a comparison that is worth something tells every one of them from the truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.model.config import ModelConfig
from tests.judge import Judge, Trace, latest, rotate

Weights = Mapping[str, Tensor]


class NoSink(Judge):
    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        sinks = {name: torch.full_like(w, -torch.inf) for name, w in weights.items() if name.endswith("attn_sink")}
        super().__init__(config, {**weights, **sinks}, classes)


class TransposedComb(Judge):
    def mix(self, layer: int, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = super().mix(layer, name, streams)
        return pre, post, comb.transpose(1, 2)


class PreNotDeferred(Judge):
    def sublayer(
        self, layer: int, name: str, streams: Tensor, pre: Tensor, function: Callable[[Tensor], Tensor], trace: Trace
    ) -> tuple[Tensor, Tensor]:
        return super().sublayer(layer, name, streams, self.mix(layer, name, streams)[0], function, trace)


class EngramDisturbsPre(Judge):
    """The mix starts again after an Engram."""

    def block(self, layer: int, streams: Tensor, pre: Tensor, span: list[bool], trace: Trace) -> tuple[Tensor, Tensor]:
        if layer and layer in self.text.engram_layer_ids:
            pre = torch.eye(1, pre.shape[1], dtype=pre.dtype).expand_as(pre)
        return super().block(layer, streams, pre, span, trace)


class FewerSinkhornRounds(Judge):
    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        fewer = replace(config.text_config, hc_sinkhorn_iters=config.text_config.hc_sinkhorn_iters // 4)
        super().__init__(replace(config, text_config=fewer), weights, classes)


class NoInverseRotation(Judge):
    def rotate_back(self, out: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
        return out


class EntriesRotatedByIndex(Judge):
    """Entry j at position j instead of the first token of its group."""

    def compress(self, layer: int, x: Tensor, trace: Trace) -> None:
        super().compress(layer, x, trace)
        ratio = self.text.compress_ratios[layer]
        from_group = torch.arange(len(trace.entries[layer])) * (1 - ratio)
        trace.entries[layer] = rotate(trace.entries[layer], from_group, self.frequencies(ratio))


class GroupsWithoutGate(Judge):
    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        gates = {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith("compressor.wgate.weight")}
        super().__init__(config, {**weights, **gates}, classes)


class UnfinishedGroupsVisible(Judge):
    def visible(self, positions: Tensor, ratio: int) -> Tensor:
        return positions // ratio + 1


class OwnEntryInvisible(Judge):
    def visible(self, positions: Tensor, ratio: int) -> Tensor:
        return positions // ratio


class CandidatesIgnored(Judge):
    def is_restricted(self, layer: int) -> bool:
        return False


class CandidatesRestrictTheirSource(Judge):
    def select(self, layer: int, x: Tensor, rank: Tensor, trace: Trace) -> None:
        super().select(layer, x, rank, trace)
        if layer == self.text.candidate_source_layer_id:
            trace.selected[layer] &= trace.candidates[layer]


class SelectionNotShared(Judge):
    """Every layer reads the first selection that was made from its source."""

    def selection(self, layer: int, trace: Trace) -> Tensor:
        source = latest(self.text.kv_source_layer_ids, layer)
        return trace.selected[min(i for i in trace.selected if i >= source)]


class WindowOneShort(Judge):
    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        shorter = replace(config.text_config, sliding_window=config.text_config.sliding_window - 1)
        super().__init__(replace(config, text_config=shorter), weights, classes)


class NoYarn(Judge):
    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        scaling = replace(config.text_config.rope_scaling, factor=1.0)
        super().__init__(
            replace(config, text_config=replace(config.text_config, rope_scaling=scaling)), weights, classes
        )


class HeadsDealtToGroups(Judge):
    """Heads go round the groups instead of in runs."""

    def project(self, layer: int, out: Tensor) -> Tensor:
        return super().project(layer, out.unflatten(1, (-1, self.text.o_groups)).transpose(1, 2).flatten(1, 2))


class BiasInWeights(Judge):
    def route(self, layer: int, x: Tensor, span: list[bool], trace: Trace) -> Tensor:
        text, weight = self.text, super().route(layer, x, span, trace)
        total = self.router_scores(layer, x) + self.weights[f"layers.{layer}.ffn.gate.bias"]
        biased = torch.where(weight > 0, total, 0.0)
        return biased / biased.sum(1, keepdim=True) * text.routed_scaling_factor


class GateClampedBelow(Judge):
    """The gate is clamped on both sides, as the other half is."""

    def clamp_gate(self, gate: Tensor) -> Tensor:
        return gate.clamp(-self.text.swiglu_limit, self.text.swiglu_limit)


class NoSharedExpert(Judge):
    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        zeros = {name: torch.zeros_like(w) for name, w in weights.items() if ".shared_experts.w2." in name}
        super().__init__(config, {**weights, **zeros}, classes)


class EngramPadIsZero(Judge):
    """Before the sequence stands class 0, not the class of the pad token."""

    def __init__(self, config: ModelConfig, weights: Weights, classes: Sequence[int]) -> None:
        super().__init__(config, weights, classes)
        self.pad = self.classes[0]


class EngramLayersSwapped(Judge):
    """Every layer but the first uses the hash of the Engram layer before it."""

    def hash_rows(self, layer: int, ids: Sequence[int], span: list[bool]) -> list[list[int]]:
        before = max((i for i in self.text.engram_layer_ids if i < layer), default=layer)
        return super().hash_rows(before, ids, span)


BROKEN_JUDGES: tuple[type[Judge], ...] = (
    NoSink,
    TransposedComb,
    PreNotDeferred,
    EngramDisturbsPre,
    FewerSinkhornRounds,
    NoInverseRotation,
    EntriesRotatedByIndex,
    GroupsWithoutGate,
    UnfinishedGroupsVisible,
    OwnEntryInvisible,
    CandidatesIgnored,
    CandidatesRestrictTheirSource,
    SelectionNotShared,
    WindowOneShort,
    NoYarn,
    HeadsDealtToGroups,
    BiasInWeights,
    GateClampedBelow,
    NoSharedExpert,
    EngramPadIsZero,
    EngramLayersSwapped,
)
