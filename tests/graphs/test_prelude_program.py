"""The prelude as a program: on ranks the compiler deals rows behind the hash, which sees all tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.graphs.buckets import bucket_for, local_rows
from octavo.graphs.compile import compilation_of, input_names, leaves_of
from octavo.graphs.emulation import EmulatedCommunicator, run_ranks
from octavo.graphs.program import Program
from octavo.kernels.collectives import shard_rows
from octavo.model.inputs import Tokens
from octavo.model.model import empty_model
from octavo.model.prelude import Prelude, empty_tables
from octavo.model.token_classes import pad_class
from octavo.passes.base import Compilation, GraphError, PassContext, operator_of
from octavo.passes.place import check_placed
from octavo.passes.runner import run_passes
from octavo.runtime.assemble import Assembly, assemble
from octavo.runtime.config import EngineConfig
from octavo.runtime.parts import classify, prelude_part
from octavo.runtime.pools import Pools, PoolSizes, Storage
from tests.conftest import ReportCount

BUCKETS = (1, 2, 4, 8, 32, 128, 512)
SIZES = PoolSizes(slots=3, pages=4, max_pages=4)


@cache
def assembly() -> Assembly:
    return assemble(EngineConfig(weights="random", preset="mini", device="cpu", kv_tokens=256, max_requests=3))


def new_pools() -> Pools:
    pools = Pools(assembly().config.text_config, SIZES, Storage.BF16, torch.device("cpu"))
    pools.history.copy_(torch.arange(pools.history.numel()).view_as(pools.history))
    return pools


def compiled(ranks: int, sharded: bool) -> Compilation:
    part = prelude_part(assembly().prelude, new_pools())
    compilation = compilation_of(part.module, part.inputs, classify)
    run_passes(compilation, PassContext(ranks=ranks, sharded=sharded))
    return compilation


def tokens_of(lengths: list[int], starts: list[int], seed: int) -> Tokens:
    """A chunk of each request; some tokens belong to images."""
    random = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    slots = torch.arange(len(lengths)).repeat_interleave(counts).int()
    first = torch.tensor(starts).repeat_interleave(counts).int()
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).int()
    count = len(slots)
    ids = torch.randint(0, assembly().config.text_config.vocab_size, (count,), generator=random)
    image = torch.rand(count, generator=random) < 0.2
    return Tokens(ids, slots, positions, first, torch.ones(count, dtype=torch.bool), image)


def on_ranks(steps: list[Tokens], ranks: int, sharded: bool) -> tuple[list[list[list[Tensor]]], list[Pools]]:
    """Results by rank and step, live rows alone; and every rank's pools."""
    compilations = [compiled(ranks, sharded) for _ in range(ranks)]
    pools = [new_pools() for _ in range(ranks)]
    prelude: Prelude = assembly().prelude

    def work(communicator: EmulatedCommunicator) -> list[list[Tensor]]:
        rank = communicator.rank
        resident = dict(prelude.named_parameters()) | dict(prelude.named_buffers())
        resident["history"] = pools[rank].history
        program = Program(compilations[rank], resident, BUCKETS, torch.device("cpu"), communicator)
        program.warm_up()
        names = input_names(compilations[rank])
        results = []
        for tokens in steps:
            count = len(tokens.ids)
            needed = local_rows(count, ranks) if sharded else count
            bucket = bucket_for(needed, BUCKETS)
            assert bucket is not None
            program.load({names[path]: leaf for path, leaf in leaves_of({"tokens": tokens})}, bucket)
            live = len(range(rank, count, ranks)) if sharded else count
            with torch.no_grad():
                results.append([result[:live].clone() for result in program.replay(bucket)])
        return results

    return run_ranks(ranks, work), pools


