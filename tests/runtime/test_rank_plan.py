"""What every rank would hold, and the refusal of what does not fit, before a weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import EngineConfig, OctavoError, UsageError
from octavo.model.checkpoint import Checkpoint
from octavo.model.loading import load_parameters
from octavo.model.model import empty_model, resident_bytes
from octavo.model.presets import cut_layers, released
from octavo.runtime import doctor
from octavo.runtime.assemble import assemble
from octavo.runtime.capacity import step_bytes
from octavo.runtime.rank_plan import check_ranks, describe_plan, fitting_ranks, plan_ranks
from octavo.runtime.ranks.launch import start_others
from tests.checkpoint_files import released_file, write_checkpoint
from tests.model.mini_run import MINI

GIB = 2**30
FreeMemory = Callable[[int], None]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released checkpoint at its true size, its data a hole."""
    path = tmp_path_factory.mktemp("released")
    write_checkpoint(path, released(), released_file)
    return path


@pytest.fixture
def host_with(monkeypatch: pytest.MonkeyPatch) -> FreeMemory:
    """Set the free memory of the host."""
    return lambda free: monkeypatch.setattr("octavo.model.memory.host_memory", lambda proc, cgroups: free)


@pytest.fixture
def gpus_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """As many GPUs as values, each with that many bytes free."""

    def install(free: list[int]) -> None:
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            return free[torch.device(device).index or 0], 140 * GIB

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)

    return install


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"model": MINI, "device": "cpu", "chunk": 48, "kv_tokens": 2048, "max_requests": 8}
    return EngineConfig(**(fields | changes))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_planned_as_they_are_loaded(ranks: int) -> None:
    planned = plan_ranks(config(ranks=ranks))
    held = [number for one in planned.ranks for number in one.planned.experts]
    assert held == list(range(8)) and [one.rank for one in planned.ranks] == list(range(ranks))
    last = planned.ranks[-1].planned
    loaded = assemble(config(ranks=ranks), rank=ranks - 1)
    assert loaded.model.experts == last.experts and loaded.capacity == last.capacity
    assert last.weight_bytes == resident_bytes(loaded.model)
    assert last.table_bytes == sum(table.weight.nbytes + table.scale.nbytes for table in loaded.prelude.tables)
    assert last.step_bytes == step_bytes(last.config.text_config, {1: 48, 2: 24, 4: 12}[ranks])
    assert planned.needed_bytes == ranks * (last.weight_bytes + last.capacity.bytes + last.step_bytes)


def test_replicated_experts(host_with: FreeMemory) -> None:
    """Every rank holds all of them, so any number of ranks will do."""
    settings = config(ranks=3, expert_placement="replicated", engram="host")
    planned = plan_ranks(settings)
    assert [one.planned.experts for one in planned.ranks] == [range(8)] * 3
    assert planned.first.weight_bytes == plan_ranks(config()).first.weight_bytes
    check_ranks(settings)
    checks = {check.name: check for check in doctor.model_checks(settings)}
    assert "8 of 8 experts on 3 ranks" in checks["model"].detail and "0-7 on each" in checks["ranks"].detail
    loaded = assemble(config(ranks=3, expert_placement="replicated"), rank=2)
    assert loaded.model.experts == range(8) and resident_bytes(loaded.model) == planned.first.weight_bytes
    host_with(1)
    assert fitting_ranks(settings) == "No number of ranks, with all experts on each, fits here."


def test_a_rank_may_compute_a_whole_decode_step() -> None:
    planned = plan_ranks(config(ranks=4, max_requests=20)).first
    assert planned.step_bytes == step_bytes(planned.config.text_config, 20)


def test_equal_ranks_share_a_line(sparse: Path) -> None:
    """Weights by hand: the layout's bytes without tables, drafts and vision, of the routed experts an eighth."""
    planned = plan_ranks(EngineConfig(model=sparse, device="cpu", ranks=8, kv_tokens=65_536))
    heading, _, row, total = planned.lines()
    named = dict(zip(cells(heading), cells(row), strict=True))
    assert named["ranks"] == "0-7" and named["device"] == "cpu"
    assert named["experts"] == "0-47 to 336-383, 48 each"
    assert (named["requests"], named["tokens"]) == ("256", "65,536")
    checkpoint = planned.first.checkpoint
    assert checkpoint is not None and checkpoint.files_opened == 0
    routed, others = 0, 0
    for name, spec in checkpoint.expected.items():
        if ".engram.embed." in name or name.startswith(("mtp.", "vision.", "aligner.", "image_")):
            continue
        if ".ffn.experts." in name:
            routed += spec.nbytes
        else:
            others += spec.nbytes
    assert planned.first.weight_bytes == routed / 8 + others, "every weight is held as it is stored"
    assert "Engram tables 203 GB, mapped on the host once" in total and "whose free memory they share" in total
    described = describe_plan(EngineConfig(model=sparse, device="cpu", ranks=8))
    assert cells(described[0]) == cells(heading), "the width of a column follows from how much memory is free"
    assert describe_plan(EngineConfig(model=sparse, device="cpu")) == []


