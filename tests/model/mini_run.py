"""Runs the golden mini checkpoint through the engine's own runner and records what passes between its modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.model.inputs import Output
from octavo.runtime.assemble import Assembly, assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.runner import Chunk, Runner

GOLDENS = Path(__file__).parents[1] / "goldens"
MINI = GOLDENS / "mini"
Numerics = Literal["reference", "plain"]
GOLDEN_MODE = {"reference": "ref", "plain": "fp32"}


def golden(name: str, numerics: Numerics) -> dict[str, Tensor]:
    return load_file(GOLDENS / f"{name}_{GOLDEN_MODE[numerics]}.safetensors")


def mini_assembly(numerics: Numerics) -> Assembly:
    return assemble(
        EngineConfig(model=MINI, numerics=numerics, kv_tokens=256, max_requests=1, kv_storage="bf16", device="cpu")
    )


@dataclass
class Record:
    """What one step computed, all rows."""

    hidden: Tensor
    features: list[Tensor]
    streams: list[Tensor] = field(default_factory=list)
    pre: list[Tensor] = field(default_factory=list)
    selected: list[Tensor | None] = field(default_factory=list)
    candidates: list[Tensor | None] = field(default_factory=list)


class MiniRun:
    """A fresh request in slot 0 of a fresh runner."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.runner = Runner(assembly)
        self.runner.set_pages([(0, page, page) for page in range(assembly.capacity.sizes.pages)])
        self.length = 0

    def step(self, ids: list[int]) -> Record:
        """Compute ``ids`` after what was computed before."""
        layers: list[tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None], list[Tensor]]] = []
        outputs: list[Output] = []

        def keep_layer(module: nn.Module, args: Any, result: Any) -> None:
            layers.append(result)

        def keep_output(module: nn.Module, args: Any, result: Any) -> None:
            outputs.append(result)

        body = self.assembly.model.body
        handles = [layer.register_forward_hook(keep_layer) for layer in body.layers]
        handles.append(body.register_forward_hook(keep_output))
        try:
            self.runner.run([Chunk(0, self.length, ids)])
        finally:
            for handle in handles:
                handle.remove()
        self.length += len(ids)
        record = Record(outputs[0].hidden, outputs[0].features)
        for streams, pre, selection, _ in layers:
            record.streams.append(streams)
            record.pre.append(pre)
            record.selected.append(selection[0])
            record.candidates.append(selection[1])
        return record

    def logits(self, record: Record) -> Tensor:
        """Of every row, [rows, V]."""
        with torch.no_grad():
            logits: Tensor = self.assembly.model.head(record.hidden)
            return logits

    def entries(self, source: int, count: int) -> Tensor:
        """The first entries of the KV source numbered ``source``, in logical order: pages were given in order."""
        return self.runner.pools.entries[source].flatten(0, 1)[:count]

    def keys(self, source: int, count: int) -> Tensor:
        return self.runner.pools.keys[source].flatten(0, 1)[:count]


def relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative L2 per row."""
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    error: Tensor = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    return error


def worst(actual: Tensor, expected: Tensor) -> float:
    """Largest relative L2 of a row; 0 of no rows."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(relative(actual, expected).max()) if len(expected) else 0.0


def differing(actual: Tensor, expected: Tensor) -> int:
    """How many elements are not equal to the bit."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    return int((actual != expected).sum())


def ulps(actual: Tensor, expected: Tensor) -> int:
    """Largest distance of two F32 tensors of equal signs, in units in the last place."""
    assert actual.shape == expected.shape and (actual.signbit() == expected.signbit()).all()
    return int((actual.view(torch.int32) - expected.view(torch.int32)).abs().max())
