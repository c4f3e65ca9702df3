"""Who owns entries, selections and candidates, derived from the config once (spec/model.md 3.8)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.model.config import TextConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What one layer reads, makes and owns."""

    layer: int
    ratio: int
    """Tokens an entry of the layer's source stands for; 0: the layer reads the window alone."""
    entries: int | None
    """Place of the layer's entries and index keys in ``State.entries`` and ``State.keys``; None at ratio 0."""
    pending: int | None
    """Place of the waiting pair in ``State.pending``; set in KV sources of ratio 2."""
    publishes: bool
    """KV source: makes entries and index keys."""
    selects: bool
    """Index source: selects entries, also for the layers after it up to the next source."""
    makes_candidates: bool
    """Also names the candidate blocks that later selections are restricted to."""
    reads_candidates: bool
    engram: int | None
    """Place of the layer's table rows in ``Rows.engram``."""
    draft_feature: bool
    """The stream mean of the layer's input is a feature of the draft model."""


def plan_layers(text: TextConfig) -> tuple[LayerPlan, ...]:
    """The plan of every backbone layer. The config has been validated: sources exist and their ratios agree."""
    candidate = text.candidate_source_layer_id
    pairs = [s for s in text.kv_source_layer_ids if text.compress_ratios[s] == 2]
    plans = []
    for layer in range(text.num_hidden_layers):
        ratio = text.compress_ratios[layer]
        source = _latest(text.kv_source_layer_ids, layer) if ratio else None
        selects = layer in text.index_source_layer_ids
        publishes = layer in text.kv_source_layer_ids
        plans.append(
            LayerPlan(
                layer=layer,
                ratio=ratio,
                entries=None if source is None else text.kv_source_layer_ids.index(source),
                pending=pairs.index(layer) if layer in pairs else None,
                publishes=publishes,
                selects=selects,
                makes_candidates=layer == candidate,
                # Candidates are blocks of one source's entries: they end with that source.
                reads_candidates=selects
                and candidate is not None
                and layer > candidate
                and source == _latest(text.kv_source_layer_ids, candidate),
                engram=text.engram_layer_ids.index(layer) if layer in text.engram_layer_ids else None,
                draft_feature=layer in text.dspark_target_layer_ids,
            )
        )
    return tuple(plans)


def _latest(sources: tuple[int, ...], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)
