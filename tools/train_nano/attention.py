"""Differentiable counterparts of the operators that carry state, on whole conversations side by side.

Every conversation stands alone at positions 0..T-1, so pools are not needed: entries and index keys of the step are
kept by source, and selections are masks [B, T, N]. Scores of the indexer take no part in the main loss; they learn from
the attention that the main heads pay to all visible entries, on sampled rows. Source: spec/model.md 3.5 to 3.7.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import UsageError
from octavo.kernels.select import best_blocks, candidate_mask
from tools.train_nano.formats import Format
from tools.train_nano.functions import rms, turn
from tools.train_nano.rows import Numerics

QUERY_BLOCK = 256
"""Queries that share their window keys in one call: a longer block computes more masked scores, a shorter one copies
more keys."""
_LEAST_WEIGHT = 0.02
"""Of a row in the indexer's loss, however little it looks at entries."""
_ALIGN = 8
"""Channels and keys come in multiples of this many for the fused attention kernels."""


@dataclass
class Step:
    """One forward pass over B conversations of T tokens: how it attends, and what it notes for the losses."""

    numerics: Numerics
    batch: int
    length: int
    sparse: bool
    """Attend to selected entries; otherwise to all visible ones, while the indexer learns."""
    samples: Tensor | None = None
    """[B, m] int64: positions on which the indexer is taught."""
    learned: frozenset[int] = frozenset()
    """Masters of the indexer by ``id``: they alone learn from its loss."""
    entries: dict[int, Tensor] = field(default_factory=dict)
    """By source [B, N, head_dim]."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    """By source [B, N, index_head_dim]."""
    ratios: dict[int, int] = field(default_factory=dict)
    loads: list[Tensor] = field(default_factory=list)
    """By layer [E] F32: rows that chose each expert."""
    index_losses: list[Tensor] = field(default_factory=list)
    index_recall: list[Tensor] = field(default_factory=list)
    """By reading layer [2]: how much of the sharp attention on entries the indexer's best hold, and how much there
    is."""
    _masks: dict[tuple[int | None, int], tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """Masks of attention by source and selection; layers that share a selection share the mask."""
    _index_logs: Tensor | None = None
    """[B, m, N]: log-softmax of the current index source's scores on the sampled rows."""
    _index_best: Tensor | None = None
    """[B, m, k] int64: the entries with the best of them."""

    def visible(self, source: int) -> Tensor:
        """[T, N] bool: entries whose group is complete."""
        count = self.keys[source].shape[1]
        device = self.keys[source].device
        complete = (torch.arange(self.length, device=device) + 1) // self.ratios[source]
        mask: Tensor = torch.arange(count, device=device) < complete.unsqueeze(1)
        return mask

    def by_row(self, x: Tensor) -> Tensor:
        """[B * T, ...] -> [B, T, ...]."""
        rows: Tensor = x.unflatten(0, (self.batch, self.length))
        return rows


def publish(
    step: Step,
    values: Tensor,
    gates: Tensor | None,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    source: int,
    epsilon: float,
) -> None:
    numerics = step.numerics
    ratio = 1 if gates is None else 2
    values = step.by_row(values)
    if gates is not None:
        pairs = step.length // 2 * 2
        weights = step.by_row(gates)[:, :pairs].unflatten(1, (-1, 2)).softmax(2)
        values = (values[:, :pairs].unflatten(1, (-1, 2)) * weights).sum(2)
    compressed = rms(values.to(numerics.dtype), numerics.weight(norm, Format.BF16), epsilon)
    cosine, sine = numerics.angles(torch.arange(compressed.shape[1], device=values.device) * ratio, frequencies)

    def turned(x: Tensor) -> Tensor:
        """x [B, N, C] by entry."""
        return turn(x.transpose(0, 1), cosine, sine, False).transpose(0, 1)

    key = functional.linear(compressed.detach(), numerics.weight(wk, Format.BF16))
    key = rms(key, numerics.weight(k_norm, Format.BF16), epsilon)
    step.ratios[source] = ratio
    step.entries[source] = numerics.activation(turned(compressed), Format.Q4NV)
    step.keys[source] = numerics.activation(turned(key), Format.Q4MX)


def select(
    step: Step,
    query: Tensor,
    weights: Tensor,
    source: int,
    candidates: Tensor | None,
    scale: float,
    top_k: int,
) -> Tensor | None:
    """The mask of selected entries [B, T, N], or None for all; candidates is such a mask."""
    return _choose(step, query, weights, source, candidates, scale, top_k)[0]