@pytest.mark.parametrize(("ranks", "sharded"), [(1, True), (2, True), (4, True), (8, True), (4, False)])
def test_dealt_rows_are_the_modules_rows(ranks: int, sharded: bool, report_count: ReportCount) -> None:
    """1, cp - 1, cp, cp + 1, 21 and 342 tokens, several requests with prefixes: rows and histories to the bit."""
    steps = [tokens_of([n], [0], n) for n in sorted({1, max(ranks - 1, 1), ranks, ranks + 1})]
    steps += [tokens_of([5, 15, 1], [3, 0, 7], 1), tokens_of([2, 339, 1], [9, 15, 8], 2)]
    expected_pools = new_pools()
    by_rank, pools = on_ranks(steps, ranks, sharded)
    compared = 0
    for place, tokens in enumerate(steps):
        expected = [leaf for _, leaf in leaves_of({"rows": assembly().prelude(tokens, expected_pools.history)})]
        for rank in range(ranks):
            actual = by_rank[rank][place]
            assert len(actual) == len(expected) == 7
            for mine, whole in zip(actual, expected, strict=True):
                assert torch.equal(mine, whole[rank::ranks] if ranks > 1 and sharded else whole)
                compared += 1
    for rank in range(ranks):
        assert torch.equal(pools[rank].history, expected_pools.history)
    report_count("prelude results compared to the bit, on emulated ranks", compared)


def test_rows_are_dealt_once_and_behind_the_hash() -> None:
    """One shard for everything that is ready, where the first operator works on this rank's rows."""
    compilation = compiled(4, True)
    order = [known.name for node in compilation.calls() if (known := operator_of(node)) is not None]
    assert order == [
        "token_classes",
        "engram_hash",
        "engram_hash",
        "commit_window",
        "shard_rows",
        "embed_tokens",
        "engram_lookup",
        "engram_lookup",
    ]
    assert not any(operator_of(node) is shard_rows for node in compiled(1, True).calls())
    assert not any(operator_of(node) is shard_rows for node in compiled(4, False).calls())


def test_a_missing_shard_is_found() -> None:
    compilation = compiled(4, True)
    (dealt,) = (node for node in compilation.calls() if operator_of(node) is shard_rows)
    values = dealt.args[0]
    assert isinstance(values, list | tuple)
    for part in list(dealt.users):
        place = part.args[1]
        assert isinstance(place, int)
        part.replace_all_uses_with(values[place])  # type: ignore[arg-type]
        compilation.graph.erase_node(part)
    compilation.graph.erase_node(dealt)
    with pytest.raises(GraphError, match=r"this rank's rows of .* alone, and nothing deals them"):
        check_placed(compilation, PassContext(ranks=4))


def test_tables_in_host_memory_are_a_break() -> None:
    """What lies elsewhere than the device cannot be read inside a captured segment; nothing else breaks for it.

    Traced on fake tensors, so that no GPU is needed.
    """
    config = assembly().config
    host, device = torch.device("cpu"), torch.device("cuda")
    for memory in (host, device):
        with FakeTensorMode():
            model = empty_model(config, device)
            classes = torch.zeros(config.text_config.vocab_size, dtype=torch.int64, device=device)
            tables = empty_tables(config.text_config, memory, device)
            prelude = Prelude(model.embed, tables, classes, 0, torch.bfloat16)
            part = prelude_part(prelude, Pools(config.text_config, SIZES, Storage.BF16, device))
            compilation = compilation_of(part.module, part.inputs, classify)
        run_passes(compilation, PassContext(device="cuda"))
        reasons = {reason for instruction in compilation.instructions for reason in instruction.reasons}
        elsewhere = {"engram_lookup: table, scale not in the memory of cuda"} if memory is host else set()
        assert reasons == {"commit_window: backend reference is not capturable on cuda"} | elsewhere


def test_pad_class_is_the_tokenizers() -> None:
    """It is a constant of the graph: a program must not outlive another tokenizer."""
    prelude = assembly().prelude
    text = assembly().config.text_config
    assert prelude.pad_class == pad_class(prelude.classes.numpy(), text)
