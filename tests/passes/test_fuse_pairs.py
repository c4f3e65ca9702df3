"""The two products of an attention's input become ``linear_f8_pair`` where a backend has a kernel for it.

With the reference in the place of the kernel, ``test_fuse.py`` compares the fused program of one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from octavo.kernels.linear import linear_f8
from octavo.kernels.norm import rms_norm
from octavo.kernels.operator import OPERATORS
from octavo.kernels.rope import window_latent
from octavo.model.plan import plan_layers
from octavo.passes.base import LAYER, ROLE, VALUE, Compilation, GraphError, PassContext, operator_of
from octavo.passes.fuse import Fuse
from octavo.passes.normalise import Normalise
from octavo.passes.propagate import computed, fake_mode_of
from octavo.passes.runner import run_passes
from tests.graphs.mini_program import export
from tests.passes.compiled import (
    batch,
    body_outputs,
    config,
    differences,
    fused,
    global_rows,
    layer_nodes,
    new_pools,
    normal,
    run_on_ranks,
)

WITH_KERNEL = PassContext(backends={"linear_f8_pair": "triton"})
LAYERS = config().text_config.num_hidden_layers
SELECTING = sum(plan.selects for plan in plan_layers(config().text_config))
BROKEN_LAYER = 1


@pytest.fixture(scope="module")
def pairs() -> Compilation:
    compilation = normal()
    (result,) = run_passes(compilation, WITH_KERNEL, passes=[Fuse()])
    assert SELECTING, "the mini model has layers whose query is read by two products"
    assert result.report.notes == (
        "no backend of mhc_site beside the reference",
        f"{LAYERS} of {LAYERS + SELECTING} pairs fused",
    )
    assert (result.report.added, result.report.removed) == (3 * LAYERS, 2 * LAYERS)
    return compilation


def test_every_layer_has_its_pair(pairs: Compilation) -> None:
    """Of the query's way down and the latent, in this order, and of nothing else."""
    found = layer_nodes(pairs, "linear_f8_pair")
    assert [(node.meta[LAYER], node.meta[ROLE]) for node in found] == [(layer, "attn") for layer in range(LAYERS)]
    for node in found:
        layer = node.meta[LAYER]
        weights = [pairs.inputs[str(argument)].path for argument in node.args[1:]]
        own = [f"layers.{layer}.attn.{name}.{kind}" for name in ("wq_a", "wkv") for kind in ("weight", "scale")]
        assert weights == own
        query, latent = node.users
        assert (query.args[1], latent.args[1]) == (0, 1)
        assert [operator_of(user) for user in query.users] == [rms_norm]
        assert [operator_of(user) for user in latent.users] == [window_latent]
    left = {node.meta[ROLE] for node in layer_nodes(pairs, "linear_f8")}
    assert left == {"attn.wq_b", "attn.wo_b", "attn.indexer.wq_b", "engram.wkv"}


def test_weights_in_bf16_go_with_theirs() -> None:
    compilation = export(layers=1, bf16_weights=True)
    run_passes(compilation, WITH_KERNEL, passes=[Normalise(), Fuse()])
    (found,) = layer_nodes(compilation, "linear_f8_pair")
    names = ("wq_a.weight", "wq_a.scale", "wkv.weight", "wkv.scale", "wq_a.weight_bf16", "wkv.weight_bf16")
    paths = [compilation.inputs[str(argument)].path for argument in found.args[1:]]
    assert paths == [f"layers.0.attn.{name}" for name in names]
    assert [argument.name for argument in OPERATORS["linear_f8_pair"].overload._schema.arguments] == [
        *("x", "weight_a", "scale_a", "weight_b", "scale_b", "weight_a_bf16", "weight_b_bf16")
    ]


