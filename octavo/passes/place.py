"""Pass 5: context and expert parallelism as placement propagation.

Placements flow from the inputs through every node by rule; where an operator's contract asks for rows in another
placement than a value has, a collective is inserted: a shard, a gather in global order, a rank-major gather, or a
reduction of expert sums. Nothing is matched by pattern and no site is listed. What is ready together travels as one.
With one rank it inserts nothing (design section 4).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from octavo.kernels.collectives import gather_rows, reduce_rows, shard_rows
from octavo.kernels.operator import Contract, Gives, Need
from octavo.passes.base import (
    LAYER,
    PLACEMENT,
    ROLE,
    VALUE,
    Compilation,
    GraphError,
    InputKind,
    PassContext,
    PassReport,
    Placement,
    contract_of,
    operator_of,
    tensor_arguments,
)

_COLLECTIVES = (shard_rows, gather_rows, reduce_rows)
COMPLETE = {
    Placement.PARTIAL_REPLICATED: Placement.REPLICATED,
    Placement.PARTIAL_RANK_MAJOR: Placement.RANK_MAJOR,
}
"""What a partial sum is once it has been reduced, or with one rank anyway."""


def input_placement(kind: InputKind, context: PassContext) -> Placement:
    if kind is InputKind.ROWS:
        return Placement.SHARDED if context.sharded and context.ranks > 1 else Placement.REPLICATED
    return Placement.REPLICATED if kind is InputKind.WRITES else Placement.WHOLE


def local_rows(context: PassContext) -> Placement:
    """Where operators that work on this rank's rows expect them."""
    return Placement.SHARDED if context.sharded and context.ranks > 1 else Placement.REPLICATED


@dataclass(slots=True)
class _Gather:
    """A value that must be gathered, and the first node that needs it."""

    value: Node
    ordered: bool
    consumer: Node
    gathered: Node | None = None


@dataclass(slots=True)
class _Plan:
    """Placements by node, and what has to be inserted."""

    placements: dict[Node, Placement | tuple[Placement, ...]] = field(default_factory=dict)
    gathers: dict[tuple[Node, bool], _Gather] = field(default_factory=dict)
    replaced: list[tuple[Node, Node, bool]] = field(default_factory=list)
    """(consumer, value, ordered): the consumer reads the gathered value."""
    reduced: dict[Node, list[Node]] = field(default_factory=dict)
    """Partial values and the consumers that need their sum."""
    sharded: dict[Node, list[Node]] = field(default_factory=dict)
    """Values that every rank has whole, and the consumers that work on this rank's rows."""


class Place:
    name = "place"
    optional = False

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        if context.ranks < 1:
            raise GraphError(f"{context.ranks} ranks: there is at least one")

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        plan = _propagate(compilation, context)
        added = 0
        if context.ranks > 1:
            added = _insert(compilation.graph, plan, context)
            compilation.module.recompile()
        for node, placement in plan.placements.items():
            node.meta[PLACEMENT] = placement
        collectives = [n for n in compilation.calls() if operator_of(n) in _COLLECTIVES]
        notes = (f"{len(collectives)} collectives",) if context.ranks > 1 else ()
        return PassReport(len(plan.placements), added=added, notes=notes)

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.graph.nodes:
            if node.op != "output" and PLACEMENT not in node.meta:
                raise GraphError("no placement", node)
            check_needs(node, context)


def check_needs(node: Node, context: PassContext) -> None:
    """Raise :class:`GraphError` if a call is given rows in another placement than its contract asks for."""
    known = operator_of(node)
    if known is None or known in _COLLECTIVES:
        return
    for name, argument in tensor_arguments(node):
        need, placement = contract_of(known, context).arguments[name], argument.meta[PLACEMENT]
        if placement not in _accepted(need, context):
            raise GraphError(
                f"argument {name} needs {need.value} rows and is given {placement.value}: {argument}", node
            )


def check_placed(compilation: Compilation, context: PassContext) -> int:
    """Derive every placement anew from inputs and contracts -> their number; no collective may be missing.

    Raises :class:`GraphError` naming the consumer that is given too few rows, or rows in the wrong order.
    """
    plan = _propagate(compilation, context)
    for consumer, value, ordered in plan.replaced:
        order = "in global order" if ordered else "in any order"
        raise GraphError(f"needs all rows of {value} {order}, and nothing gathers them", consumer)
    for value, consumers in plan.sharded.items():
        raise GraphError(f"needs this rank's rows of {value} alone, and nothing deals them", consumers[0])
    for value, consumers in plan.reduced.items():
        raise GraphError(f"needs the sum of {value} over the ranks, and nothing reduces it", consumers[0])
    return len(plan.placements)


