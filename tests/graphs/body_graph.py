"""Exports the body of a config, under fake tensors or with real ones, and describes its graph by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node

from octavo.graphs.capture import EXAMPLE_ROWS, capture
from octavo.model.body import Body
from octavo.model.config import ModelConfig
from octavo.model.inputs import Rows, State
from octavo.model.model import empty_model
from octavo.runtime.pools import Pools, PoolSizes, Storage

SIZES = PoolSizes(slots=3, pages=5, max_pages=4)


def example(config: ModelConfig) -> tuple[Rows, State]:
    """Inputs of the right shapes; no extent but the row count is ``EXAMPLE_ROWS``."""
    text, bf16 = config.text_config, torch.bfloat16

    def integers() -> torch.Tensor:
        return torch.zeros(EXAMPLE_ROWS, dtype=torch.int32)

    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    rows = Rows(
        torch.zeros(EXAMPLE_ROWS, text.hidden_size, dtype=bf16),
        integers(),
        integers(),
        torch.ones(EXAMPLE_ROWS, dtype=torch.bool),
        torch.zeros(EXAMPLE_ROWS, dtype=torch.bool),
        [torch.zeros(EXAMPLE_ROWS, columns, dtype=bf16) for _ in text.engram_layer_ids],
    )
    return rows, Pools(text, SIZES, Storage.BF16, torch.device("cpu")).state(integers(), integers(), integers())


def export_body(config: ModelConfig, *, fake: bool, experts: range | None = None) -> ExportedProgram:
    """The body with uninitialised weights; fake tensors have none at all."""
    with _tensors(fake):
        return export(empty_model(config, torch.device("cpu"), experts).body, config)


def export(body: Body, config: ModelConfig) -> ExportedProgram:
    rows, state = example(config)
    moving = [rows.embeds, rows.slots, rows.positions, rows.live, rows.image, *rows.engram]
    return capture(body, (rows, state), [*moving, state.write_slots, state.write_positions, state.write_starts])


@contextmanager
def _tensors(fake: bool) -> Iterator[None]:
    if fake:
        with FakeTensorMode():
            yield
    else:
        yield


def layer_of(node: Node) -> int | None:
    """The layer whose module made the node."""
    paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    found = [match for path in paths if (match := re.search(r"\blayers\.(\d+)", path))]
    return int(found[-1][1]) if found else None


def nodes_by_layer(program: ExportedProgram) -> dict[int, list[Node]]:
    nodes: dict[int, list[Node]] = {}
    for node in program.graph.nodes:
        layer = layer_of(node) if node.op == "call_function" else None
        if layer is not None:
            nodes.setdefault(layer, []).append(node)
    return nodes


def layer_text(nodes: list[Node]) -> str:
    """One layer's graph with its own numbering: values from elsewhere are named by what they are, not where."""
    names: dict[Node, str] = {}
    lines = []
    for node in nodes:

        def name(other: Node) -> str:
            if other not in names:
                short = re.sub(r"\d+", "", other.name) if other.op == "placeholder" else "before"
                names[other] = f"{short}#{len(names)}"
            return names[other]

        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda other: _Name(name(other)))
        value = node.meta["val"]
        values = value if isinstance(value, tuple | list) else [value]
        shapes = [f"{v.dtype}{list(v.shape)}" for v in values if isinstance(v, torch.Tensor)]
        names[node] = f"v#{len(names)}"
        lines.append(f"{names[node]} = {node.target}({arguments}) : {shapes}")
    return "\n".join(lines)


class _Name(str):
    def __repr__(self) -> str:
        return str(self)
