"""A replayed program computes what the module does, to the bit, whatever was in its buffers before."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

from octavo.graphs.buckets import ladder
from octavo.graphs.program import Program
from octavo.passes.base import Compilation, GraphError
from octavo.passes.breaks import PieceKind
from octavo.passes.lower import Instruction
from octavo.runtime.pools import Pools
from tests.conftest import ReportCount
from tests.passes.compiled import (
    CPU,
    SIZES,
    Batch,
    RankProgram,
    batch,
    body_outputs,
    compiled,
    copied,
    differences,
    new_pools,
    resident_tensors,
    state_tensors,
)

LADDER = ladder(352)
LARGEST = LADDER[-1]


def check_steps(program: RankProgram, steps: Sequence[Batch], pools: Pools, buckets: Sequence[int] = ()) -> int:
    """Replay the steps on ``pools`` and run the module on a copy -> number of compared tensors."""
    expected_pools = copied(pools)
    compared = 0
    for place, step in enumerate(steps):
        actual = program.step(step, buckets[place] if buckets else None)
        expected = body_outputs(step, expected_pools)
        assert not differences(expected, actual, expected_pools, pools), place
        compared += len(actual) + len(state_tensors(pools))
    return compared


@st.composite
def step_lists(draw: st.DrawFn) -> list[Batch]:
    """One to four consecutive steps of up to four requests: each continues where it stood, by 0 to 12 rows."""
    count = draw(st.integers(1, SIZES.slots))
    done = [0] * count
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count).filter(any))
        steps.append(batch(lengths, done, draw(st.integers(0, 1 << 16))))
        done = [start + length for start, length in zip(done, lengths, strict=True)]
    return steps


@pytest.fixture(scope="module")
def reused() -> tuple[RankProgram, Pools]:
    """One program for many batches: stale buffers are part of the test."""
    pools = new_pools()
    return RankProgram(pools, buckets=LADDER), pools


@settings(max_examples=settings().max_examples // 10)
@given(steps=step_lists())
def test_random_batches(reused: tuple[RankProgram, Pools], steps: list[Batch]) -> None:
    """Decodes, prefills and later chunks in one batch; slots still hold what earlier requests left."""
    assert check_steps(reused[0], steps, reused[1]) > 0


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [([1], 1), ([193], 208), ([100, 0, 93], 208), ([342], 352), ([340, 1, 1], 352), ([LARGEST], LARGEST)],
)
def test_row_counts(
    reused: tuple[RankProgram, Pools], lengths: list[int], bucket: int, report_count: ReportCount
) -> None:
    """The smallest bucket that holds the rows, full and padded."""
    step = batch(lengths, seed=sum(lengths))
    report_count("replays: tensors compared to the bit", check_steps(reused[0], [step], reused[1], [bucket]))


def test_large_small_large(reused: tuple[RankProgram, Pools]) -> None:
    """Rows that a large step left behind a small one's are dead again."""
    steps = [batch([150, 43], seed=1), batch([1, 1, 1], [150, 43, 0], seed=2), batch([100, 93, 9], [151, 44, 1], 3)]
    assert check_steps(reused[0], steps, reused[1]) > 0


def test_one_step_in_every_bucket() -> None:
    """The same rows with more and more padding: same results and state."""
    step = batch([3, 1, 2], seed=9)
    pools = new_pools()
    program = RankProgram(pools, buckets=(8, 16, 24, 208))
    empty = copied(pools)
    expected_pools = copied(pools)
    expected = body_outputs(step, expected_pools)
    for bucket in (8, 208, 16, 24):
        for name, tensor in state_tensors(pools).items():
            tensor.copy_(state_tensors(empty)[name])
        assert not differences(expected, program.step(step, bucket), expected_pools, pools), bucket


def test_padding_leaves_state_untouched() -> None:
    """A step whose rows are all dead changes no pool, though its buffers hold a real step's values."""
    pools = new_pools()
    program = RankProgram(pools, buckets=(16,))
    program.step(batch([9, 4], seed=1))
    before = copied(pools)
    program.step(batch([0], seed=1), 16)
    assert not differences([], [], before, pools)


