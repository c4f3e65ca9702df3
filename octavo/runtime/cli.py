"""The command ``octavo``: answers on stdout, everything else on stderr; exit codes 0 success, 1 failure, 2 usage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.errors import OctavoError
from octavo.runtime.bench_cli import bench_app
from octavo.runtime.config import EngineConfig
from octavo.runtime.eval_cli import eval_command
from octavo.runtime.graphs_cli import graphs_app
from octavo.runtime.options import with_options
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.serve_cli import serve_command
from octavo.runtime.terminal import byte_progress, count_progress, say, start_engine

if TYPE_CHECKING:
    from octavo.runtime.request import Answer

app = typer.Typer(
    help="Octavo serves DeepSeek-V4.1 from a compiler's graph.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Look at checkpoints, and make small random ones.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(graphs_app, name="graphs")
app.add_typer(bench_app, name="bench")
app.command("eval")(eval_command)
app.command("serve")(serve_command)

Thinking = Annotated[bool, typer.Option(help="Let the model reason before it answers a chat message.")]


def main() -> None:
    """Entry point. User errors end in one message and their exit code; anything else is a bug and keeps its trace."""
    try:
        app()
    except OctavoError as error:
        say(f"octavo: {error}", style="red")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
@with_options
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="What to answer; each on its own.")],
    engine: EngineConfig,
    sampling: SamplingParams,
    raw: Annotated[
        bool, typer.Option(help="Continue PROMPT as plain text, instead of answering it as a chat message.")
    ] = False,
    thinking: Thinking = True,
) -> None:
    """Answer prompts: one answer is streamed to stdout, several follow each other; a summary of each on stderr."""
    from octavo.runtime.engine import Prompt
    from octavo.runtime.prompt import encode_chat

    running = start_engine(engine)
    with running:
        encoded: list[Prompt] = [
            prompt if raw else encode_chat(running.tokenizer, [{"role": "user", "content": prompt}], thinking=thinking)
            for prompt in prompts
        ]
        if len(encoded) == 1 and sampling.n == 1:
            for delta in running.stream(encoded[0], sampling):
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                if delta.answer is not None:
                    sys.stdout.write("\n")
                    _report([delta.answer])
            return
        with count_progress("answering") as answered:
            results = running.generate(encoded, sampling, answered)
        for result in results:
            for answer in result.answers:
                sys.stdout.write(answer.text + "\n")
                sys.stdout.flush()
        _report([answer for result in results for answer in result.answers])


def _report(answers: list[Answer]) -> None:
    """Summaries on stderr; an answer that failed is the command's failure."""
    for answer in answers:
        say(answer.summary())
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise OctavoError(f"{len(failed)} of {len(answers)} answers failed: {failed[0]}")


@app.command("chat")
@with_options
def chat_command(
    engine: EngineConfig,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    thinking: Thinking = True,
) -> None:
    """Talk with the model: it remembers, /reset forgets, Ctrl-C stops an answer."""
    from octavo.runtime.chat import chat

    running = start_engine(engine)
    prompt = "> " if sys.stdin.isatty() else ""
    with running:
        chat(
            running,
            sampling,
            thinking=thinking,
            system=system,
            read=lambda: input(prompt),
            out=sys.stdout,
            say=say,
        )


@checkpoint_app.command("inspect")
def inspect_checkpoint(path: Annotated[Path, typer.Argument(help="Directory of the checkpoint.")]) -> None:
    """Compare a checkpoint with the official layout: names, shapes, types and files. Reads headers only."""
    from octavo.model.inspection import inspect, report_lines

    report = inspect(path)
    for line in report_lines(report):
        typer.echo(line)
    if report.problems:
        raise OctavoError(f"{path} does not hold the checkpoint that its config.json describes.")


@checkpoint_app.command("init")
def init(
    path: Annotated[Path, typer.Argument(help="Directory to write; must not hold a checkpoint.")],
    preset: Annotated[str, typer.Option(help="tiny: real vocabulary, 85 MB. mini: 512 ids, 5 MB.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a small random checkpoint in the official layout. Its answers are noise."""
    from octavo.model.initialise import init_checkpoint

    with byte_progress("writing") as progress:
        init_checkpoint(preset, path, seed, progress)
    say(f"{path}: preset {preset}, random weights (seed {seed})")


@app.command()
@with_options
def doctor(engine: EngineConfig) -> None:
    """Check versions, devices, compilers and backends; with --model, or --weights random --preset, what fits.

    With --ranks, what each rank would hold, also where there are no GPUs.
    """
    from octavo.runtime.doctor import exit_code, model_checks, run_checks

    checks = run_checks()
    if engine.model is not None or engine.preset is not None:
        checks += model_checks(engine)
    width = max(len(check.name) for check in checks)
    for check in checks:
        state = "ok  " if check.ok else ("FAIL" if check.required else "warn")
        detail = check.detail.replace("\n", "\n" + " " * (len(state) + width + 4))
        typer.echo(f"{state}  {check.name:<{width}}  {detail}")
        if check.remedy:
            typer.echo(f"      -> {check.remedy}")
    raise typer.Exit(exit_code(checks))
