"""One rank's share of a prefill: what is computed, what would be sent, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from octavo import EngineConfig, UsageError
from octavo.graphs.emulation import EmulatedCommunicator, run_ranks
from octavo.runtime.bench_ranks import AloneCommunicator, counts_of, last_rows, measure_ranks, measured_config
from octavo.runtime.cli import app
from octavo.runtime.ranks.traffic import CountedCommunicator, Traffic


def config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"weights": "random", "preset": "tiny", "layers": 1, "device": "cpu", "chunk": 32}
    return EngineConfig(**(fields | changes))


def test_shares() -> None:
    """Rows and experts by hand; three collectives in a layer; bytes grow with a rank's rows."""
    reports = list(measure_ranks(config(experts=8), (1, 2, 4), (20, 80), 1, lambda *_: None))
    shares = reports[-1]["shares"]
    assert [(s["cp"], s["prompt_tokens"], s["rows"], s["local_rows"], s["experts"]) for s in shares] == [
        (1, 20, 20, 20, 8),
        (1, 80, 16, 16, 8),
        (2, 20, 20, 10, 4),
        (2, 80, 16, 8, 4),
        (4, 20, 20, 5, 2),
        (4, 80, 16, 4, 2),
    ]
    assert [share["collectives"] for share in shares] == [0, 0, 3, 3, 3, 3]
    assert all(share["seconds"] > 0 for share in shares)
    assert [share["speed_up_at_most"] == 1.0 for share in shares[:2]] == [True, True]
    assert all(share["speed_up_at_most"] > 0 for share in shares)
    sent = {(share["cp"], share["prompt_tokens"]): share["bytes_sent"] for share in shares}
    assert sent[1, 20] == 0 and sent[2, 20] / sent[2, 80] == pytest.approx(10 / 8, rel=1e-6)
    assert len(reports) == len(shares)


def test_replicated_experts_send_less() -> None:
    shares = {
        placement: list(measure_ranks(config(expert_placement=placement), (2,), (32,), 1, lambda *_: None))[-1][
            "shares"
        ][0]
        for placement in ("sharded", "replicated")
    }
    assert shares["replicated"]["collectives"] == 1 and shares["sharded"]["collectives"] == 3
    assert shares["replicated"]["experts"] == 2 * shares["sharded"]["experts"]
    assert shares["replicated"]["bytes_sent"] < shares["sharded"]["bytes_sent"]
    assert shares["sharded"]["speed_up_at_most"] is None


def test_the_stand_in_has_the_shapes_of_ranks() -> None:
    values = [torch.arange(12.0).view(4, 3), torch.arange(4)]
    total = torch.arange(24.0).view(8, 3)

    def work(communicator: EmulatedCommunicator) -> list[torch.Size]:
        return shapes(communicator)

    def shapes(communicator: EmulatedCommunicator | AloneCommunicator) -> list[torch.Size]:
        found = communicator.shard([total])
        for ordered in (True, False):
            found += communicator.gather(values, ordered)
        found += [communicator.reduce(total, scatter) for scatter in (True, False)]
        return [value.shape for value in found]

    assert shapes(AloneCommunicator(2)) == run_ranks(2, work)[0]


def test_traffic() -> None:
    """Bytes by the ring algorithm; shards send nothing."""
    traffic = Traffic()
    counted = CountedCommunicator(AloneCommunicator(4), traffic)
    counted.shard([torch.zeros(8)])
    assert traffic == Traffic()
    counted.gather([torch.zeros(5, 2), torch.zeros(5, dtype=torch.bool)], True)
    assert (traffic.collectives, traffic.bytes_sent) == (1, 3 * (40 + 5))
    counted.reduce(torch.zeros(8, 2), True)
    assert (traffic.collectives, traffic.bytes_sent) == (2, 3 * (40 + 5) + 48)
    counted.reduce(torch.zeros(8, 2), False)
    assert (traffic.collectives, traffic.bytes_sent) == (3, 3 * (40 + 5) + 48 + 96)
    assert traffic.seconds > 0


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--weights", "random", "--preset", "tiny", "--layers", "1", "--device", "cpu", "--chunk", "16"]
    command = ["bench", "ranks", *options, "--cp", "1,2", "--prompts", "16,40", "--repeat", "1", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "|  cp | prompt |" in result.stdout and "speed-up <=" in result.stdout
    report = json.loads(file.read_text())
    assert [(share["cp"], share["rows"]) for share in report["shares"]] == [(1, 16), (1, 8), (2, 16), (2, 8)]


def test_rows_of_the_last_step() -> None:
    assert [last_rows(prompt, 8) for prompt in (1, 7, 8, 9, 16, 17)] == [1, 7, 8, 1, 8, 1]


@pytest.mark.parametrize(
    ("changes", "ranks", "prompts", "message"),
    [
        ({"ranks": 2}, (1,), (32,), "--ranks does not apply"),
        ({"buckets": "dense"}, (1,), (32,), "--buckets does not apply"),
        ({}, (3,), (32,), r"--cp 3: \d+ experts cannot be dealt evenly"),
        ({}, (2,), (33,), "--prompts 33: its last step has 1 rows"),
        ({"kv_tokens": 64}, (2,), (128,), "--prompts 128: a request has room for 64 tokens"),
    ],
)
def test_what_cannot_be_measured(
    changes: dict[str, Any], ranks: tuple[int, ...], prompts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        measured_config(config(**changes), ranks, prompts)


@pytest.mark.parametrize("text", ["", "a", "0,1", "2,1", "1,1"])
def test_numbers(text: str) -> None:
    with pytest.raises(UsageError, match=f"--cp {text}: expected ascending numbers"):
        counts_of(text, "--cp")
    assert counts_of("1,2,8", "--cp") == (1, 2, 8)
