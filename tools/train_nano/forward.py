"""One differentiable forward pass: token ids of whole conversations in, logits out, through the engine's modules."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.engram import DEAD_CLASS
from octavo.model.inputs import State, Tokens
from octavo.model.plan import plan_layers
from tools.train_nano.attention import Step
from tools.train_nano.masters import Masters
from tools.train_nano.operators import TrainingOperators


def forward(masters: Masters, step: Step, ids: Tensor, wanted: Tensor) -> Tensor:
    """Logits [n, V] F32 of some rows of ids [B, T] int64; wanted [n] int64 counts through the flattened batch.

    ``step`` says how to compute and keeps what the losses need.
    """
    device = ids.device
    batch, length = ids.shape
    text = masters.config.text_config
    positions = torch.arange(length, dtype=torch.int32, device=device).repeat(batch)
    slots = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(length)
    starts = torch.zeros_like(slots)
    image = torch.zeros(batch * length, dtype=torch.bool, device=device)
    tokens = Tokens(ids.flatten(), slots, positions, starts, torch.ones_like(image), image)
    history = torch.full((batch, text.engram_max_ngram_size - 1), DEAD_CLASS, device=device)
    with TrainingOperators(step):
        rows = masters.prelude(tokens, history)
        output = masters.model.body(rows, _state(masters, slots, positions, starts))
        logits: Tensor = masters.model.head(output.hidden.index_select(0, wanted))
    assert len(step.loads) == text.num_hidden_layers
    return logits


def _state(masters: Masters, slots: Tensor, positions: Tensor, starts: Tensor) -> State:
    """Pools are not kept: each is the number of its source, and a ring has the window's shape alone."""
    text = masters.config.text_config
    sources = [torch.tensor(index) for index in range(len(text.kv_source_layer_ids))]
    pairs = sum(plan.pending is not None for plan in plan_layers(text))
    ring = torch.empty(0, text.sliding_window, 0)
    nothing = torch.empty(0)
    return State(
        slots, positions, starts, nothing, [ring] * text.num_hidden_layers, sources, sources, [nothing] * pairs
    )
