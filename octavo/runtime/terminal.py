"""What commands share on a terminal: messages and progress on stderr, so that stdout holds answers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import rich.console
import rich.progress

from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.runtime.config import EngineConfig
    from octavo.runtime.engine import Engine

_console = rich.console.Console(stderr=True, highlight=False)


def say(message: str, style: str = "") -> None:
    """One message on stderr, as it is: neither wrapped nor searched for markup."""
    _console.print(message, style=style, markup=False, soft_wrap=True)


def check_writable(file: Path, option: str) -> None:
    """Raise :class:`UsageError` for a file that cannot be written, before the work whose results it is for."""
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise UsageError(
            f"{option} {file}: cannot be written. Name a file in a directory that exists and can be written."
        )


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes, gone when its work is done; nothing where stderr is no terminal."""
    with _progress(what, rich.progress.DownloadColumn()) as update:
        yield update


@contextmanager
def count_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """The same in whole things."""
    with _progress(what, rich.progress.MofNCompleteColumn()) as update:
        yield update


@contextmanager
def start_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for the phases of an engine's start, ``update(phase, done, total)``; gone when they are over."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda phase, done, total: bar.update(task, description=phase, completed=done, total=total)


def start_engine(config: EngineConfig) -> Engine:
    """The engine of a command: with several ranks first what each will hold, then a bar, then what has been started."""
    from octavo.runtime.assemble import local_rank
    from octavo.runtime.engine import Engine
    from octavo.runtime.rank_plan import describe_plan

    if local_rank(0) == 0:  # of the processes that torchrun starts on a host, one tells
        for line in describe_plan(config):
            say(line)
    with start_progress() as progress:
        engine = Engine(config, progress)
    say(engine.describe())
    return engine


@contextmanager
def _progress(what: str, amount: rich.progress.ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    columns = (
        rich.progress.TextColumn(what),
        rich.progress.BarColumn(),
        amount,
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=done < total)

        yield update
