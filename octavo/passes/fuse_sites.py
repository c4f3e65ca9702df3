"""What stands between two sublayers, for ``fuse``.

``mhc_expand``, and ``mhc_mix`` and ``mhc_collapse`` of its result, become ``mhc_site``: the streams are read fewer
times, and fewer kernels wait for each other. Whatever else reads the new streams (means for drafts, the next site)
reads the result of the fused call. Sites stay as they are where Engram stands between expansion and mix, and at the
end of the body.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from octavo.kernels.operator import OPERATORS
from octavo.passes.base import VALUE, calls_operator, values_of

_SITE, _EXPAND, _COLLAPSE, _MIX = "mhc_site", "mhc_expand", "mhc_collapse", "mhc_mix"


@dataclass(frozen=True, slots=True)
class _Site:
    expand: Node
    collapse: Node
    mix: Node

    @property
    def first(self) -> Node:
        return self.expand

    @property
    def missed(self) -> str:
        return f"stands before {self.mix} and {self.collapse}, and is not fused with them"

    def replace(self, graph: Graph) -> tuple[int, int]:
        arguments = (*self.expand.args, *self.collapse.args[1:], *self.mix.args[1:])
        with graph.inserting_before(self.expand):
            fused = graph.create_node("call_function", OPERATORS[_SITE].overload, arguments, name=_SITE)
        fused.meta = dict(self.expand.meta)
        fused.meta[VALUE] = (*values_of(self.expand), *values_of(self.collapse), *values_of(self.mix))
        for index, node in enumerate((self.expand, self.collapse)):
            with graph.inserting_before(node):
                result = graph.call_function(operator.getitem, (fused, index))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
        for user in list(self.mix.users):
            coefficient = user.args[1]
            assert isinstance(coefficient, int)
            user.args = (fused, 2 + coefficient)
        for node in (self.mix, self.collapse, self.expand):
            graph.erase_node(node)
        return 3, 3


class Sites:
    operator = _SITE
    things = "sites"

    def judged(self, graph: Graph) -> int:
        return sum(calls_operator(node, _EXPAND) for node in graph.nodes)

    def matches(self, graph: Graph) -> list[_Site]:
        """Expansions whose result has one mix and one collapse, by weights that are known where it stands."""
        order = {node: place for place, node in enumerate(graph.nodes)}
        sites = []
        for expand in graph.nodes:
            if not calls_operator(expand, _EXPAND):
                continue
            collapses, mixes = (_readers(expand, name) for name in (_COLLAPSE, _MIX))
            if len(collapses) != 1 or len(mixes) != 1:
                continue
            site = _Site(expand, collapses[0], mixes[0])
            others = [
                node for node in (*site.collapse.all_input_nodes, *site.mix.all_input_nodes) if node is not expand
            ]
            if all(order[node] < order[expand] for node in others) and _plain(site):
                sites.append(site)
        return sites


def _readers(expand: Node, name: str) -> list[Node]:
    """Calls of an operator whose streams are what the expansion gives."""
    return [user for user in expand.users if calls_operator(user, name) and user.args[0] is expand]


def _plain(site: _Site) -> bool:
    """Arguments by place, as exported graphs have them, and every use of the mix names one of its results."""
    named = (site.expand.kwargs, site.collapse.kwargs, site.mix.kwargs)
    return not any(named) and all(user.target is operator.getitem for user in site.mix.users)
