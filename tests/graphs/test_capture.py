"""The body exports to one graph with dynamic rows, at true shapes too, and has the shape that the passes rely on."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import ExportedProgram

from octavo.graphs.capture import EXAMPLE_ROWS, capture
from octavo.kernels import OPERATORS
from octavo.model.config import ModelConfig
from octavo.model.inputs import Rows
from octavo.model.model import empty_model
from octavo.model.plan import plan_layers
from octavo.model.presets import preset
from octavo.model.random_weights import randomise
from tests.graphs.body_graph import example, export, export_body, layer_text, nodes_by_layer

NODES_PER_LAYER = 60
EXPORTED = {"mini": None, "released": range(48)}
"""Presets, and the experts that are resident."""


@pytest.fixture(scope="module", params=EXPORTED)
def exported(request: pytest.FixtureRequest) -> tuple[ModelConfig, ExportedProgram]:
    config = preset(request.param)
    return config, export_body(config, fake=True, experts=EXPORTED[request.param])


def test_nodes(exported: tuple[ModelConfig, ExportedProgram]) -> None:
    """Each layer has at most 60 nodes; sources alone publish and select; every layer attends once."""
    config, program = exported
    layers = nodes_by_layer(program)
    plans = plan_layers(config.text_config)
    assert sorted(layers) == [plan.layer for plan in plans]
    for plan in plans:
        targets = [str(node.target) for node in layers[plan.layer]]
        assert len(targets) <= NODES_PER_LAYER, plan.layer
        assert targets.count("octavo.attend.default") == 1, plan.layer
        assert targets.count("octavo.commit_window.default") == 1, plan.layer
        assert targets.count("octavo.experts.default") == 1, plan.layer
        assert targets.count("octavo.publish.default") == plan.publishes, plan.layer
        selections = targets.count("octavo.select.default") + targets.count("octavo.select_candidates.default")
        assert selections == plan.selects, plan.layer
        assert targets.count("octavo.select_candidates.default") == plan.makes_candidates, plan.layer
        assert targets.count("octavo.engram_gate.default") == (plan.engram is not None), plan.layer


def test_equal_layers_are_equal_graphs(exported: tuple[ModelConfig, ExportedProgram]) -> None:
    """Layers with the same duties have the same text, so no operator carries a layer index."""
    config, program = exported
    layers = nodes_by_layer(program)
    texts = defaultdict(set)
    count = 0
    for plan in plan_layers(config.text_config):
        duties = (plan.ratio, plan.publishes, plan.selects, plan.makes_candidates, plan.reads_candidates)
        others = (plan.engram is not None, plan.draft_feature, plan.layer == 0)
        texts[duties + others].add(layer_text(layers[plan.layer]))
        count += 1
    assert all(len(kinds) == 1 for kinds in texts.values())
    assert len({text for kinds in texts.values() for text in kinds}) <= len(texts) < count


def test_rows_are_dynamic(exported: tuple[ModelConfig, ExportedProgram]) -> None:
    """One symbol stands for the rows everywhere, and nothing was specialised to the example."""
    _, program = exported
    symbols = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, tuple | list) else [value]:
            if isinstance(tensor, torch.Tensor):
                symbols |= {str(size) for size in tensor.shape if not isinstance(size, int)}
                constant = node.op == "placeholder" and node.name.startswith(("p_", "b_"))
                fixed = isinstance(tensor.shape[0], int) and tensor.shape[0] == EXAMPLE_ROWS
                assert constant or not fixed, node
    assert len(symbols) == 1


def test_no_branch_on_data(exported: tuple[ModelConfig, ExportedProgram]) -> None:
    """Known targets alone: our operators, reshapes and a few pointwise nodes; no size is computed with."""
    _, program = exported
    plain = {
        operator.getitem,
        torch.ops.aten.unflatten.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.repeat.default,
        torch.ops.aten.mul.Tensor,
    }
    ours = {known.overload for known in OPERATORS.values()}
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert targets <= plain | ours, targets - plain - ours
    assert not [c for c in program.range_constraints.values() if c.upper < 8192]


def test_no_layer_in_a_schema() -> None:
    names = {argument.name for known in OPERATORS.values() for argument in known.overload._schema.arguments}
    assert "query" in names
    assert not [name for name in names if "layer" in name]


@torch.no_grad()
def test_the_graph_computes_what_the_module_does() -> None:
    """To the bit, for other row counts than the example's, one row included; so does the state that it leaves."""
    config = preset("mini")
    model = empty_model(config, torch.device("cpu"))
    randomise(model.official_parameters(), seed=0)
    module = export(model.body, config).module()
    for count in (1, 5, EXAMPLE_ROWS, 40):
        torch.manual_seed(count)
        zeros, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
        no_rows, pools = example(config)
        rows = Rows(
            torch.randn(count, config.text_config.hidden_size).bfloat16(),
            zeros,
            positions,
            positions >= 0,
            positions < 0,
            [torch.randn(count, engram.shape[1]).bfloat16() for engram in no_rows.engram],
        )
        states = [replace(pools, write_slots=zeros, write_positions=positions, write_starts=zeros) for _ in range(2)]
        states[1] = copy.deepcopy(states[1])
        expected, actual = model.body(rows, states[0]), module(rows, states[1])
        for ours, theirs in zip(
            pytree.tree_leaves((expected, states[0])), pytree.tree_leaves((actual, states[1])), strict=True
        ):
            assert torch.equal(ours, theirs), count


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


class Specialising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(EXAMPLE_ROWS, 2, 4)


@pytest.mark.parametrize("module", [Branching(), Specialising()])
def test_capture_refuses(module: nn.Module) -> None:
    """A branch on data and a fixed number of rows fail the export instead of being traced for the example."""
    x = torch.zeros(EXAMPLE_ROWS, 8)
    with pytest.raises(Exception, match=r"data-dependent|specialized|Constraints violated"):
        capture(module, (x,), [x])
