"""After the first pass every node has an overload target, a fake value, a layer and a role."""

from __future__ import annotations

import operator

import pytest
import torch

from octavo.passes.base import (
    LAYER,
    ROLE,
    VALUE,
    Compilation,
    GraphError,
    GraphInput,
    InputKind,
    PassContext,
    values_of,
)
from octavo.passes.normalise import Normalise
from tests.passes.compiled import config, fresh, layer_nodes, run_all


@pytest.fixture
def normal() -> Compilation:
    return run_all(fresh(), PassContext(), last="normalise")


def test_every_node_has_the_keys(normal: Compilation) -> None:
    for node in normal.graph.nodes:
        assert {LAYER, ROLE} <= node.meta.keys(), node
        if node.op == "call_function":
            assert node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)
            assert VALUE in node.meta
            assert all(isinstance(value, torch.Tensor) for value in values_of(node))


def test_layers_and_roles(normal: Compilation) -> None:
    """Calls have the layer that made them, weights the layer that holds them, the ends of the body none."""
    layers = range(config().text_config.num_hidden_layers)
    assert [node.meta[LAYER] for node in layer_nodes(normal, "attend")] == list(layers)
    assert {node.meta[ROLE] for node in layer_nodes(normal, "attend")} == {"attn"}
    assert {node.meta[ROLE] for node in layer_nodes(normal, "experts")} == {"ffn"}
    assert layer_nodes(normal, "mhc_collapse")[-1].meta[LAYER] is None
    for node in normal.graph.nodes:
        if node.op == "placeholder" and ".layers." in f".{normal.inputs[node.name].path}":
            layer = normal.inputs[node.name].path.split(".")[1]
            assert node.meta[LAYER] == int(layer)


def test_unread_constants_go(normal: Compilation) -> None:
    """Nothing else does: a weight that nobody reads stays and is seen."""
    before = fresh()
    removed = set(before.inputs) - set(normal.inputs)
    assert {before.inputs[name].kind for name in removed} <= {InputKind.CONSTANT}
    placeholders = {node.name for node in normal.graph.nodes if node.op == "placeholder"}
    assert placeholders == set(normal.inputs)

    compilation = fresh()
    with compilation.graph.inserting_before(next(iter(compilation.graph.nodes))):
        unread = compilation.graph.placeholder("unread")
    compilation.inputs["unread"] = GraphInput(InputKind.CONSTANT, "unread")
    report = Normalise().run(compilation, PassContext())
    assert report.removed == 1 + len(removed)
    assert unread not in set(compilation.graph.nodes)


def test_inputs_without_a_source() -> None:
    compilation = fresh()
    name = next(iter(compilation.inputs))
    del compilation.inputs[name]
    with pytest.raises(GraphError, match=f"inputs without a source.*{name}"):
        run_all(compilation, PassContext(), last="normalise")


def test_packets_are_refused() -> None:
    compilation = fresh()
    node = layer_nodes(compilation, "attend")[2]
    node.target = torch.ops.octavo.attend
    with pytest.raises(GraphError, match=rf"{node} \(layer 2\): target .* is no operator overload"):
        run_all(compilation, PassContext(), last="normalise")


def test_missing_values_are_refused() -> None:
    compilation = fresh()
    node = layer_nodes(compilation, "experts")[4]
    del node.meta[VALUE]
    with pytest.raises(GraphError, match=rf"{node} \(layer 4\): no fake value"):
        run_all(compilation, PassContext(), last="normalise")