def select_candidates(
    step: Step,
    query: Tensor,
    weights: Tensor,
    source: int,
    scale: float,
    top_k: int,
    top_blocks: int,
    block_size: int,
) -> tuple[Tensor | None, Tensor | None]:
    selected, scores = _choose(step, query, weights, source, None, scale, top_k)
    if scores is None:
        return selected, None
    visible = step.visible(source).sum(1).repeat(step.batch)
    blocks = best_blocks(scores.flatten(0, 1), visible, top_blocks, block_size)
    return selected, candidate_mask(blocks, block_size, scores.shape[2]).view(scores.shape)


def _choose(
    step: Step, query: Tensor, weights: Tensor, source: int, candidates: Tensor | None, scale: float, top_k: int
) -> tuple[Tensor | None, Tensor | None]:
    query, weights = step.by_row(query), step.by_row(weights) * scale
    keys, visible = step.keys[source], step.visible(source)
    if step.samples is not None:
        scores = _scores(_sampled(query, step.samples), _sampled(weights, step.samples), keys)
        seen = visible[step.samples]
        step._index_logs = scores.masked_fill(~seen, -1e9).log_softmax(-1)
        step._index_best = step._index_logs.detach().topk(min(top_k, scores.shape[2]), sorted=False).indices
    if not step.sparse:
        return None, None
    with torch.no_grad():
        scores = _scores(query, weights, keys).to(step.numerics.dtype).float().masked_fill(~visible, -torch.inf)
        allowed = scores if candidates is None else scores.masked_fill(~candidates, -torch.inf)
        best = _largest(allowed, min(top_k, scores.shape[2]), exact=step.numerics.dtype == torch.float32)
        selected = torch.zeros_like(allowed, dtype=torch.bool).scatter_(2, best, True)
        return selected & (allowed > -torch.inf), scores


