"""The command line as a user meets it: streams, exit codes, and the set of options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.runtime.cli import app
from tests.model.mini_run import MINI


def octavo(*arguments: str | Path, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; from octavo.runtime.cli import main; sys.argv[0] = 'octavo'; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # One thread: idle threads of several processes on two cores would spin against each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=cwd, env=environment, timeout=100)


def test_generate_streams_to_stdout() -> None:
    done = octavo("generate", "--model", MINI, "--max-tokens", "5", "--device", "cpu", "Hello", "world")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 2
    assert done.stderr.count("5 generated") == 2 and "reference numerics" in done.stderr
    again = octavo("generate", "--model", MINI, "--max-tokens", "5", "--device", "cpu", "--graphs", "off", "world")
    assert done.stdout.endswith(again.stdout), "an answer does not depend on the prompts before it"


def test_generate_with_random_weights() -> None:
    done = octavo(
        *(
            "generate",
            "--weights",
            "random",
            "--preset",
            "mini",
            "--layers",
            "3",
            "--device",
            "cpu",
            "--raw",
            "--graphs",
            "off",
        ),
        *("--max-tokens", "3", "--temperature", "0.8", "--seed", "2", "--numerics", "plain", "Hello"),
    )
    assert done.returncode == 0, done.stderr
    assert "3 layers" in done.stderr and "plain numerics" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "--model", "nowhere", "x"), 2, "no config.json"),
        (("generate", "--model", MINI, "--n", "99", "x"), 2, "n 99"),
        (("generate", "--model", MINI, "--raw", ""), 2, "empty"),
        (("generate", "--model", MINI, "--kv-tokens", "8", "x" * 100), 2, "raise --kv-tokens"),
        (("generate", "--model", MINI, "--max-tokens", "0", "x"), 2, "max_tokens 0"),
        (("generate", "--model", MINI, "--numerics", "exact", "x"), 2, "numerics"),
        (("generate", "--model", MINI, "--no-such-option", "x"), 2, "no-such-option"),
        (("generate", "--model", MINI, "--device", "cuda:99", "x"), 1, "CUDA devices"),
        (("generate", "--weights", "random", "--preset", "released", "--device", "cpu", "x"), 1, "GiB are needed"),
        (("checkpoint", "inspect", "nowhere"), 2, "no config.json"),
        (("checkpoint", "init", "--preset", "slice", "here"), 2, "too large to write"),
        (("checkpoint", "init", "--preset", "none", "here"), 2, "no preset 'none'"),
    ],
)
def test_exit_codes(arguments: tuple[str | Path, ...], code: int, message: str, tmp_path: Path) -> None:
    done = octavo(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr
    assert not done.stdout


def test_octavo_nano_is_the_default() -> None:
    done = octavo("generate", "--no-thinking", "Explain what an octavo is.")
    assert done.returncode == 0 and done.stdout.startswith("An octavo is a book")
    assert done.stderr.startswith("octavo-nano: 8 layers")


def test_foreign_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = octavo("generate", "--model", tmp_path, "x")
    assert done.returncode == 1 and "'llama'" in done.stderr and "DeepSeek-V4.1" in done.stderr


def test_checkpoint_init_and_inspect(tmp_path: Path) -> None:
    path = tmp_path / "model"
    assert octavo("checkpoint", "init", "--preset", "mini", "--seed", "3", path).returncode == 0
    again = octavo("checkpoint", "init", "--preset", "mini", path)
    assert again.returncode == 2 and "already holds" in again.stderr
    seen = octavo("checkpoint", "inspect", path)
    assert seen.returncode == 0 and "1,016" in seen.stdout and "problems" in seen.stdout
    shard = sorted(path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    broken = octavo("checkpoint", "inspect", path)
    assert broken.returncode == 1 and shard.name in broken.stdout
    refused = octavo("generate", "--model", path, "x")
    assert refused.returncode == 1 and shard.name in refused.stderr


def test_chat_reads_lines_from_a_pipe() -> None:
    done = octavo(
        "chat", "--model", MINI, "--max-tokens", "3", "--device", "cpu", "--graphs", "off", stdin="Hi\n/reset\nHi\n"
    )
    first, second = done.stdout.split("\n")[:2]
    assert done.returncode == 0 and first == second and "forgotten" in done.stderr


def test_bench_writes_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = octavo(
        *("bench", "--model", MINI, "--device", "cpu", "--json", file),
        *("--requests", "2", "--prompt-tokens", "8", "--answer-tokens", "3"),
    )
    report = json.loads(file.read_text())
    assert done.returncode == 0 and "prefill" in done.stdout and "256 requests" in done.stdout
    assert report["engine"]["requests"] == 2 and report["engine"]["decode_tokens_per_second"] > 0
    assert [entry["requests"] for entry in report["scheduler"]] == [1, 64, 256]
    assert set(report["scheduler"][0]["microseconds"]) == {"schedule", "run", "sample", "read", "deliver"}


def test_doctor_says_what_fits() -> None:
    done = octavo("doctor", "--model", MINI, "--device", "cpu", "--kv-tokens", "640", "--max-requests", "3")
    assert "room for 640 tokens at 140 bytes each (packed) and 3 requests" in done.stdout
    too_big = octavo("doctor", "--weights", "random", "--preset", "released", "--device", "cpu")
    assert too_big.returncode == 1 and "-> fewer --layers" in too_big.stdout
    nowhere = octavo("doctor", "--model", "nowhere")
    assert nowhere.returncode == 1 and "no config.json" in nowhere.stdout


def test_doctor() -> None:
    done = octavo("doctor")
    lines = done.stdout.splitlines()
    assert done.returncode == (1 if any(line.startswith("FAIL") for line in lines) else 0)
    assert any("torch" in line for line in lines) and any("backend reference" in line for line in lines)


def options(*command: str) -> set[str]:
    import typer.main

    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    return {name for parameter in found.params for name in parameter.opts if name.startswith("--")}


ENGINE = {
    *("--model", "--weights", "--preset", "--layers", "--experts", "--weights-seed", "--device", "--numerics"),
    *("--chunk", "--max-requests", "--max-model-len", "--kv-tokens", "--memory-fraction", "--kv-storage"),
    *("--step-deadline", "--ranks", "--graphs", "--buckets", "--dump-dir", "--compile", "--overlap"),
    *("--engram", "--bf16-weights", "--expert-placement", "--collectives"),
}
SAMPLING = {
    *("--max-tokens", "--min-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--n", "--timeout"),
    *("--presence-penalty", "--frequency-penalty", "--repetition-penalty"),
    *("--stop", "--stop-token-ids", "--ignore-eos"),
}


SERVER = {
    *("--host", "--port", "--api-key", "--api-key-file", "--served-model-name", "--max-queue", "--max-body-bytes"),
    *("--max-header-bytes", "--max-schema-bytes", "--max-n", "--default-max-tokens", "--request-timeout"),
    *("--heartbeat-seconds", "--drain-seconds", "--log-prompts"),
}


def test_options_are_frozen() -> None:
    """A new option is a decision, not an accident: change this list with it, and the README."""
    assert options("generate") == ENGINE | SAMPLING | {"--raw", "--thinking"}
    assert options("chat") == ENGINE | SAMPLING | {"--system", "--thinking"}
    assert options("bench") == ENGINE | {"--requests", "--prompt-tokens", "--answer-tokens", "--json"}
    assert options("bench", "graphs") == ENGINE | {"--rows", "--repeat", "--json"}
    assert options("bench", "ranks") == ENGINE | {"--cp", "--prompts", "--repeat", "--json"}
    bounds = {"--first-token-bound", "--inter-token-bound", "--latency-bound"}
    load = {"--requests", "--rate", "--concurrency", "--prompt-tokens", "--answer-tokens", "--seed", "--timeout"}
    assert options("bench", "serve") == load | bounds | {"--model", "--api-key", "--json", "--plot"}
    grading = {"--suite", "--items", "--seed", "--thinking", "--max-tokens", "--instruction", "--json", "--compare"}
    assert options("eval") == ENGINE | grading
    assert options("serve") == ENGINE | SERVER
    assert options("doctor") == ENGINE
    assert options("graphs", "dump") == ENGINE | {"--out"}
    assert options("graphs", "explain") == ENGINE | {"--rows", "--requests"}
    assert options("checkpoint", "init") == {"--preset", "--seed"}