def test_rank_3_loads_its_experts_of_one_layer(sparse: Path) -> None:
    experts = plan_ranks(EngineConfig(model=sparse, device="cpu", ranks=8)).ranks[3].planned.experts
    assert experts == range(144, 192)
    checkpoint = Checkpoint(sparse)
    span = checkpoint.shards.locate("layers.0.ffn.experts.145.w1.weight").spans["layers.0.ffn.experts.145.w1.weight"]
    with (sparse / released_file("layers.0.")).open("r+b") as file:
        file.seek(span.start)
        file.write(b"\x21")
    model = empty_model(cut_layers(checkpoint.config, 1), torch.device("meta"), experts)
    parameters = {
        name: torch.empty_like(tensor, device="cpu")
        for name, tensor in model.official_parameters().items()
        if name.startswith("layers.0.")
    }
    checkpoint = Checkpoint(sparse)
    load_parameters(parameters, checkpoint, experts=experts)
    assert checkpoint.files_opened == 1
    stack = parameters["layers.0.ffn.experts.w1.weight"].view(torch.uint8)
    assert len(stack) == 48 and stack[1].flatten()[0] == 0x21 and not stack[0].any() and not stack[2].any()


def test_refusal_counts_all_ranks_of_a_host(host_with: FreeMemory) -> None:
    """Two ranks hold more than one, so a host may have room for one alone."""
    alone, both = (plan_ranks(config(ranks=ranks)).needed_bytes for ranks in (1, 2))
    assert alone < both
    host_with(both)
    check_ranks(config(ranks=2))
    host_with(both - 1)
    with pytest.raises(OctavoError, match=r"2 ranks share cpu.*smallest number of ranks that fits is 1 \(--ranks 1\)"):
        start_others(config(ranks=2), lambda settings, rank, control: None)
    host_with(alone - 1)
    with pytest.raises(OctavoError, match=r"GiB are needed.*--kv-tokens.*No number of ranks .* 8 experts"):
        start_others(config(), lambda settings, rank, control: None)


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"8 experts cannot be dealt evenly; 1, 2, 4, 8 ranks can"):
        check_ranks(config(ranks=3))


@pytest.mark.parametrize("kv_tokens", [None, 65_536])
def test_refusal_on_gpus(gpus_with: Callable[[list[int]], None], kv_tokens: int | None) -> None:
    """A GPU of 60 GiB holds an eighth of the released experts, not a sixth; the state is what is left, or as given.
    Without weights in BF16, 50 GiB do."""

    def released_on(ranks: int) -> EngineConfig:
        return EngineConfig(weights="random", preset="slice", experts=384, ranks=ranks, kv_tokens=kv_tokens)

    gpus_with([50 * GIB] * 8)
    check_ranks(dataclasses.replace(released_on(8), bf16_weights="off"))
    with pytest.raises(OctavoError, match=r"--bf16-weights off takes 1\d\.\d\d GiB less"):
        check_ranks(released_on(8))
    gpus_with([60 * GIB] * 8)
    check_ranks(released_on(8))
    row = describe_plan(released_on(8))[2]
    assert cells(row)[:2] == ["0-7", "cuda:0 to cuda:7"]
    with pytest.raises(OctavoError, match=r"cuda:0: .*GiB are needed.*smallest .* is 8 \(--ranks 8\)\.$"):
        check_ranks(released_on(4))
    gpus_with([60 * GIB])
    with pytest.raises(OctavoError, match=r"is 8 \(--ranks 8\), on as many GPUs like this one; this machine has 1"):
        check_ranks(released_on(1))
    with pytest.raises(OctavoError, match=r"cuda:1: this machine has 1 CUDA devices"):
        check_ranks(released_on(8))
    gpus_with([8 * GIB] * 8)
    assert fitting_ranks(released_on(8)).startswith("No number of ranks")


def test_doctor_plans_for_other_machines(sparse: Path, host_with: FreeMemory) -> None:
    host_with(16 * GIB)
    checks = {check.name: check for check in doctor.model_checks(EngineConfig(model=sparse, device="cpu", ranks=8))}
    assert "384 of 384 experts on 8 ranks" in checks["model"].detail
    assert "0-47 to 336-383, 48 each" in checks["ranks"].detail
    memory = checks["memory"]
    assert not memory.ok and "16.00 GiB available on cpu" in memory.detail
    assert "No number of ranks" in memory.remedy
    assert doctor.exit_code(checks.values()) == 0
    assert doctor.exit_code(doctor.model_checks(EngineConfig(model=sparse, device="cpu"))) == 1


def test_doctor_looks_at_every_gpu(gpus_with: Callable[[list[int]], None]) -> None:
    gpus_with([60 * GIB, 60 * GIB, GIB // 64])
    checks = {check.name: check for check in doctor.model_checks(config(ranks=4, device="auto"))}
    rows = [cells(line) for line in checks["ranks"].detail.splitlines()[2:-1]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("0-1", "cuda:0 to cuda:1", "64.4 GB"),
        ("2", "cuda:2", "16.8 MB"),
        ("3", "cuda:3", "no such device"),
    ]
    assert not checks["memory"].ok and "1 of 4 GPUs are not there" in checks["memory"].detail
    assert doctor.exit_code(checks.values()) == 1
