"""The processes of ranks 1, 2, ...: started by rank 0 on this host, watched, and never left behind.

Each worker joins the process group before it loads anything, so that from then on a rank that dies breaks the
connection of those that wait for it. What it died of comes through a pipe of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo.errors import OctavoError
from octavo.runtime.config import EngineConfig
from octavo.runtime.ranks.group import Release, is_broken, join, leave

_LOCALHOST = "127.0.0.1"
_JOIN_SECONDS = 120.0
"""For a worker to start its interpreter, import torch and join."""
_LAST_WORDS_SECONDS = 5.0
"""Between a broken connection and the word of the rank that broke it."""
_END_SECONDS = 5.0
_UNGUARDED = (
    ". Ranks are processes that import the main module again: a script makes its engine under "
    'if __name__ == "__main__":'
)
"""For a worker that ended before it joined."""
Work = Callable[[EngineConfig, int, dist.ProcessGroup], Release | None]
"""What a worker does once it has joined: ``work(config, rank, control)``, with the group over which rank 0 speaks.

What it returns gives up its graphs before its groups end."""


class RankFailure(OctavoError):
    """A rank has ended; the message is what it ended of."""


class Workers:
    """Rank 0's view of the other ranks. Starting them makes the process group of this process."""

    def __init__(self, config: EngineConfig, work: Work, collective_seconds: float) -> None:
        """Returns when all have joined. Raises :class:`RankFailure` if one cannot.

        ``collective_seconds``: how long a collective may wait for a rank before it is an error.
        """
        if dist.is_initialized():
            raise OctavoError("This process has a process group already: an engine of several ranks needs its own.")
        self.failure: RankFailure | None = None
        self._joined = False
        self._on_failure: Callable[[RankFailure], None] = lambda failure: None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        store = TCPStore(_LOCALHOST, 0, config.ranks, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(1, config.ranks):
            mine, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(
                target=_main,
                args=(config, rank, store.port, theirs, work, collective_seconds, torch.get_num_threads()),
                name=f"octavo-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self._monitor = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        self._monitor.start()
        try:
            self._wait_for_all(store)
            self._joined = True
            self.control = join(store, 0, config, collective_seconds)
        except BaseException:
            self.stop()
            raise

    def on_failure(self, call: Callable[[RankFailure], None]) -> None:
        """Call it, in the monitor's thread, if a rank ends that should not; at once if one has."""
        with self._lock:
            self._on_failure = call
            failure = self.failure
        if failure is not None:
            call(failure)

    def explain(self, error: Exception) -> Exception:
        """The failure behind a broken collective, or the error itself if it is no other rank's."""
        if not is_broken(error):
            return error
        end = time.monotonic() + _LAST_WORDS_SECONDS
        while self.failure is None and not self.stopped() and time.monotonic() < end:
            time.sleep(0.05)
        if self.failure is not None:
            return self.failure
        why = self.stopped() or "All other ranks still run: one hangs, or needs longer than --step-deadline. "
        return RankFailure(f"another rank did not answer. {why}({str(error).strip().partition(chr(10))[0]})")

    def stopped(self) -> str:
        """A sentence that names ranks which are stopped, as by SIGSTOP; empty if none is."""
        ranks = [str(rank) for rank, process in enumerate(self._processes, start=1) if _is_stopped(process)]
        if not ranks:
            return ""
        return f"Rank {ranks[0]} is stopped. " if len(ranks) == 1 else f"Ranks {', '.join(ranks)} are stopped. "

    def stop(self, force: bool = False, release: Release | None = None) -> None:
        """End all workers and the process group. Those that do not end by themselves are killed, with ``force`` all.

        ``release``: see :func:`~octavo.runtime.ranks.group.leave`.
        """
        self._closing.set()
        end = time.monotonic() + (0.0 if force or self.failure is not None else _END_SECONDS)
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()  # also one that has been stopped
                process.join()
        self._monitor.join()
        for pipe in self._pipes:
            pipe.close()
        leave(release, broken=force or self.failure is not None)

    def _wait_for_all(self, store: TCPStore) -> None:
        keys = [f"started-{rank}" for rank in range(1, len(self._processes) + 1)]
        end = time.monotonic() + _JOIN_SECONDS
        while not store.check(keys):
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > end:
                raise RankFailure(f"ranks did not start within {_JOIN_SECONDS:g} s")
            time.sleep(0.02)

    def _watch(self) -> None:
        """The first worker that ends before its time is the failure; the others wait for it in vain and are killed."""
        sentinels = [process.sentinel for process in self._processes]
        while not self._closing.is_set():
            ended = wait(sentinels, timeout=0.2)
            if ended and not self._closing.is_set():
                place = next(place for place, sentinel in enumerate(sentinels) if sentinel in ended)
                failure = RankFailure(f"rank {place + 1} ended: {self._last_words(place)}")
                with self._lock:
                    self.failure = failure
                    call = self._on_failure
                for process in self._processes:
                    if process.is_alive():
                        process.kill()
                call(failure)
                return

    def _last_words(self, place: int) -> str:
        pipe, process = self._pipes[place], self._processes[place]
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll():
                return str(pipe.recv())
        process.join(1.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}{_UNGUARDED if not self._joined else ''}"


def _is_stopped(process: BaseProcess) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has just ended
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def _main(
    config: EngineConfig, rank: int, port: int, pipe: Connection, work: Work, collective_seconds: float, threads: int
) -> None:
    """A worker's life. Ctrl-C goes to rank 0 alone, which ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        store = TCPStore(_LOCALHOST, port, config.ranks, is_master=False)
        store.set(f"started-{rank}", "yes")
        control = join(store, rank, config, collective_seconds)
        leave(work(config, rank, control))
    except BaseException as error:
        if not isinstance(error, OctavoError):
            traceback.print_exc()
        if is_broken(error):
            time.sleep(_LAST_WORDS_SECONDS / 2)  # another rank broke it, and is to be heard first
        pipe.send(f"{type(error).__name__}: {error}")
        pipe.close()
        raise SystemExit(1) from error
