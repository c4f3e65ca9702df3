"""What stands between two sublayers becomes ``mhc_site`` where a backend has a kernel for it, and nothing else does.

And what holds for all fusions. ``test_fuse_pairs.py`` has the other one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from octavo.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix, mhc_site
from octavo.passes.base import LAYER, VALUE, Compilation, GraphError, PassContext, operator_of
from octavo.passes.choose import Choose
from octavo.passes.fuse import Fuse
from octavo.passes.propagate import computed, fake_mode_of
from octavo.passes.runner import run_passes
from tests.passes.compiled import (
    RankProgram,
    batch,
    body_outputs,
    collectives,
    compiled,
    config,
    copied,
    differences,
    fresh,
    fused,
    layer_nodes,
    new_pools,
    normal,
)

WITH_KERNEL = PassContext(backends={"mhc_site": "triton"})
"""As on a device that has one for sites alone."""
NO_PAIRS = "no backend of linear_f8_pair beside the reference"
LAYERS = config().text_config.num_hidden_layers
BEFORE_ENGRAM = [layer - 1 for layer in config().text_config.engram_layer_ids if layer]
BROKEN_LAYER = 2


@pytest.fixture(scope="module")
def sites() -> Compilation:
    compilation = normal()
    (result,) = run_passes(compilation, WITH_KERNEL, passes=[Fuse()])
    count = 2 * LAYERS - 1 - len(BEFORE_ENGRAM)
    assert result.report.matched > 2 * LAYERS, "sites, and what else could be fused"
    assert result.report.notes == (f"{count} of {2 * LAYERS} sites fused", NO_PAIRS)
    assert result.report.added == result.report.removed == 3 * count
    return compilation


def test_every_site_is_fused_but_those_before_engram_and_the_last(sites: Compilation) -> None:
    left = layer_nodes(sites, "mhc_expand")
    assert BEFORE_ENGRAM, "the mini model has Engram behind its first layer"
    assert [node.meta[LAYER] for node in left] == sorted([*BEFORE_ENGRAM, LAYERS - 1])
    for node in left:
        assert {operator_of(user) for user in node.users}.isdisjoint({mhc_mix}), "a site that could be fused"
    assert len(layer_nodes(sites, "mhc_site")) == 2 * LAYERS - len(left)
    # What is left of the others: the first site of the model, those behind Engram, and the norm at its end.
    assert len(layer_nodes(sites, "mhc_mix")) == 2 * LAYERS - len(layer_nodes(sites, "mhc_site"))


def test_results_have_the_layers_and_shapes_that_they_had(sites: Compilation) -> None:
    with fake_mode_of(sites), torch.no_grad():
        for node in layer_nodes(sites, "mhc_site"):
            for kept, new in zip(node.meta[VALUE], computed(node), strict=True):
                assert kept.shape == new.shape and kept.dtype == new.dtype
            layer = node.meta[LAYER]
            assert {user.meta[LAYER] for user in node.users} <= {layer, layer + 1}


def test_other_readers_of_the_streams_read_the_fused_result(sites: Compilation) -> None:
    """Features of drafts: the mean over the streams of a layer's beginning."""
    means = layer_nodes(sites, "stream_mean")
    assert means and len(means) == len(layer_nodes(normal(), "stream_mean"))
    of_sites = [mean for mean in means if comes_from_site(mean.args[0])]
    assert of_sites, "no feature reads what a site gives"


def comes_from_site(value: object) -> bool:
    assert isinstance(value, Node)
    source = value.args[0] if value.target is operator.getitem else None
    return isinstance(source, Node) and operator_of(source) is mhc_site and bool(value.args[1] == 0)


def test_the_fused_program_gives_the_same_bits() -> None:
    """With the reference in the place of a kernel: results and pools of a prefill and of the step behind it."""
    pools = new_pools()
    program = RankProgram(pools, compilation=fused())
    plain = copied(pools)
    for work in (batch([9, 1, 5]), batch([1, 1, 1], [9, 1, 5], seed=1)):
        expected = body_outputs(work, plain)
        assert differences(expected, program.step(work), plain, pools) == []


