"""Two products of the same rows, for ``fuse``.

Where exactly two calls of ``linear_f8`` read a value, and their modules stand side by side, they become one
``linear_f8_pair``: rows are rounded once, and few of them meet both weights in one launch. In the model these are
``wq_a`` and ``wkv`` of every attention. The two ``wq_b`` of a layer that selects, of the query and of the indexer, read
one value too and stay two: each is large enough for a launch of its own, and the indexer's belongs to another part.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from octavo.kernels.operator import OPERATORS
from octavo.passes.base import LAYER, ROLE, VALUE, calls_operator, values_of

_PAIR, _LINEAR = "linear_f8_pair", "linear_f8"


@dataclass(frozen=True, slots=True)
class _Pair:
    first: Node
    second: Node

    @property
    def missed(self) -> str:
        return f"reads the rows that {self.second} reads, and is not fused with it"

    def replace(self, graph: Graph) -> tuple[int, int]:
        (x, *one), (_, *other) = self.first.args, self.second.args
        bf16 = (*one[2:], *other[2:])
        assert len(one) == len(other), "weights of a layer are held in BF16, or they are not"
        arguments = (x, *one[:2], *other[:2], *bf16)
        with graph.inserting_before(self.first):
            fused = graph.create_node("call_function", OPERATORS[_PAIR].overload, arguments, name=_PAIR)
            results = [graph.call_function(operator.getitem, (fused, index)) for index in range(2)]
        fused.meta = dict(self.first.meta)
        fused.meta[ROLE] = _place(self.first)[1]
        fused.meta[VALUE] = (*values_of(self.first), *values_of(self.second))
        for node, result in zip((self.first, self.second), results, strict=True):
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return 3, 2


class Pairs:
    operator = _PAIR
    things = "pairs"

    def judged(self, graph: Graph) -> int:
        """Values that several products read."""
        return sum(len(_readers(value)) > 1 for value in graph.nodes)

    def matches(self, graph: Graph) -> list[_Pair]:
        """By weights that are known where the first product stands."""
        order = {node: place for place, node in enumerate(graph.nodes)}
        pairs = []
        for value in graph.nodes:
            readers = sorted(_readers(value), key=order.__getitem__)
            if len(readers) != 2:
                continue
            first, second = readers
            known = all(order[node] < order[first] for node in second.all_input_nodes)
            if known and _place(first) == _place(second) and not first.kwargs and not second.kwargs:
                pairs.append(_Pair(first, second))
        return pairs


def _readers(value: Node) -> list[Node]:
    """Products of the rows that a node gives."""
    return [user for user in value.users if calls_operator(user, _LINEAR) and user.args[:1] == (value,)]


def _place(product: Node) -> tuple[int | None, str]:
    """Layer, and path within it, of the module that holds the product's own."""
    return product.meta[LAYER], product.meta[ROLE].rpartition(".")[0]
