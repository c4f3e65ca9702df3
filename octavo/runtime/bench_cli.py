"""``octavo bench``: how fast an engine is, what graphs and compilation do for it, and how a server bears load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.options import with_options
from octavo.runtime.terminal import check_writable, count_progress, say, start_engine, start_progress

if TYPE_CHECKING:
    from octavo.runtime.bench_steps.shapes import Kind

bench_app = typer.Typer(invoke_without_command=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write all numbers to this file.")]

_CONTEXT_HELP = "Tokens that each request has before the step, ascending; random state stands for them."
_WAYS_HELP = (
    "Ways to run: eager and graphs (operators as they are, called or replayed), inductor and both (compiled). all, or "
    "some of them. Default: an engine's."
)
_BASELINES_HELP = (
    "Also measure: eager (the same model in plain PyTorch operations), compile (torch.compile of those, which takes "
    "minutes for many --layers), huggingface (layers of transformers' deepseek_v4). Separated by commas."
)
_REPEAT_HELP = (
    "Turns of which the median is taken, on a GPU of four steps one behind another; baselines have a fifth as many."
)
_PLOT_HELP = "Also draw the components under the roofline to this SVG file."


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


@bench_app.command("prefill")
@with_options
def prefill(
    engine: EngineConfig,
    rows: Annotated[
        str, typer.Option(help="Rows of the step, ascending, at most --chunk: the next tokens of one request.")
    ] = "128,512,2048,8192",
    contexts: Annotated[str, typer.Option("--context", help=_CONTEXT_HELP)] = "0,32768",
    ways: Annotated[str | None, typer.Option(help=_WAYS_HELP)] = None,
    baselines: Annotated[str | None, typer.Option(help=_BASELINES_HELP)] = None,
    repeat: Annotated[int, typer.Option(min=1, help=_REPEAT_HELP)] = 20,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help=_PLOT_HELP)] = None,
) -> None:
    """Measure prefill steps as an engine runs them, against the floor of an H200: in all, and by component.

    Also launches, breaks, idle time of the GPU inside graphs, and what captures take. The floor counts what each
    component must move and multiply at the datasheet's rates, of the experts those that rows of the step chose.
    --graphs, --buckets, --max-requests, --dump-dir and --ranks do not apply.
    """
    _measure_steps("prefill", engine, rows, contexts, ways, baselines, repeat, json_file, plot)


@bench_app.command("decode")
@with_options
def decode(
    engine: EngineConfig,
    batch: Annotated[
        str, typer.Option(help="Requests of the step, ascending, at most --chunk: each brings one row and samples.")
    ] = "1,16,64,128",
    contexts: Annotated[str, typer.Option("--context", help=_CONTEXT_HELP)] = "0,32768",
    ways: Annotated[str | None, typer.Option(help=_WAYS_HELP)] = None,
    baselines: Annotated[str | None, typer.Option(help=_BASELINES_HELP)] = None,
    repeat: Annotated[int, typer.Option(min=1, help=_REPEAT_HELP)] = 20,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help=_PLOT_HELP)] = None,
) -> None:
    """Measure decode steps as an engine runs them, against the floor of an H200: in all, and by component.

    As bench prefill, with a row of each of many requests.
    """
    _measure_steps("decode", engine, batch, contexts, ways, baselines, repeat, json_file, plot)


def _measure_steps(
    kind: Kind,
    engine: EngineConfig,
    sizes: str,
    contexts: str,
    ways: str | None,
    baselines: str | None,
    repeat: int,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    for file, option in ((json_file, "--json"), (plot, "--plot")):
        if file is not None:
            check_writable(file, option)
    from octavo.runtime.bench_steps.measure import measure_steps
    from octavo.runtime.bench_steps.plot import plot_svg
    from octavo.runtime.bench_steps.report import report_lines
    from octavo.runtime.bench_steps.shapes import step_shapes

    shapes = step_shapes(kind, sizes, contexts, engine.chunk)
    report: dict[str, Any] = {}
    with start_progress() as progress:
        for report in measure_steps(engine, kind, shapes, ways, baselines, repeat, progress):
            if json_file is not None:  # a long measurement that is interrupted leaves what it has
                json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(plot_svg(report), encoding="utf-8")
    say(report["environment"]["engine"])
    for line in report_lines(report):
        typer.echo(line)


@bench_app.command("kernels")
def kernels(
    operators: Annotated[
        str | None, typer.Option(help="Operators, separated by commas. Default: all that have cases.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of which the median is taken.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Measure operators on their own, on one GPU at the released model's widths: time, share of the floor, baselines.

    Also which kernels ran. The floor is that of an H200: bytes / 4.8 TB/s or operations / the datasheet's peak.
    """
    if json_file is not None:
        check_writable(json_file, "--json")
    from octavo.runtime.bench_kernels.report import measure_kernels, report_lines

    entries: list[dict[str, Any]] = []
    with start_progress() as progress:
        for entry in measure_kernels(operators, repeat, progress):
            entries.append(entry)
            if json_file is not None:  # a long measurement that is interrupted leaves what it has
                json_file.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    for line in report_lines(entries):
        typer.echo(line)