def test_results_have_the_places_and_shapes_that_they_had(pairs: Compilation) -> None:
    with fake_mode_of(pairs), torch.no_grad():
        for node in layer_nodes(pairs, "linear_f8_pair"):
            assert [user.meta[ROLE] for user in node.users] == ["attn.wq_a", "attn.wkv"]
            for user, kept, new in zip(node.users, node.meta[VALUE], computed(node), strict=True):
                assert kept.shape == new.shape == user.meta[VALUE].shape
                assert kept.dtype == new.dtype == user.meta[VALUE].dtype


def test_ranks_have_both_results(long_form: bool) -> None:
    """Rows are dealt over two ranks, in the long form four: results and pools of a prefill are those of one rank."""
    work, ranks = batch([9, 1, 5]), 4 if long_form else 2
    compilations = [fused(ranks, rank) for rank in range(ranks)]
    assert all(len(layer_nodes(each, "linear_f8_pair")) == LAYERS for each in compilations)
    by_rank, pools = run_on_ranks([work], ranks, sharded=True, buckets=(8,), compilations=compilations)
    alone = new_pools()
    expected = body_outputs(work, alone)
    results = zip(*(step.outputs for (step,) in by_rank), strict=True)
    actual = [global_rows(values, work.count, sharded=True) for values in results]
    for mine in pools:
        assert not differences(expected, actual, alone, mine)


def third_reader(first: Node) -> None:
    """A third product of the same rows."""
    with first.graph.inserting_after(first):
        other = first.graph.call_function(linear_f8.overload, first.args)
    other.meta = dict(first.meta)


def late_weight(first: Node) -> None:
    """The second weight is made of what the first product gave."""
    second = other_reader(first)
    with first.graph.inserting_before(second):
        late = first.graph.call_function(torch.ops.aten.mul.Tensor, (second.args[2], first))
    late.meta = dict(first.meta)
    second.update_arg(2, late)


def named_argument(first: Node) -> None:
    second = other_reader(first)
    second.kwargs = {"scale": second.args[2]}
    second.args = second.args[:2]


def other_module(first: Node) -> None:
    """As the two products that read the query, of which one is the indexer's."""
    other_reader(first).meta[ROLE] = "attn.indexer.wkv"


def other_rows(first: Node) -> None:
    """What the second product reads is made of what the first reads."""
    second, rows = other_reader(first), rows_of(first)
    with first.graph.inserting_before(second):
        doubled = first.graph.call_function(torch.ops.aten.mul.Tensor, (rows, 2.0))
    doubled.meta = dict(rows.meta)
    second.update_arg(0, doubled)


def other_reader(first: Node) -> Node:
    (found,) = (user for user in rows_of(first).users if operator_of(user) is linear_f8 and user is not first)
    return found


def rows_of(product: Node) -> Node:
    rows = product.args[0]
    assert isinstance(rows, Node)
    return rows


@pytest.mark.parametrize("defect", (third_reader, late_weight, named_argument, other_module, other_rows))
def test_a_broken_pattern_stays_as_it_is(defect: Callable[[Node], None]) -> None:
    compilation = normal()
    broken = next(n for n in layer_nodes(compilation, "linear_f8", BROKEN_LAYER) if n.meta[ROLE] == "attn.wq_a")
    defect(broken)
    compilation.module.recompile()
    run_passes(compilation, WITH_KERNEL, passes=[Fuse()])
    assert operator_of(broken) is linear_f8 and broken in compilation.graph.nodes
    layers = [node.meta[LAYER] for node in layer_nodes(compilation, "linear_f8_pair")]
    assert layers == [layer for layer in range(LAYERS) if layer != BROKEN_LAYER]


def test_a_pair_that_was_missed_is_named() -> None:
    compilation = normal()
    first = layer_nodes(compilation, "linear_f8", 0)[0]
    with pytest.raises(GraphError, match=rf"^{first} \(layer 0\): reads the rows that linear_f8\w* reads, and is not"):
        Fuse().ensures(compilation, WITH_KERNEL)