def _accepted(need: Need, context: PassContext) -> frozenset[Placement]:
    if need is Need.ANY:
        return frozenset({Placement.WHOLE})
    if need is Need.ROWS:
        return frozenset({local_rows(context)})
    if need is Need.ORDERED:
        return frozenset({Placement.REPLICATED})
    return frozenset({Placement.RANK_MAJOR if local_rows(context) is Placement.SHARDED else Placement.REPLICATED})


def _propagate(compilation: Compilation, context: PassContext) -> _Plan:
    plan = _Plan()
    for node in compilation.graph.nodes:
        if node.op == "placeholder":
            plan.placements[node] = input_placement(compilation.inputs[node.name].kind, context)
        elif node.op == "call_function":
            known = operator_of(node)
            if known is not None:
                plan.placements[node] = _operator(node, contract_of(known, context), context, plan)
            elif node.target is operator.getitem:
                source, index = node.args
                assert isinstance(source, Node) and isinstance(index, int)
                several = plan.placements[source]
                plan.placements[node] = several[index] if isinstance(several, tuple) else several
            else:
                plan.placements[node] = _rowwise(node, context, plan)
    output = compilation.graph.output_node()
    for node in output.all_input_nodes:
        _local(_complete(node, output, context, plan), node, output, context, plan)
    return plan


def _operator(node: Node, contract: Contract, context: PassContext, plan: _Plan) -> Placement | tuple[Placement, ...]:
    """Ask for what the contract needs -> the placements of the results."""
    if contract.collective:
        return _collective(node, contract, context, plan)
    every = Placement.REPLICATED
    for name, argument in tensor_arguments(node):
        need = contract.arguments[name]
        if need is Need.ANY:
            if plan.placements[argument] is not Placement.WHOLE:
                raise GraphError(f"argument {name} must not be rows, and is {argument}", node)
            continue
        placement = _complete(argument, node, context, plan)
        if placement is Placement.SHARDED and need in (Need.EVERY, Need.ORDERED):
            ordered = need is Need.ORDERED
            plan.gathers.setdefault((argument, ordered), _Gather(argument, ordered, node))
            plan.replaced.append((node, argument, ordered))
            placement = Placement.REPLICATED if ordered else Placement.RANK_MAJOR
        elif need is Need.ROWS:
            placement = _local(placement, argument, node, context, plan)
        if placement not in _accepted(need, context):
            raise GraphError(f"argument {name} needs {need.value} rows; {argument} is {placement.value}", node)
        if need is Need.EVERY:
            every = placement
    results = []
    for result in contract.results:
        if result.gives is Gives.ROWS:
            results.append(local_rows(context))
        elif result.gives is Gives.EVERY or context.ranks == 1:
            results.append(every)
        else:
            results.append(
                Placement.PARTIAL_RANK_MAJOR if every is Placement.RANK_MAJOR else Placement.PARTIAL_REPLICATED
            )
    return results[0] if len(results) == 1 else tuple(results)


def _collective(node: Node, contract: Contract, context: PassContext, plan: _Plan) -> Placement:
    """Where a collective that is already there leaves its rows; it must be given what it moves."""
    given = {plan.placements[argument] for _, argument in tensor_arguments(node)}
    if contract is shard_rows.contract:
        takes, leaves = Placement.REPLICATED, Placement.SHARDED
    elif contract is gather_rows.contract:
        takes, leaves = Placement.SHARDED, Placement.REPLICATED if node.args[2] else Placement.RANK_MAJOR
    elif node.args[2]:
        takes, leaves = Placement.PARTIAL_RANK_MAJOR, Placement.SHARDED
    else:
        takes, leaves = Placement.PARTIAL_REPLICATED, Placement.REPLICATED
    if given != {takes} or context.ranks == 1:
        raise GraphError(f"moves {takes.value} rows over {context.ranks} ranks and is given others", node)
    return leaves


def _rowwise(node: Node, context: PassContext, plan: _Plan) -> Placement:
    """Reshapes and pointwise nodes keep rows where they are; all their rows must be placed alike."""
    placements = {_complete(argument, node, context, plan) for argument in node.all_input_nodes}
    placements.discard(Placement.WHOLE)
    if len(placements) > 1:
        raise GraphError(f"rows placed differently: {sorted(p.value for p in placements)}", node)
    return placements.pop() if placements else Placement.WHOLE


