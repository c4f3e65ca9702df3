"""``octavo eval`` as a command, on octavo-nano with answers cut short: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
import typer.main

from octavo.errors import OctavoError, UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.eval_cli import changed_config, eval_command, raise_failures, raise_interrupt, table_lines
from octavo.runtime.evaluate import Graded, Question, Score
from octavo.runtime.options import option_fields
from tests.model.mini_run import MINI
from tests.tokenizer_data import published_json

SMALL = ("--device", "cpu", "--graphs", "off", "--max-tokens", "4")


def run(*arguments: str | Path) -> None:
    """The command without its program: options parsed by typer, errors raised as they are."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(eval_command)
    typer.main.get_command(app).main([str(argument) for argument in arguments], standalone_mode=False)


def output(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "mine.jsonl"
    questions.write_text('{"question": "Hi", "answer": "x"}\n', encoding="utf-8")
    file = tmp_path / "out.json"
    run(*SMALL, "--suite", "facts", "--suite", questions, "--items", "2", "--json", file)
    lines = output(capsys)
    assert lines[0].split()[:4] == ["suite", "items", "correct", "accuracy"]
    assert [line.split()[:4] for line in lines[1:]] == [["facts", "2", "0", "0.0%"], ["mine.jsonl", "1", "0", "0.0%"]]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [(entry["suite"], entry["items"], entry["correct"]) for entry in report["suites"]] == [
        ("facts", 2, 0),
        ("mine.jsonl", 1, 0),
    ]
    (answer,) = report["suites"][1]["answers"]
    assert answer["question"] == {"text": "Hi", "answer": "x"} and answer["finish_reason"] == "length"
    assert len(answer["ids"]) == 4 and not answer["correct"] and "compared" not in report


def test_two_ways_of_running_agree(capsys: pytest.CaptureFixture[str]) -> None:
    run(*SMALL, "--suite", "facts", "--items", "2", "--compare", "chunk=7,kv-storage=bf16,max-requests=1")
    lines = output(capsys)
    assert lines[-1] == "0 of 2 answers differ" and "with chunk=7,kv-storage=bf16,max-requests=1:" in lines


def test_answers_that_differ_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with pytest.raises(OctavoError, match="2 of 2 answers differ") as caught:
        run(*SMALL, "--suite", "facts", "--items", "2", "--compare", "layers=3", "--json", file)
    assert caught.value.exit_code == 1
    lines = output(capsys)
    assert lines[-7] == "2 of 2 answers differ" and lines[-6].startswith("facts 0, expected '")
    assert lines[-5] != lines[-4] and len(json.loads(file.read_text(encoding="utf-8"))["compared"]) == 1


def test_options_can_be_changed() -> None:
    base = EngineConfig(model=Path("m"), kv_tokens=64)
    changed = changed_config(base, "graphs=eager,--chunk=64, kv_tokens=none,buckets=1,8,64,step-deadline=2.5,model=n")
    assert changed == dataclasses.replace(
        base, graphs="eager", chunk=64, kv_tokens=None, buckets="1,8,64", step_deadline=2.5, model=Path("n")
    )
    for field in option_fields(EngineConfig):
        with pytest.raises(UsageError, match="expected KEY=VALUE"):
            changed_config(base, field.name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("speed=3", "expected KEY=VALUE with a KEY of model, weights"),
        ("", "expected KEY=VALUE"),
        ("graphs=fast", "expected one of on, off, eager"),
        ("chunk=many", "expected a value of type int"),
        ("chunk=none", "expected a value of type int"),
        ("chunk=0", "must be at least 1"),
    ],
)
def test_changes_that_cannot_be(changes: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        changed_config(EngineConfig(model=Path("m")), changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "gsm8k"), "there is no such suite. There are arithmetic, recall@1k, recall@4k, trace@1k, facts"),
        (("--suite", "gone.jsonl"), "gone.jsonl: cannot be read"),
        (("--suite", "recall@4k", "--items", "1", "--max-model-len", "999"), "recall@4k: its longest question has"),
        (("--suite", "facts", "--compare", "nothing"), "expected KEY=VALUE"),
        (("--suite", "facts", "--json", "gone/out.json"), "--json gone/out.json: cannot be written"),
        (
            ("--suite", "facts", "--graphs", "on", "--dump-dir", "same", "--compare", "chunk=7"),
            "--compare runs two engines; give the second dump-dir=OTHER",
        ),
        (("--suite", "facts", "--model", MINI), "facts: made for the vocabulary of octavo-nano, where 'Mara' is one"),
    ],
)
def test_mistakes(arguments: Sequence[str | Path], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*SMALL, *arguments)


def test_a_checkpoint_with_another_vocabulary(tmp_path: Path) -> None:
    """The published tokenizer is much larger than the mini model's embedding."""
    model = tmp_path / "model"
    shutil.copytree(MINI, model)
    (model / "tokenizer.json").write_text(published_json(), encoding="utf-8")
    with pytest.raises(OctavoError, match=r"ids up to 129279, but text_config.vocab_size is 512\. Use the config.json"):
        run("--model", model, "--device", "cpu", "--suite", "facts")


def test_failed_answers_are_the_commands_failure() -> None:
    graded = Graded(Question("a", "b"), "", [], None, False, "error", "out of luck")
    with pytest.raises(OctavoError, match="1 of 1 answers failed: out of luck"):
        raise_failures([Score("facts", (graded,), 3, 1.0)])


def test_an_interrupted_suite_is_no_result() -> None:
    good = Graded(Question("a", "b"), "The answer is b.", [1], "b", True, "stop", None)
    raise_interrupt(Score("facts", (good,), 3, 1.0))
    with pytest.raises(KeyboardInterrupt):
        raise_interrupt(Score("facts", (good, dataclasses.replace(good, finish_reason="abort")), 3, 1.0))


def test_table_is_aligned() -> None:
    good = Graded(Question("a", "b"), "The answer is b.", [1, 2, 3], "b", True, "stop", None)
    bad = dataclasses.replace(good, correct=False)
    lines = table_lines([Score("facts", (good,) * 471 + (bad,) * 29, 10_000, 2.0), Score("long name", (bad,), 3, 1.0)])
    assert lines[1].split() == ["facts", "500", "471", "94.2%", "91.8%", "-", "95.9%", "2.0", "5,000", "750"]
    assert len({len(line) for line in lines}) == 1
