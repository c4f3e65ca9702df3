"""``octavo serve`` in its two processes, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

_SECONDS = 60.0
_URL = re.compile(r" at (http://\S+)")
_COMMAND = "import sys; from octavo.runtime.cli import main; sys.argv[0] = 'octavo'; main()"
QUICK = ("--device", "cpu", "--graphs", "off", "--max-requests", "64", "--kv-tokens", "8192", "--chunk", "256")
"""Options with which octavo-nano starts in two to three seconds."""


class RealServer:
    """The command and what it has printed; ``client`` speaks to it."""

    def __init__(self, options: tuple[str, ...]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "serve", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            # One thread: idle threads of several processes on two cores would spin against each other.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = wait_for(lambda: next((found[1] for line in self.lines if (found := _URL.search(line))), None))
        self.client = httpx.Client(base_url=self.url, timeout=_SECONDS)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def engine_pid(self) -> int:
        """The HTTP process has one child."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def wait_until_ready(self) -> list[tuple[int, dict[str, Any]]]:
        """All different answers of /health until it was 200, each with its status."""
        seen: list[tuple[int, dict[str, Any]]] = []

        def ready() -> bool:
            answer = self.client.get("/health")
            if (told := (answer.status_code, answer.json())) not in seen:
                seen.append(told)
            return answer.status_code == 200

        wait_for(ready)
        return seen

    def log(self, request_id: str) -> dict[str, Any]:
        """The line about an HTTP request."""

        def find() -> dict[str, Any] | None:
            records = [json.loads(line) for line in self.lines if line.startswith("{")]
            return next((record for record in records if record["request_id"] == request_id), None)

        return wait_for(find)

    def end(self, number: int) -> int:
        """Signal the command's process group, as a terminal does -> exit code."""
        os.killpg(self.process.pid, number)
        return self.process.wait(_SECONDS)


@contextlib.contextmanager
def real_server(*options: str) -> Iterator[RealServer]:
    """A server that has begun to start; no process of it is left afterwards."""
    server = RealServer(options)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(_SECONDS)
        server.client.close()


def wait_for(look: Callable[[], T | None], seconds: float = _SECONDS) -> T:
    """What ``look`` returns once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s")


def is_gone(pid: int) -> bool:
    """No such process, or one that has ended and is not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
