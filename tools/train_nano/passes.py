"""Forward and backward pass of one mix, as a CUDA graph where there is a GPU.

The model is small and deep: on a GPU it waits for launches most of the time. A pass has fixed shapes, so it is captured
once for every mix and way of computing, and replayed on static inputs. Nothing inside waits for the device or copies
from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_nano.attention import Step
from tools.train_nano.batches import Batch
from tools.train_nano.forward import forward
from tools.train_nano.masters import Masters
from tools.train_nano.optimiser import Optimiser
from tools.train_nano.rows import Numerics
from tools.train_nano.sdpa import fused_attention

_WARM_UPS = 1


@dataclass(frozen=True, slots=True)
class Way:
    """How a pass computes."""

    sparse: bool
    rounded: bool


@dataclass
class Results:
    """Of one pass, overwritten by the next pass of its kind."""

    losses: Tensor
    """[n] F32: cross entropy of every wanted row, padding included."""
    right: Tensor
    """[n] bool."""
    index_losses: Tensor
    """[reading layers] F32."""
    index_recall: Tensor
    """[reading layers, 2] F32: sharp attention that the indexer's best entries hold, and all of it."""
    loads: Tensor
    """[layers, E] F32: rows that chose each expert."""


class Passes:
    """All passes of a run. Gradients are added to the masters' ``grad``, which the optimiser has made."""

    def __init__(
        self,
        masters: Masters,
        optimiser: Optimiser,
        *,
        graphs: bool,
        say: Callable[[str], None],
    ) -> None:
        self._masters, self._say = masters, say
        self._learning = optimiser.learning
        self._learned = masters.indexer_ids()
        self._device = next(masters.parameters()).device
        self._graphs = graphs and self._device.type == "cuda"
        self._captured: dict[tuple[object, Way], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None

    def run(self, kind: object, batch: Batch, way: Way) -> Results:
        """Batches of equal ``kind`` have equal shapes."""
        if not self._graphs:
            return self._compute(batch.to(self._device), way)
        known = self._captured.get((kind, way))
        if known is None:
            try:
                known = self._capture(batch, way)
            except RuntimeError as error:
                self._say(f"no CUDA graphs, passes run eagerly: {error}")
                self._graphs = False
                torch.cuda.synchronize()
                for master in self._learning:
                    assert master.grad is not None
                    master.grad.zero_()
                return self._compute(batch.to(self._device), way)
            self._captured[kind, way] = known
        return known.replay(batch)

    def _compute(self, batch: Batch, way: Way) -> Results:
        numerics = Numerics(self._masters.dtype, weights=way.rounded, activations=way.rounded)
        rows, length = batch.ids.shape
        step = Step(numerics, rows, length, way.sparse, batch.samples, self._learned)
        with fused_attention():
            logits = forward(self._masters, step, batch.ids, batch.wanted)
            losses = functional.cross_entropy(logits, batch.targets, reduction="none")
            index_losses = torch.stack(step.index_losses)
            total = (losses * batch.weights).sum() + index_losses.sum()
            gradients = torch.autograd.grad(total, self._learning, allow_unused=True)
        with torch.no_grad():
            pairs = [(m.grad, g) for m, g in zip(self._learning, gradients, strict=True) if g is not None]
            torch._foreach_add_([a for a, _ in pairs if a is not None], [b for _, b in pairs])
            right = logits.argmax(1) == batch.targets
        return Results(
            losses.detach(),
            right,
            index_losses.detach(),
            torch.stack(step.index_recall),
            torch.stack(step.loads),
        )

    def _capture(self, batch: Batch, way: Way) -> _Captured:
        static = Batch(*(getattr(batch, f.name).to(self._device, copy=True) for f in fields(batch)))
        kept = [None if m.grad is None else m.grad.clone() for m in self._learning]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._compute(static, way)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = self._compute(static, way)
        for master, gradient in zip(self._learning, kept, strict=True):
            assert master.grad is not None and gradient is not None
            master.grad.copy_(gradient)
        return _Captured(graph, static, results)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    static: Batch
    results: Results

    def replay(self, batch: Batch) -> Results:
        for field in fields(batch):
            getattr(self.static, field.name).copy_(getattr(batch, field.name).pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.results
