"""The engine process: ``python -m octavo.runtime.server.engine_process FD CONFIG``, started by the HTTP process.

FD is its end of a socket, CONFIG an :class:`EngineConfig` as JSON. It does what messages say and writes what the engine
gives out; the engine's thread only queues, so a client that is slow cannot hold up a step. It ends when it is told to,
when the other side is gone, or when the engine fails.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import OctavoError
from octavo.runtime.config import EngineConfig
from octavo.runtime.server.messages import Broken, FromEngine, Starting, Stop, for_engine, frame

if TYPE_CHECKING:
    from octavo.runtime.server.served_engine import ServedEngine

_END_SECONDS = 10.0
"""For an engine to end once it has been told to; then the process ends all the same."""


class Outbox:
    """Messages to the HTTP process, written by a thread of its own, as many at once as there are."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="octavo-outbox", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine) -> None:
        """Queue a message; never waits."""
        self._queue.put(message)

    def close(self) -> None:
        """Write what is queued, as far as the other side reads it."""
        self._queue.put(None)
        self._thread.join(_END_SECONDS)

    def _write(self) -> None:
        batch: list[FromEngine | None] = []
        try:
            while None not in batch:
                batch = [self._queue.get()]
                batch += [self._queue.get() for _ in range(self._queue.qsize())]
                self._connection.sendall(frame([message for message in batch if message is not None]))
        except OSError:
            pass  # the other side is gone, which ends the process
        except Exception as error:
            traceback.print_exc()
            with contextlib.suppress(OSError):
                self._connection.sendall(frame([_broken(error)]))
                self._connection.shutdown(socket.SHUT_RDWR)  # as if the other side were gone


class Service:
    """An engine's life, in the main thread; another reads messages and interrupts it when it is to end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._engine: ServedEngine | None = None
        self._main_thread = threading.get_ident()

    def run(self, config: EngineConfig) -> int:
        """Start, serve and end an engine -> exit code."""
        threading.Thread(target=self._read, name="octavo-inbox", daemon=True).start()
        try:
            from octavo.runtime.server.served_engine import ServedEngine  # takes seconds, and may be interrupted

            self._engine = ServedEngine(config, self._progress, self._outbox.put)
            self._outbox.put(self._engine.ready())
            failure = self._engine.wait()
            assert failure is not None, "nobody else closes the engine"
            return self._end(failure)
        except KeyboardInterrupt:
            if self._engine is not None:
                self._engine.close()
            self._outbox.close()
            return 0
        except OctavoError as error:
            return self._end(error)
        except Exception as error:
            traceback.print_exc()
            return self._end(error)

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._outbox.put(Starting(phase=phase, done=done, total=total))

    def _end(self, error: Exception) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already
        broken = _broken(error)
        self._outbox.put(broken)
        self._outbox.close()
        return broken.exit_code

    def _read(self) -> None:
        """Until :class:`Stop`, or until the other side is gone."""
        try:
            with self._connection.makefile("rb") as stream:
                while len(head := stream.read(4)) == 4:
                    for message in for_engine(stream.read(int.from_bytes(head, "little"))):
                        if isinstance(message, Stop):
                            return
                        assert self._engine is not None, "a request before the engine was ready"
                        self._engine.handle(message)
        except Exception as error:
            traceback.print_exc()
            self._outbox.put(_broken(error))
        finally:
            # A step that hangs, or a start that does not hear signals, must not keep the process.
            end = threading.Timer(_END_SECONDS, os._exit, (1,))
            end.daemon = True
            end.start()
            signal.pthread_kill(self._main_thread, signal.SIGINT)


def _broken(error: Exception) -> Broken:
    if isinstance(error, OctavoError):
        return Broken(reason=str(error), exit_code=error.exit_code)
    return Broken(reason=f"{type(error).__name__}: {error}", exit_code=1)


def main(descriptor: str, config: str) -> int:
    """The process -> exit code."""
    # It hears of the end through its socket: whoever signals all processes of the server at once means to drain it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started without
    with socket.socket(fileno=int(descriptor)) as connection:
        return Service(connection).run(EngineConfig(**msgspec.json.decode(config)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