def _complete(value: Node, consumer: Node, context: PassContext, plan: _Plan) -> Placement:
    """The placement in which the consumer sees the value: a partial sum is reduced first."""
    placement = plan.placements[value]
    assert isinstance(placement, Placement), f"{value} has several results"
    if placement not in COMPLETE:
        return placement
    plan.reduced.setdefault(value, []).append(consumer)
    return Placement.SHARDED if placement is Placement.PARTIAL_RANK_MAJOR else Placement.REPLICATED


def _local(placement: Placement, value: Node, consumer: Node, context: PassContext, plan: _Plan) -> Placement:
    """The placement in which a consumer of this rank's rows sees the value: what all ranks have is dealt first."""
    if placement is not Placement.REPLICATED or local_rows(context) is Placement.REPLICATED:
        return placement
    plan.sharded.setdefault(value, []).append(consumer)
    return Placement.SHARDED


def _insert(graph: Graph, plan: _Plan, context: PassContext) -> int:
    order = {node: place for place, node in enumerate(graph.nodes)}
    added = _insert_shards(graph, plan, order, context)
    for value, consumers in plan.reduced.items():
        scatter = plan.placements[value] is Placement.PARTIAL_RANK_MAJOR
        with graph.inserting_before(consumers[0]):
            total = graph.call_function(reduce_rows.overload, (value, context.ranks, scatter))
        _describe(total, consumers[0])
        plan.placements[total] = Placement.SHARDED if scatter else Placement.REPLICATED
        for consumer in consumers:
            consumer.replace_input_with(value, total)
        added += 1
    pending = sorted(plan.gathers.values(), key=lambda gather: order[gather.consumer])
    while pending:
        first = pending[0]
        together = [
            gather
            for gather in pending
            if gather.ordered == first.ordered
            and order[gather.value] < order[first.consumer]
            and gather.consumer.meta[LAYER] == first.consumer.meta[LAYER]
        ]
        pending = [gather for gather in pending if gather not in together]
        with graph.inserting_before(first.consumer):
            packed = graph.call_function(
                gather_rows.overload, ([gather.value for gather in together], context.ranks, first.ordered)
            )
            placement = Placement.REPLICATED if first.ordered else Placement.RANK_MAJOR
            _describe(packed, first.consumer)
            plan.placements[packed] = placement
            for place, gather in enumerate(together):
                gather.gathered = graph.call_function(operator.getitem, (packed, place))
                _describe(gather.gathered, first.consumer)
                plan.placements[gather.gathered] = placement
        added += 1 + len(together)
    for consumer, value, ordered in plan.replaced:
        gathered = plan.gathers[value, ordered].gathered
        assert gathered is not None
        _replace(consumer, value, gathered, Need.ORDERED if ordered else Need.EVERY, context)
    return added


def _insert_shards(graph: Graph, plan: _Plan, order: dict[Node, int], context: PassContext) -> int:
    added = 0
    pending = sorted(plan.sharded, key=lambda value: order[plan.sharded[value][0]])
    while pending:
        first = plan.sharded[pending[0]][0]
        together = [value for value in pending if order[value] < order[first]]
        pending = [value for value in pending if value not in together]
        with graph.inserting_before(first):
            dealt = graph.call_function(shard_rows.overload, (together, context.ranks))
            parts = [graph.call_function(operator.getitem, (dealt, place)) for place in range(len(together))]
        for node in (dealt, *parts):
            _describe(node, first)
            plan.placements[node] = Placement.SHARDED
        for value, part in zip(together, parts, strict=True):
            for consumer in plan.sharded[value]:
                _replace(consumer, value, part, Need.ROWS, context)
        added += 1 + len(parts)
    return added


def _replace(consumer: Node, value: Node, by: Node, need: Need, context: PassContext) -> None:
    """The consumer reads ``by`` where its contract has this need; results of the graph have no contract."""
    known = operator_of(consumer)
    if known is None:
        consumer.replace_input_with(value, by)
        return
    needs = contract_of(known, context).arguments
    consumer.args = tuple(
        by if argument is value and needs.get(name) is need else argument
        for name, argument in zip((a.name for a in known.overload._schema.arguments), consumer.args, strict=False)
    )


def _describe(node: Node, like: Node) -> None:
    node.meta[LAYER], node.meta[ROLE], node.meta[VALUE] = like.meta[LAYER], like.meta[ROLE], None