def test_ranks_move_what_they_moved() -> None:
    """Placement reads contracts: the fused call needs this rank's rows, as the three do. ``prove`` has run."""
    assert len(collectives(fused(ranks=2))) == len(collectives(compiled(2)))


@pytest.mark.parametrize("backends", ({}, {"mhc_site": "reference", "mhc_mix": "torch"}), ids=("none", "another"))
def test_without_a_kernel_the_graph_stays_as_it_is(backends: dict[str, str]) -> None:
    compilation = normal()
    before = str(compilation.graph)
    (result,) = run_passes(compilation, PassContext(backends=backends), passes=[Fuse()])
    assert str(compilation.graph) == before
    assert result.report.notes == ("no backend of mhc_site beside the reference", NO_PAIRS)


def second_collapse(site: Node) -> None:
    """The streams go into two sublayers."""
    collapse = reader(site, "mhc_collapse")
    with site.graph.inserting_after(collapse):
        other = site.graph.call_function(mhc_collapse.overload, collapse.args)
    other.meta = dict(collapse.meta)


def own_pre(site: Node) -> None:
    """The sublayer's input is weighted by the mix of the same streams: it comes after it."""
    mix, collapse = reader(site, "mhc_mix"), reader(site, "mhc_collapse")
    pre = next(user for user in mix.users if user.args[1] == 0)
    collapse.update_arg(1, pre)


def other_streams(site: Node) -> None:
    """The mix reads the streams that the expansion started from."""
    reader(site, "mhc_mix").update_arg(0, site.args[0])


def named_argument(site: Node) -> None:
    mix = reader(site, "mhc_mix")
    mix.kwargs = {"norm_epsilon": mix.args[-1]}
    mix.args = mix.args[:-1]


def reader(site: Node, name: str) -> Node:
    (found,) = (user for user in site.users if (known := operator_of(user)) is not None and known.name == name)
    return found


@pytest.mark.parametrize(
    ("defect", "lost"),
    # Of the streams that are then mixed twice, the site before is none either.
    ((second_collapse, 1), (own_pre, 1), (other_streams, 2), (named_argument, 1)),
)
def test_a_broken_pattern_stays_as_it_is(defect: Callable[[Node], None], lost: int, sites: Compilation) -> None:
    compilation = normal()
    broken = layer_nodes(compilation, "mhc_expand", BROKEN_LAYER)[0]
    defect(broken)
    compilation.module.recompile()
    run_passes(compilation, WITH_KERNEL, passes=[Fuse()])
    assert operator_of(broken) is mhc_expand and broken in compilation.graph.nodes
    assert len(layer_nodes(compilation, "mhc_site")) == len(layer_nodes(sites, "mhc_site")) - lost


def test_a_site_that_was_missed_is_named() -> None:
    compilation = normal()
    first = layer_nodes(compilation, "mhc_expand")[0]
    with pytest.raises(GraphError, match=rf"^{first} \(layer 0\): stands before mhc_mix\w* and mhc_collapse\w*, and"):
        Fuse().ensures(compilation, WITH_KERNEL)


def test_it_runs_before_backends_are_chosen() -> None:
    compilation = normal()
    run_passes(compilation, PassContext(backends={"mhc_mix": "torch"}), passes=[Choose()])
    with pytest.raises(GraphError, match=r"pass fuse: mhc_mix\w* \(layer 0\): is directed to .*torch already"):
        run_passes(compilation, WITH_KERNEL, passes=[Fuse()])


def test_it_may_be_disabled() -> None:
    compilation = fresh()
    run_passes(compilation, PassContext(), disabled=frozenset({"fuse"}))
    assert compilation.instructions
