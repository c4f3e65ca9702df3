"""``octavo bench``: how fast an engine is, and what graphs and compilation do for the body of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.options import with_options
from octavo.runtime.terminal import check_writable, say, start_engine, start_progress

bench_app = typer.Typer(invoke_without_command=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write all numbers to this file.")]


@bench_app.callback()
@with_options
def bench(
    context: typer.Context,
    engine: EngineConfig,
    requests: Annotated[int, typer.Option(min=1, help="Requests sent at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    json_file: JsonFile = None,
) -> None:
    """Measure prefill and decode speed, latencies, and what a step costs beside the model."""
    if context.invoked_subcommand is not None:
        _refuse_options(context, context.invoked_subcommand)
        return
    if json_file is not None:
        check_writable(json_file, "--json")
    from octavo.runtime.assemble import choose_device
    from octavo.runtime.bench import Load, describe_environment, measure_engine, measure_scheduler, report_lines

    running = start_engine(engine)
    with running:
        report = {
            "environment": describe_environment(choose_device(running.config.device), running.describe()),
            "engine": measure_engine(running, Load(requests, prompt_tokens, answer_tokens)),
            "scheduler": [measure_scheduler(count) for count in (1, 64, 256)],
        }
    _write(report, report_lines(report), json_file)


@bench_app.command("graphs")
@with_options
def graphs(
    engine: EngineConfig,
    rows: Annotated[
        str, typer.Option(help="Row counts of the steps, ascending, at most --chunk.")
    ] = "1,16,128,512,2048,8192",
    repeat: Annotated[
        int,
        typer.Option(min=1, help="Runs of segments of which the median is taken; whole steps run a fifth as often."),
    ] = 20,
    json_file: JsonFile = None,
) -> None:
    """Measure the body's steps, eager and replayed, with operators as they are and compiled (unless --compile none).

    Also launches, idle time of the GPU inside segments, and what captures and compilation take. --graphs, --buckets,
    --dump-dir and --ranks do not apply.
    """
    if json_file is not None:
        check_writable(json_file, "--json")
    from octavo.runtime.bench_graphs import measure_graphs, report_lines, row_counts

    counts = row_counts(rows, engine.chunk)
    report: dict[str, Any] = {}
    with start_progress() as progress:
        for report in measure_graphs(engine, counts, repeat, progress):
            if json_file is not None:  # a long measurement that is interrupted leaves what it has
                json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(report["environment"]["engine"])
    for line in report_lines(report):
        typer.echo(line)


def _refuse_options(context: typer.Context, command: str) -> None:
    """Options in front of the subcommand would be lost."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]}: options of bench {command} follow it: octavo bench {command} ...")


def _write(report: dict[str, Any], lines: list[str], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in lines:
        typer.echo(line)
