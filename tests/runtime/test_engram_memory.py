"""Engram tables in mapped files, in memory that ranks share, on the device: the same answers, and counted rightly."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import Engine, EngineConfig, OctavoError, SamplingParams, UsageError
from octavo.runtime import doctor
from octavo.runtime.assemble import assemble, plan
from octavo.runtime.engram_memory import EngramMemory, choose_engram_memory, load_tables, table_bytes
from octavo.runtime.rank_plan import check_ranks, plan_ranks
from octavo.runtime.ranks.agreement import exchange
from octavo.runtime.ranks.group import all_ranks
from octavo.runtime.ranks.workers import Workers
from tests.rank_work import share_engram_tables, steps_by_memory

MEMORIES: tuple[EngramMemory, ...] = ("device", "host", "mmap")
GIB = 2**30


def config(**changes: Any) -> EngineConfig:
    """octavo-nano."""
    fields: dict[str, Any] = {"device": "cpu", "chunk": 48, "kv_tokens": 4096, "max_requests": 8, "layers": 2}
    return EngineConfig(**(fields | changes))


def mapped() -> int:
    """Shared memory that this process maps, in pieces."""
    return Path("/proc/self/maps").read_text().count("memfd:octavo")


def test_answers_of_one_rank() -> None:
    """And memory that was shared is gone with the engine."""
    answers = []
    for engram in MEMORIES:
        with Engine(config(engram=engram, graphs="off")) as engine:
            assert mapped() == (engram == "host")
            (result,) = engine.generate(["The key is 9071."], SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True))
        answers.append((result.ids, result.answers[0].logprobs))
        del engine
        gc.collect()
        assert not mapped()
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.timeout(120)
def test_two_ranks(long_form: bool) -> None:
    """What one rank computes; shared tables are one piece of memory, which one rank alone fills. In the long form with
    each memory: mapped ones are what all other tests of ranks have."""
    settings, memories = config(ranks=2), MEMORIES if long_form else ("host",)
    alone = steps_by_memory(config(), memories, 0)
    workers = Workers(settings, functools.partial(share_engram_tables, memories), 60.0)
    try:
        found = exchange(steps_by_memory(settings, memories, 0), all_ranks())
        shared = assemble(config(ranks=2, engram="host"))
        table = shared.prelude.tables[0].scale
        exchange({}, all_ranks())  # the other has mapped it
        table[0] = 77
        exchange({}, all_ranks())
        (_, seen) = exchange({}, all_ranks())
    finally:
        workers.stop()
    assert found == [alone, alone]
    assert len(set(alone.values())) == 1
    assert seen == {"scale": 77}


def test_random_tables() -> None:
    """Shared ones have the values of those on a CPU; there is no file to map."""
    random = {"weights": "random", "preset": "tiny"}
    text, cpu = plan(config(**random)).config.text_config, torch.device("cpu")
    tables = [load_tables(config(engram=engram, **random), None, text, cpu, None) for engram in ("device", "host")]
    assert len(tables[0]) == 1
    for one, other in zip(*tables, strict=True):
        assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)
    with pytest.raises(UsageError, match="--weights random has none: use host or device"):
        config(engram="mmap", **random)


def test_the_default() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_engram_memory(config(), cpu) == "mmap"
    assert choose_engram_memory(config(), gpu) == "host"
    for device in (cpu, gpu):
        assert choose_engram_memory(config(weights="random", preset="tiny"), device) == "device"
        assert choose_engram_memory(config(engram="mmap"), device) == "mmap"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_counted(ranks: int) -> None:
    """On the device with every rank's weights, on the host once, mapped files not at all."""
    planned = {engram: plan_ranks(config(ranks=ranks, engram=engram)) for engram in MEMORIES}
    tables = table_bytes(planned["mmap"].first.config.text_config)
    assert tables == planned["mmap"].first.table_bytes > 0
    assert planned["device"].needed_bytes == planned["mmap"].needed_bytes + ranks * tables
    assert planned["host"].needed_bytes == planned["mmap"].needed_bytes
    assert [planned[engram].first.shared_bytes for engram in MEMORIES] == [0, tables, 0]
    ends = [planned[engram].lines()[-1].rpartition(", ")[2] for engram in MEMORIES]
    assert ends == ["among the weights of each rank", "copied to the host once", "mapped on the host once"]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with room for all that is needed and not for a copy of the tables."""
    needed = plan_ranks(config(ranks=2)).needed_bytes
    tables = plan(config()).table_bytes

    def host_has(free: int) -> None:
        monkeypatch.setattr("octavo.model.memory.host_memory", lambda proc, cgroups: free)

    host_has(needed + tables)
    check_ranks(config(ranks=2, engram="host"))
    host_has(needed + tables - 1)
    check_ranks(config(ranks=2, engram="mmap"))
    for engram in ("host", "device"):
        with pytest.raises(OctavoError, match="GiB are needed") as refused:
            check_ranks(config(ranks=2, engram=engram))
        assert ("--engram mmap takes none" in str(refused.value)) is (engram == "host")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 8 * GIB))
    host_has(tables)
    check_ranks(config(ranks=2, engram="host", device="cuda"))
    host_has(tables - 1)
    with pytest.raises(OctavoError, match=r"^cpu: .* of the host \(--engram host\)"):
        check_ranks(config(ranks=2, engram="host", device="cuda"))
    (memory,) = [
        check for check in doctor.model_checks(config(ranks=2, engram="host", device="cuda")) if check.name == "memory"
    ]
    assert not memory.ok and "GiB of the host" in memory.detail
