"""Pass 2: what stands between two sublayers becomes one operator, where a backend has a kernel for it.

``mhc_expand``, and ``mhc_mix`` and ``mhc_collapse`` of its result, become ``mhc_site``: the streams are read fewer
times, and fewer kernels wait for each other. Whatever else reads the new streams (means for drafts, the next site)
reads the result of the fused call. Sites stay as they are where Engram stands between expansion and mix, at the end of
the body, and where ``mhc_site`` would be computed by its reference, which is those three.

It runs before ``choose``, since it replaces operators and not backends; so ``verify`` and ``place`` judge the fused
call by its contract like any other. Nothing has moved yet: the three read and give rows of the same rank.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from octavo.kernels.operator import OPERATORS
from octavo.passes.base import VALUE, Compilation, GraphError, PassContext, PassReport, operator_of, values_of

_SITE, _EXPAND, _COLLAPSE, _MIX = "mhc_site", "mhc_expand", "mhc_collapse", "mhc_mix"


class Fuse:
    name = "fuse"
    optional = True

    def requires(self, compilation: Compilation, context: PassContext) -> None:
        for node in compilation.calls():
            known = operator_of(node)
            if known is not None and node.target is not known.overload:
                raise GraphError(f"is directed to {node.target} already: fuse runs before choose", node)

    def run(self, compilation: Compilation, context: PassContext) -> PassReport:
        expansions = [node for node in compilation.calls() if _calls(node, _EXPAND)]
        if not _worthwhile(context):
            return PassReport(len(expansions), notes=(f"no backend of {_SITE} beside the reference",))
        sites = _sites(compilation.graph)
        added = sum(_replace(compilation.graph, site) for site in sites)
        compilation.module.recompile()
        note = f"{len(sites)} of {len(expansions)} sites fused"
        return PassReport(len(expansions), added=added, removed=3 * len(sites), notes=(note,))

    def ensures(self, compilation: Compilation, context: PassContext) -> None:
        if _worthwhile(context):
            for site in _sites(compilation.graph):
                raise GraphError(
                    f"stands before {site.mix} and {site.collapse}, and is not fused with them", site.expand
                )


@dataclass(frozen=True, slots=True)
class _Site:
    expand: Node
    collapse: Node
    mix: Node


def _worthwhile(context: PassContext) -> bool:
    return context.backends.get(_SITE, "reference") != "reference"


def _calls(node: Node, name: str) -> bool:
    known = operator_of(node)
    return known is not None and known.name == name


def _sites(graph: Graph) -> list[_Site]:
    """Expansions whose result has one mix and one collapse, by weights that are known where the expansion stands."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    sites = []
    for expand in graph.nodes:
        if not _calls(expand, _EXPAND):
            continue
        collapses, mixes = (_readers(expand, name) for name in (_COLLAPSE, _MIX))
        if len(collapses) != 1 or len(mixes) != 1:
            continue
        site = _Site(expand, collapses[0], mixes[0])
        others = [node for node in (*site.collapse.all_input_nodes, *site.mix.all_input_nodes) if node is not expand]
        if all(order[node] < order[expand] for node in others) and _plain(site):
            sites.append(site)
    return sites


def _readers(expand: Node, name: str) -> list[Node]:
    """Calls of an operator whose streams are what the expansion gives."""
    return [user for user in expand.users if _calls(user, name) and user.args[0] is expand]


def _plain(site: _Site) -> bool:
    """Arguments by place, as exported graphs have them, and every use of the mix names one of its results."""
    named = (site.expand.kwargs, site.collapse.kwargs, site.mix.kwargs)
    return not any(named) and all(user.target is operator.getitem for user in site.mix.users)


def _replace(graph: Graph, site: _Site) -> int:
    """Put the fused call and its results in the place of the three -> nodes added."""
    arguments = (*site.expand.args, *site.collapse.args[1:], *site.mix.args[1:])
    with graph.inserting_before(site.expand):
        fused = graph.create_node("call_function", OPERATORS[_SITE].overload, arguments, name=_SITE)
    fused.meta = dict(site.expand.meta)
    fused.meta[VALUE] = (*values_of(site.expand), *values_of(site.collapse), *values_of(site.mix))
    for index, node in enumerate((site.expand, site.collapse)):
        with graph.inserting_before(node):
            result = graph.call_function(operator.getitem, (fused, index))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
    for user in list(site.mix.users):
        coefficient = user.args[1]
        assert isinstance(coefficient, int)
        user.args = (fused, 2 + coefficient)
    for node in (site.mix, site.collapse, site.expand):
        graph.erase_node(node)
    return 3