def _scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of weight x relu(q k), F32: query [B, m, heads, C], weights [B, m, heads], keys [B, N, C]."""
    total = torch.zeros(query.shape[0], query.shape[1], keys.shape[1], device=query.device)
    transposed = keys.transpose(1, 2)
    for head in range(query.shape[2]):
        total = total + torch.bmm(query[:, :, head], transposed).relu() * weights[:, :, head, None]
    return total


def _largest(scores: Tensor, count: int, exact: bool) -> Tensor:
    """Indices of the largest, ties to the lower index as in the engine.

    BF16 scores leave 16 bits of an F32 free: the index goes there, and a plain ``topk`` breaks ties as it should.
    """
    if exact:
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int32)
    return (((ordered >> 16) << 16) | (0xFFFF - places)).topk(count, dim=-1, sorted=False).indices


def _sampled(x: Tensor, samples: Tensor) -> Tensor:
    """x [B, T, ...] at samples [B, m] -> [B, m, ...]."""
    index = samples.view(*samples.shape, *(1,) * (x.dim() - 2)).expand(*samples.shape, *x.shape[2:])
    return x.gather(1, index)


def attend(
    step: Step,
    query: Tensor,
    latents: Tensor,
    window: int,
    sink: Tensor,
    source: int | None,
    selected: Tensor | None,
) -> Tensor:
    query, latents = step.by_row(query), step.by_row(latents)
    if source is not None and step.samples is not None:
        _teach_indexer(step, query, latents, window, sink, source)
    length, heads, channels = query.shape[1:]
    block = min(length, QUERY_BLOCK)
    if length % block:
        raise UsageError(f"{length} tokens a conversation: give at most {QUERY_BLOCK} or a multiple of it")
    blocks = length // block

    # Keys of a block: its window, the entries, the sink, padding.
    near = functional.pad(latents, (0, 0, window - 1, 0)).unfold(1, block + window - 1, block).transpose(2, 3)
    near = near.flatten(0, 1)
    keys = [near] if source is None else [near, step.entries[source].repeat_interleave(blocks, 0)]
    count = sum(k.shape[1] for k in keys)
    extra = -count % _ALIGN or _ALIGN
    keys.append(near.new_zeros(near.shape[0], extra, channels))
    value, mask = (
        torch.cat(keys, 1).unsqueeze(1),
        _mask(step, near, block, window, extra, source, selected).unsqueeze(1),
    )

    # The sink is a key without channels of its own: one more channel carries its logit.
    scale = channels**-0.5
    logit = (sink / scale).to(query.dtype).view(1, 1, heads, 1).expand(*query.shape[:3], 1)
    zeros = query.new_zeros(*query.shape[:3], _ALIGN - 1)
    wide = torch.cat((query, logit, zeros), -1).unflatten(1, (blocks, block)).flatten(0, 1).transpose(1, 2)
    mark = query.new_zeros(1, 1, count + extra, _ALIGN)
    mark[:, :, count, 0].fill_(1.0)
    key = torch.cat((value, mark.expand(value.shape[0], -1, -1, -1)), -1)
    attended = functional.scaled_dot_product_attention(
        wide, key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1), attn_mask=mask, scale=scale
    )
    return attended.transpose(1, 2).reshape(step.batch * length, heads, channels)


def _mask(
    step: Step, near: Tensor, block: int, window: int, extra: int, source: int | None, selected: Tensor | None
) -> Tensor:
    """[B * blocks, block, keys] bool: which keys a query sees, those of :func:`attend` in their order."""
    known = step._masks.get((source, id(selected)))
    if known is not None:
        return known[0]
    blocks = step.length // block
    device = near.device
    masks = [_window_mask(step.length, block, window, device).repeat(step.batch, 1, 1)]
    if source is not None:
        seen = step.visible(source) if selected is None else selected
        masks.append(seen.expand(step.batch, -1, -1).unflatten(1, (blocks, block)).flatten(0, 1))
    last = torch.arange(extra, device=device) == 0
    masks.append(last.expand(step.batch * blocks, block, extra))
    mask = torch.cat(masks, 2)
    step._masks[source, id(selected)] = mask, selected
    return mask


def _window_mask(length: int, block: int, window: int, device: torch.device) -> Tensor:
    """[blocks, block, block + window - 1]: key c of a block stands at position start + c - window + 1."""
    row = torch.arange(block, device=device).unsqueeze(1)
    column = torch.arange(block + window - 1, device=device)
    near = (column >= row) & (column < row + window)
    start = torch.arange(0, length, block, device=device).view(-1, 1, 1)
    return near & (start + column - window + 1 >= 0)


def _teach_indexer(step: Step, query: Tensor, latents: Tensor, window: int, sink: Tensor, source: int) -> None:
    """The loss of the current index scores against this layer's dense attention on the sampled rows."""
    samples, logs, best = step.samples, step._index_logs, step._index_best
    assert samples is not None and logs is not None and best is not None
    with torch.no_grad():
        batch, count = samples.shape
        asked = _sampled(query, samples).transpose(1, 2).float() * query.shape[-1] ** -0.5
        entries = step.entries[source].float()
        far = asked @ entries.unsqueeze(1).transpose(2, 3)
        seen = step.visible(source)[samples]
        far = far.masked_fill(~seen.unsqueeze(1), -torch.inf)
        places = samples.unsqueeze(2) - torch.arange(window, device=samples.device)
        near_keys = latents.gather(
            1, places.clamp_min(0).flatten(1).unsqueeze(2).expand(-1, -1, latents.shape[2])
        ).view(batch, count, window, -1)
        near = torch.einsum("bhmc,bmwc->bhmw", asked, near_keys.float())
        near = near.masked_fill((places < 0).unsqueeze(1), -torch.inf)
        sinks = sink.float().view(1, -1, 1, 1).expand(batch, -1, count, 1)
        # Squared, because a selection must hold what some head looks at sharply; what a head spreads over everything
        # it may lose. Rows count by how sharply they look.
        share = torch.cat((far, near, sinks), -1).softmax(-1)[..., : far.shape[-1]].square().sum(1)
        total = share.sum(-1, keepdim=True)
        target = share / total.clamp_min(1e-9)
        sharpness = total.squeeze(-1).clamp_max(1.0)
        held = (target.gather(2, best).sum(-1) * sharpness).sum()
        step.index_recall.append(torch.stack((held, sharpness.sum())))
        weight = sharpness + _LEAST_WEIGHT * seen.any(-1)
        weight = weight / weight.sum().clamp_min(1e-9)
        entropy = torch.special.entr(target).sum(-1)
    divergence = -(target * logs).sum(-1) - entropy
    step.index_losses.append((divergence * weight).sum())
