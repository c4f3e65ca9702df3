"""Each way in which a graph can be wrong is injected, caught, and named with its node and layer."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from octavo.passes.base import LAYER, ROLE, VALUE, Compilation, GraphError, PassContext
from octavo.passes.verify import Verify
from tests.passes.compiled import fresh, layer_nodes, run_all

LAYER_OF_DEFECT = 4


@pytest.fixture
def normal() -> Compilation:
    return run_all(fresh(), PassContext(), last="normalise")


def _before(node: Node, target: object, args: tuple[object, ...], value: object) -> Node:
    """A new call in front of ``node``, of its layer."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta = {LAYER: node.meta[LAYER], ROLE: node.meta[ROLE], VALUE: value}
    return made


def unknown_operator(compilation: Compilation) -> Node:
    """A rounding outside an operator."""
    node = layer_nodes(compilation, "attend", LAYER_OF_DEFECT)[0]
    query = node.args[0]
    assert isinstance(query, Node)
    return _before(node, torch.ops.aten._to_copy.default, (query,), query.meta[VALUE])


def size_of_a_shape(compilation: Compilation) -> Node:
    node = layer_nodes(compilation, "attend", LAYER_OF_DEFECT)[0]
    query = node.args[0]
    assert isinstance(query, Node)
    return _before(node, torch.ops.aten.sym_size.int, (query, 0), query.meta[VALUE].shape[0])


def rows_elsewhere(compilation: Compilation) -> Node:
    """A leading dimension of one in front of the rows."""
    node = layer_nodes(compilation, "attend", LAYER_OF_DEFECT)[0]
    query = node.args[0]
    assert isinstance(query, Node)
    return _before(node, torch.ops.aten.unsqueeze.default, (query, 0), query.meta[VALUE].unsqueeze(0))


def too_many_arguments(compilation: Compilation) -> Node:
    node = layer_nodes(compilation, "combine", LAYER_OF_DEFECT)[0]
    node.args = (*node.args, 1, 2, 3)
    return node


def wrong_number_of_results(compilation: Compilation) -> Node:
    node = layer_nodes(compilation, "mhc_mix", LAYER_OF_DEFECT)[0]
    node.meta[VALUE] = node.meta[VALUE][:2]
    return node


def ring_read_after_its_write(compilation: Compilation) -> Node:
    """The window's latents are committed before the layer attends."""
    attend = layer_nodes(compilation, "attend", LAYER_OF_DEFECT)[0]
    attend.prepend(layer_nodes(compilation, "commit_window", LAYER_OF_DEFECT)[0])
    return attend


def keys_read_before_their_write(compilation: Compilation) -> Node:
    """The layer selects before it publishes."""
    select = layer_nodes(compilation, "select", LAYER_OF_DEFECT)[0]
    select.append(layer_nodes(compilation, "publish", LAYER_OF_DEFECT)[0])
    return select


DEFECTS: list[tuple[Callable[[Compilation], Node], str]] = [
    (unknown_operator, "neither an operator nor a known reshape"),
    (size_of_a_shape, "number of rows read from a shape"),
    (rows_elsewhere, "rows do not stay in dimension 0"),
    (too_many_arguments, "arguments do not fit"),
    (wrong_number_of_results, "results by contract"),
    (ring_read_after_its_write, "must stand before commit_window"),
    (keys_read_before_their_write, "must stand after publish"),
]


def test_the_body_is_clean(normal: Compilation) -> None:
    assert Verify().run(normal, PassContext()).matched > len(list(normal.calls()))


@pytest.mark.parametrize(("inject", "rule"), DEFECTS, ids=[inject.__name__ for inject, _ in DEFECTS])
def test_defects(normal: Compilation, inject: Callable[[Compilation], Node], rule: str) -> None:
    node = inject(normal)
    with pytest.raises(GraphError, match=rf"^{re.escape(str(node))} \(layer {LAYER_OF_DEFECT}\): .*{rule}"):
        Verify().run(normal, PassContext())


def test_every_pool_is_ordered(normal: Compilation) -> None:
    """In every layer alike: a commit before its attend is found wherever it is."""
    attends, commits = layer_nodes(normal, "attend"), layer_nodes(normal, "commit_window")
    assert len(attends) == len(commits) > 0
    for attend, commit in zip(attends, commits, strict=True):
        following = commit.next
        attend.prepend(commit)
        with pytest.raises(GraphError, match=rf"^{attend} "):
            Verify().run(normal, PassContext())
        following.prepend(commit)
    Verify().run(normal, PassContext())
