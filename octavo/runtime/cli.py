"""The command ``octavo``: answers on stdout, everything else on stderr; exit codes 0 success, 1 failure, 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import typer

from octavo.errors import OctavoError
from octavo.runtime.config import EngineConfig
from octavo.runtime.options import with_options
from octavo.runtime.sampling import SamplingParams

app = typer.Typer(
    help="Octavo serves DeepSeek-V4.1 from a compiler's graph.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Look at checkpoints, and make small random ones.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
_console = rich.console.Console(stderr=True, highlight=False)


def main() -> None:
    """Entry point. User errors end in one message and their exit code; anything else is a bug and keeps its trace."""
    try:
        app()
    except OctavoError as error:
        _say(f"octavo: {error}", style="red")
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
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers a chat message.")] = True,
) -> None:
    """Answer prompts: the text goes to stdout as it is made, a summary of each to stderr."""
    from octavo.runtime.engine import Engine, Prompt
    from octavo.runtime.prompt import encode_chat

    with _progress("loading") as progress, Engine(engine, progress) as running:
        _say(running.describe())
        encoded: list[Prompt] = [
            prompt if raw else encode_chat(running.tokenizer, [{"role": "user", "content": prompt}], thinking=thinking)
            for prompt in prompts
        ]
        for prompt in encoded:
            running.encode(prompt)
        for prompt in encoded:
            for delta in running.stream(prompt, sampling):
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                if delta.answer is not None:
                    sys.stdout.write("\n")
                    _say(delta.answer.summary())


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

    with _progress("writing") as progress:
        init_checkpoint(preset, path, seed, progress)
    _say(f"{path}: preset {preset}, random weights (seed {seed})")


@app.command()
def doctor() -> None:
    """Check versions, devices, compilers and backends; each line says ok, or what mends it."""
    from octavo.runtime.doctor import exit_code, run_checks

    checks = run_checks()
    width = max(len(check.name) for check in checks)
    for check in checks:
        state = "ok  " if check.ok else ("FAIL" if check.required else "warn")
        typer.echo(
            f"{state}  {check.name:<{width}}  {check.detail}" + (f"\n      -> {check.remedy}" if check.remedy else "")
        )
    raise typer.Exit(exit_code(checks))


def _say(message: str, style: str = "") -> None:
    """One message on stderr, as it is: neither wrapped nor searched for markup."""
    _console.print(message, style=style, markup=False, soft_wrap=True)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes on stderr, gone when its work is done; nothing where stderr is no terminal."""
    columns = (
        rich.progress.TextColumn(what),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=done < total)

        yield update
