"""Collectives stand where contracts ask for them, none is missing, and none is there for nothing."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from octavo.graphs.emulation import EmulatedCommunicator
from octavo.kernels.collectives import gather_rows, reduce_rows
from octavo.model.plan import plan_layers
from octavo.passes.base import (
    LAYER,
    PLACEMENT,
    Compilation,
    GraphError,
    InputKind,
    PassContext,
    Placement,
    operator_of,
    tensor_arguments,
)
from octavo.passes.place import check_needs, check_placed
from tests.conftest import ReportCount
from tests.passes.compiled import (
    batch,
    body_outputs,
    collectives,
    compiled,
    config,
    differences,
    fresh,
    global_rows,
    layer_nodes,
    new_pools,
    run_all,
    run_on_ranks,
)

BOTH = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])


def placed(ranks: int, sharded: bool = True) -> tuple[Compilation, PassContext]:
    context = PassContext(ranks=ranks, sharded=sharded)
    return run_all(fresh(ranks), context, last="place"), context


def moved_values(node: Node) -> list[Node]:
    """What a collective is given."""
    return [value for _, value in tensor_arguments(node)]


def test_one_rank_inserts_nothing() -> None:
    """The graph is the one before, and every value is whole."""
    before = run_all(fresh(), PassContext(), last="verify")
    after, _ = placed(1)
    assert str(after.graph) == str(before.graph)
    assert not collectives(after)
    for node in after.graph.nodes:
        placement = node.meta.get(PLACEMENT, Placement.WHOLE)
        for each in placement if isinstance(placement, tuple) else (placement,):
            assert each in (Placement.WHOLE, Placement.REPLICATED), node


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sharded_counts(ranks: int) -> None:
    """A layer gathers latents and, rank-major, its experts' rows, and reduces; a source gathers what it publishes."""
    compilation, _ = placed(ranks)
    plans = plan_layers(config().text_config)
    assert len(layer_nodes(compilation, "reduce_rows")) == len(plans)
    gathers = layer_nodes(compilation, "gather_rows")
    assert sum(not node.args[2] for node in gathers) == len(plans)
    ordered = Counter(node.meta[LAYER] for node in gathers if node.args[2])
    assert ordered == {plan.layer: 1 for plan in plans}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicated_counts(ranks: int) -> None:
    """Only expert sums move, without scatter."""
    compilation, _ = placed(ranks, sharded=False)
    found = collectives(compilation)
    assert [operator_of(node) for node in found] == [reduce_rows] * config().text_config.num_hidden_layers
    assert not any(node.args[2] for node in found)


def test_ready_together_travels_packed() -> None:
    """A publishing layer's latents and compressor rows are one collective; flags of rows are gathered once."""
    compilation, _ = placed(4)
    for plan in plan_layers(config().text_config):
        packed = [node for node in layer_nodes(compilation, "gather_rows", plan.layer) if node.args[2]]
        values = [value for node in packed for value in moved_values(node)]
        compressor_rows = 0 if not plan.publishes else 2 if plan.pending is not None else 1
        assert len(values) == 1 + compressor_rows, plan.layer
    gathers = layer_nodes(compilation, "gather_rows")
    gathered = Counter((value, node.args[2]) for node in gathers for value in moved_values(node))
    assert set(gathered.values()) == {1}


@pytest.mark.parametrize("ranks", [2, 8])
@BOTH
def test_placements(ranks: int, sharded: bool) -> None:
    """Every contract holds, and placements derived anew ask for nothing more."""
    compilation, context = placed(ranks, sharded)
    for node in compilation.calls():
        check_needs(node, context)
    assert check_placed(compilation, context) >= len(list(compilation.calls()))
    wanted = Placement.SHARDED if sharded else Placement.REPLICATED
    outputs = compilation.graph.output_node().all_input_nodes
    assert {node.meta[PLACEMENT] for node in outputs} == {wanted}
    for node in compilation.graph.nodes:
        if node.op == "placeholder" and compilation.inputs[node.name].kind is InputKind.ROWS:
            assert node.meta[PLACEMENT] is wanted


def test_contract_violations_are_named() -> None:
    """Rows where a weight belongs, a weight where rows belong, rows placed differently in one node."""

    def replace(compilation: Compilation, name: str, layer: int, place: int, other: Node) -> Node:
        node = layer_nodes(compilation, name, layer)[0]
        node.update_arg(place, other)
        return node

    context = PassContext(ranks=4)
    compilation = run_all(fresh(4), context, last="verify")
    query = layer_nodes(compilation, "attend", 3)[0].args[0]
    assert isinstance(query, Node)
    node = replace(compilation, "commit_window", 3, 0, query)
    with pytest.raises(GraphError, match=rf"{node} \(layer 3\): argument ring must not be rows"):
        check_placed(compilation, context)

    compilation = run_all(fresh(4), context, last="verify")
    ring = layer_nodes(compilation, "commit_window", 6)[0].args[0]
    assert isinstance(ring, Node)
    node = replace(compilation, "attend", 6, 0, ring)
    with pytest.raises(GraphError, match=rf"{node} \(layer 6\): argument query needs rows rows; .* is whole"):
        check_placed(compilation, context)

    compilation, _ = placed(4)
    node = layer_nodes(compilation, "attend", 5)[0]
    latents = layer_nodes(compilation, "commit_window", 5)[0].args[1]
    assert isinstance(latents, Node)
    node.update_arg(0, latents)
    with pytest.raises(GraphError, match=rf"{node} \(layer 5\): needs this rank's rows of {latents} alone"):
        check_placed(compilation, context)