@bench_app.command("ranks")
@with_options
def ranks(
    engine: EngineConfig,
    cp: Annotated[str, typer.Option(help="Numbers of ranks, ascending.")] = "1,2,4,8",
    prompts: Annotated[str, typer.Option(help="Prompt lengths in tokens, ascending.")] = "8192,32768,131072",
    repeat: Annotated[int, typer.Option(min=1, help="Steps of which the median is taken.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure one rank's share of a prefill at several numbers of ranks, with copies in place of collectives.

    That bounds how far a prefill can scale. --ranks, --buckets, --max-requests and --dump-dir do not apply.
    """
    if json_file is not None:
        check_writable(json_file, "--json")
    from octavo.runtime.bench_ranks import counts_of, measure_ranks, report_lines

    counts, lengths = counts_of(cp, "--cp"), counts_of(prompts, "--prompts")
    report: dict[str, Any] = {}
    with start_progress() as progress:
        for report in measure_ranks(engine, counts, lengths, repeat, progress):
            if json_file is not None:  # a long measurement that is interrupted leaves what it has
                json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(report["environment"]["engine"])
    for line in report_lines(report):
        typer.echo(line)


@bench_app.command("serve")
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the server listens.")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second, arriving by chance (Poisson).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in work at a time, instead of --rate. Default: 8.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of a prompt: N, A-B (uniform) or ~N (exponential).")
    ] = "128",
    answer_tokens: Annotated[str, typer.Option(help="Tokens of an answer, in the same form.")] = "32",
    first_token_bound: Annotated[
        float | None,
        typer.Option(min=0, help="Milliseconds to the first token; goodput counts requests within bounds."),
    ] = None,
    inter_token_bound: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds from one token to the next, mean over a request.")
    ] = None,
    latency_bound: Annotated[float | None, typer.Option(min=0, help="Milliseconds to the end of an answer.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the first that the server has.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key to send.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the latencies to this SVG file.")] = None,
) -> None:
    """Send a running server streamed completions, and measure what their clients see.

    Any server with OpenAI's /v1/completions that takes token ids and ignore_eos can be measured.
    """
    for file, option in ((json_file, "--json"), (plot, "--plot")):
        if file is not None:
            check_writable(file, option)
    from octavo.runtime.bench_serve import Bounds, Lengths, Load, measure_server, report_lines, summarise
    from octavo.runtime.bench_serve_plot import plot_svg

    load = Load(
        requests=requests,
        rate=rate,
        concurrency=8 if rate is None and concurrency is None else concurrency,
        prompt_tokens=Lengths(prompt_tokens),
        answer_tokens=Lengths(answer_tokens),
        seed=seed,
        timeout=timeout,
    )
    bounds = Bounds(
        first_token=_seconds(first_token_bound),
        inter_token=_seconds(inter_token_bound),
        latency=_seconds(latency_bound),
    )
    with count_progress("answered") as answered:
        calls = asyncio.run(measure_server(url, api_key, load, answered, model))
    report = summarise(url, load, bounds, calls)
    if plot is not None:
        plot.write_text(plot_svg(report), encoding="utf-8")
    _write(report, report_lines(report), json_file)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


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