def test_poisoned_buffers() -> None:
    """Whatever buffers held before a step, NaN included, reaches no live row and no state."""
    pools = new_pools()
    program = RankProgram(pools, buckets=(24,))
    step = batch([7, 1, 5], seed=6)
    expected_pools = copied(pools)
    expected = body_outputs(step, expected_pools)
    poisoned = 0
    for name, buffer in program.program.buffers.items():
        if buffer.dtype.is_floating_point:
            program.program.view(name, 24).fill_(float("nan"))
            poisoned += 1
    assert poisoned > 0
    assert not differences(expected, program.step(step), expected_pools, pools)


def test_two_programs_in_one_process() -> None:
    """They share weights and the compilation, and nothing else: interleaved steps do not mix."""
    pools = [new_pools(), new_pools()]
    programs = [RankProgram(each, buckets=(8, 16)) for each in pools]
    expected_pools = [copied(each) for each in pools]
    steps = [[batch([5, 2], seed=1), batch([1, 1], [5, 2], seed=2)], [batch([3], seed=3), batch([9], [3], seed=4)]]
    for place in range(2):
        for which in range(2):
            actual = programs[which].step(steps[which][place])
            expected = body_outputs(steps[which][place], expected_pools[which])
            assert not differences(expected, actual, expected_pools[which], pools[which])


def test_rows_beyond_the_bucket() -> None:
    program = RankProgram(new_pools(), buckets=(4, 8))
    with pytest.raises((GraphError, RuntimeError)):
        program.step(batch([9]), 8)


def test_ranks_need_a_communicator() -> None:
    compilation = compiled(ranks=2)
    program = Program(compilation, resident_tensors(0, 2, new_pools()), (4,), CPU)
    with pytest.raises(GraphError, match=r"collective.*no communicator"):
        program.warm_up()


@pytest.mark.parametrize("path", ["layers.3.attn.wq_a.weight", "state.rings.4", "state.page_table"])
def test_moved_weights_and_pools(path: str) -> None:
    """A captured graph would read the old address: the next replay refuses and names the tensor."""
    program = RankProgram(new_pools(), buckets=(4, 8))
    moving = program.resident[path]
    here = moving.detach().clone()
    program.resident[path] = moving
    program.step(batch([3]))
    old = moving.data
    moving.data = here
    try:
        with pytest.raises(GraphError, match=f"moved since the first replay: {path}$"):
            program.step(batch([3]))
    finally:
        moving.data = old
    program.step(batch([3]))


def test_moved_buffers() -> None:
    """A buffer's storage that is reallocated is caught as well."""
    program = RankProgram(new_pools(), buckets=(4, 8))
    program.step(batch([3]))
    name = next(iter(program.program.buffers))
    storage = program.program.view(name, 4).untyped_storage()
    storage.resize_(storage.nbytes() + (1 << 22))
    with pytest.raises(GraphError, match="moved since the first replay: buffer storage"):
        program.step(batch([3]))


def test_executor_overhead(report_count: ReportCount) -> None:
    """100 instructions that do nothing: at most 150 us of Python (design section 5), best of many.

    Ten times as much is asserted, so that a busy machine does not fail the test; what was measured is reported.
    """
    nothing = GraphModule(nn.Module(), Graph())
    nothing.forward = tuple
    stub = Instruction(0, PieceKind.SEGMENT, nothing, (), (), (), (), "")
    compilation = Compilation(GraphModule(nn.Module(), _empty()), {}, ())
    compilation.instructions = [stub] * 100
    program = Program(compilation, {}, (8,), CPU)
    program.warm_up()
    best = float("inf")
    for _ in range(300):
        began = time.perf_counter()
        program.replay(8)
        best = min(best, time.perf_counter() - began)
    assert best < 10 * 150e-6
    report_count("executor overhead of 100 instructions, us", max(1, round(best * 1e6)))


def _empty() -> Graph:
    graph = Graph()
    graph.output(())
    return graph