def test_no_ranks() -> None:
    with pytest.raises(GraphError, match="pass place: 0 ranks: there is at least one"):
        run_all(fresh(), PassContext(ranks=0), last="place")


def delete(node: Node) -> None:
    """Consumers read the values as they were before the collective, which is how a forgotten one looks."""
    values = moved_values(node)
    if operator_of(node) is gather_rows:
        for item in list(node.users):
            place = item.args[1]
            assert isinstance(place, int)
            item.replace_all_uses_with(values[place])
            node.graph.erase_node(item)
    else:
        node.replace_all_uses_with(values[0])
    node.graph.erase_node(node)


@BOTH
def test_any_deleted_collective_is_missed(sharded: bool, report_count: ReportCount) -> None:
    """Whichever it is, its consumer and layer are named, from the graph and the contracts alone."""
    whole, context = placed(4, sharded)
    for node in whole.graph.nodes:
        node.meta.pop(PLACEMENT, None)
    count = len(collectives(whole))
    for place in range(count):
        graph = copy.deepcopy(whole.graph)
        compilation = Compilation(GraphModule(nn.Module(), graph), whole.inputs, whole.outputs)
        node = collectives(compilation)[place]
        layer = node.meta[LAYER]
        delete(node)
        with pytest.raises(GraphError, match=rf"^\w+ \(layer {layer}\): .*(nothing gathers|nothing reduces|needs)"):
            check_placed(compilation, context)
    report_count("deleted collectives that were missed", count)


def test_wrong_order_is_found() -> None:
    """A rank-major gather where global order is needed, though all shapes fit and all notes say otherwise."""
    compilation, context = placed(4)
    gathers = [node for node in layer_nodes(compilation, "gather_rows") if node.args[2]]
    for node in gathers[1:]:
        node.update_arg(2, False)
        with pytest.raises(GraphError, match=rf"\(layer {node.meta[LAYER]}\): argument \w+ needs ordered rows"):
            check_placed(compilation, context)
        node.update_arg(2, True)
    check_placed(compilation, context)


class Faulty:
    """Carries out one value of one collective wrongly, in shape: a rank's own rows instead of everybody's."""

    def __init__(self, honest: EmulatedCommunicator, fault: int) -> None:
        self.rank, self.ranks, self.capturable = honest.rank, honest.ranks, honest.capturable
        self._honest = honest
        self._fault = fault
        self.moved = 0

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        return self._honest.shard(values)

    def gather(self, values: list[Tensor], ordered: bool) -> list[Tensor]:
        gathered = self._honest.gather(values, ordered)
        for place, value in enumerate(values):
            if self._here():
                own = value.repeat_interleave(self.ranks, 0) if ordered else torch.cat([value] * self.ranks)
                gathered[place] = own
        return gathered

    def reduce(self, value: Tensor, scatter: bool) -> Tensor:
        total = self._honest.reduce(value, scatter)
        if self._here():
            return torch.unflatten(value, 0, (self.ranks, -1))[self.rank] if scatter else value
        return total

    def _here(self) -> bool:
        self.moved += 1
        return self.moved - 1 == self._fault


def test_any_forgotten_value_shows(long_form: bool, report_count: ReportCount) -> None:
    """Each value that travels is needed: with one of them wrong, results or state differ from one rank's."""
    step = batch([7, 2, 4], seed=1)
    expected_pools = new_pools()
    expected = body_outputs(step, expected_pools)

    def run(fault: int) -> tuple[bool, int]:
        ends: list[Faulty] = []

        def wrap(communicator: EmulatedCommunicator) -> Faulty:
            ends.append(Faulty(communicator, fault))
            return ends[-1]

        by_rank, pools = run_on_ranks([step], 2, True, buckets=(8,), wrap=wrap)
        outputs = zip(*(results[0].outputs for results in by_rank), strict=True)
        actual = [global_rows(values, step.count, True) for values in outputs]
        wrong = [differences(expected, actual, expected_pools, rank_pools) for rank_pools in pools]
        return any(wrong), ends[0].moved

    clean, count = run(-1)
    assert not clean
    assert count == sum(len(moved_values(node)) for node in collectives(compiled(2)))
    faults = range(count) if long_form else range(0, count, 4)
    quiet = [fault for fault in faults if not run(fault)[0]]
    assert not quiet, f"values that travel for nothing: {quiet} of {count}"
    report_count("values that travel and are needed", len(faults))
