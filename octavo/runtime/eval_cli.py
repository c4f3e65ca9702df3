"""``octavo eval``: how many questions a model answers correctly, and whether two ways of running it agree."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.errors import OctavoError, UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.options import option_fields, with_options
from octavo.runtime.terminal import check_writable, count_progress, start_engine

if TYPE_CHECKING:
    from octavo.runtime.evaluate import Score, Suite

_LISTED = 20
"""Most differing answers that are printed; --json has all."""


@with_options
def eval_command(
    engine: EngineConfig,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="arithmetic, recall@1k, recall@4k, recall (both), trace@1k, facts, or a FILE.jsonl of questions and "
            "answers; may be given several times. Default: arithmetic, recall and facts."
        ),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Questions of each suite.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the generated questions.")] = 0,
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. Default: 128, and 2048 for a file.")
    ] = None,
    instruction: Annotated[
        str, typer.Option(help='Put below every question of a file, such as "End with: The answer is X."')
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every answer to this file.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Answer everything again with these engine options changed, such as graphs=eager,chunk=64, "
            "and list the answers that differ; if any does, the exit code is 1.",
        ),
    ] = None,
) -> None:
    """Grade a model: accuracy with its 95 % interval, and tokens per second. Answers are greedy.

    A line of FILE.jsonl is {"question": "...", "answer": "..."}; of a GSM8K answer only what follows #### counts.
    An answer counts if it ends with "The answer is X.", "#### X" or holds \\boxed{X}.
    """
    if json_file is not None:
        check_writable(json_file, "--json")
    other = changed_config(engine, compare) if compare is not None else None
    if other is not None and engine.dump_dir is not None and other.dump_dir == engine.dump_dir:
        raise UsageError(f"--dump-dir {engine.dump_dir}: --compare runs two engines; give the second dump-dir=OTHER")
    suites = _suites(suite or ["arithmetic", "recall", "facts"], items, seed, max_tokens, instruction, thinking)
    scores = _run(engine, suites, thinking)
    for line in table_lines(scores):
        typer.echo(line)
    again = None
    if other is not None:
        again = _run(other, suites, thinking)
        typer.echo(f"\nwith {compare}:")
        for line in table_lines(again):
            typer.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(_report(scores, again), indent=2) + "\n", encoding="utf-8")
    raise_failures([*scores, *(again or ())])
    if again is not None:
        _compare(scores, again)


def changed_config(engine: EngineConfig, changes: str) -> EngineConfig:
    """The configuration with ``key=value,...`` changed, keys as on the command line.

    Raises :class:`UsageError` for a key that is no engine option, or a value of a wrong kind.
    """
    hints = typing.get_type_hints(EngineConfig)
    names = [field.name for field in option_fields(EngineConfig)]
    values: dict[str, Any] = {}
    for change in re.split(r",(?=[-\w\s]+=)", changes):
        key, equals, value = change.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in names:
            raise UsageError(f"--compare {change!r}: expected KEY=VALUE with a KEY of {', '.join(names)}")
        values[name] = _value_of(hints[name], value.strip(), f"--compare {change!r}")
    return dataclasses.replace(engine, **values)


def _value_of(kind: Any, text: str, where: str) -> Any:
    """``text`` as a value of an option's type."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if text == "none" and types.NoneType in kinds:
        return None
    (plain,) = (one for one in kinds if one is not types.NoneType)
    if typing.get_origin(plain) is typing.Literal:
        allowed = typing.get_args(plain)
        if text not in allowed:
            raise UsageError(f"{where}: expected one of {', '.join(allowed)}")
        return text
    try:
        return plain(text)
    except ValueError as error:
        raise UsageError(f"{where}: expected a value of type {plain.__name__}") from error


def _suites(
    names: list[str], items: int, seed: int, max_tokens: int | None, instruction: str, thinking: bool
) -> list[Suite]:
    from octavo.runtime.evaluate import file_suite, generated_suites

    found: list[Suite] = []
    for name in names:
        if name.endswith(".jsonl"):
            found.append(file_suite(Path(name), items, max_tokens, instruction))
        else:
            found += generated_suites(name, items, seed, max_tokens, thinking)
    return found


def _run(config: EngineConfig, suites: list[Suite], thinking: bool) -> list[Score]:
    from octavo.runtime.evaluate import run_suite

    running = start_engine(config)
    with running:
        scores = []
        for suite in suites:
            with count_progress(suite.name) as answered:
                scores.append(run_suite(running, suite, thinking=thinking, on_progress=answered))
            raise_interrupt(scores[-1])
    return scores


def raise_interrupt(score: Score) -> None:
    """After Ctrl-C the engine gives what it has; a share of unfinished answers would mean nothing."""
    if any(one.finish_reason == "abort" for one in score.graded):
        raise KeyboardInterrupt


def table_lines(scores: list[Score]) -> list[str]:
    """One line a suite. Speeds are tokens over the wall clock of the whole suite."""
    width = max(len("suite"), *(len(score.suite) for score in scores))
    lines = [
        f"{'suite':<{width}}  items  correct  accuracy  95 % interval    seconds  prompt tokens/s  answer tokens/s"
    ]
    for score in scores:
        low, high = score.interval
        lines.append(
            f"{score.suite:<{width}}  {len(score.graded):>5}  {score.correct:>7}  {score.accuracy:>7.1%}   "
            f"{low:>6.1%} - {high:>6.1%}  {score.seconds:>7.1f}  {score.prompt_tokens / score.seconds:>15,.0f}  "
            f"{score.answer_tokens / score.seconds:>15,.0f}"
        )
    return lines


def _compare(first: list[Score], second: list[Score]) -> None:
    """List the answers that differ. Raises :class:`OctavoError` if any does."""
    from octavo.runtime.evaluate import differences

    found = [(one, other, index) for one, other in zip(first, second, strict=True) for index in differences(one, other)]
    total = sum(len(score.graded) for score in first)
    typer.echo(f"\n{len(found)} of {total} answers differ")
    for one, other, index in found[:_LISTED]:
        typer.echo(f"{one.suite} {index}, expected {one.graded[index].question.answer!r}:")
        typer.echo(f"  {one.graded[index].text!r}\n  {other.graded[index].text!r}")
    if len(found) > _LISTED:
        typer.echo(f"and {len(found) - _LISTED} more; --json has all")
    if found:
        raise OctavoError(f"{len(found)} of {total} answers differ between the two configurations.")


def raise_failures(scores: list[Score]) -> None:
    """An answer that failed is the command's failure, as in other commands."""
    answers = [one for score in scores for one in score.graded]
    failed = [one.error for one in answers if one.error is not None]
    if failed:
        raise OctavoError(f"{len(failed)} of {len(answers)} answers failed: {failed[0]}")


def _report(scores: list[Score], again: list[Score] | None) -> dict[str, Any]:
    """What --json writes."""
    report: dict[str, Any] = {"suites": [_score_entry(score) for score in scores]}
    if again is not None:
        report["compared"] = [_score_entry(score) for score in again]
    return report


def _score_entry(score: Score) -> dict[str, Any]:
    return {
        "suite": score.suite,
        "items": len(score.graded),
        "correct": score.correct,
        "accuracy": score.accuracy,
        "interval": score.interval,
        "prompt_tokens": score.prompt_tokens,
        "answer_tokens": score.answer_tokens,
        "seconds": score.seconds,
        "answers": [dataclasses.asdict(one) for one in score.graded],
    }
