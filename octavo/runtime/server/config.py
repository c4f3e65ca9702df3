"""What the HTTP server is started with; the command line is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UsageError
from octavo.runtime.config import option
from octavo.runtime.sampling import MAX_ANSWERS


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where the server listens, who may ask, and how much at most.

    Raises :class:`UsageError` for values that no server can have.
    """

    host: str = option(
        "Address to listen on. The default is for this machine alone; 0.0.0.0 is for everyone.", "127.0.0.1"
    )
    port: int = option("Port to listen on; 0 takes a free one, which is printed.", 8000)
    api_key: tuple[str, ...] = option("Key that requests must bring; may be given several times. Default: none.", ())
    api_key_file: Path | None = option(
        "File with further keys, one a line; a command line can be seen by others.", None
    )
    served_model_name: str | None = option(
        "Name of the model in requests and answers. Default: the checkpoint's folder, or octavo-nano.", None
    )
    max_queue: int = option("Answers that may wait when all --max-requests are in work; more are sent away.", 1024)
    max_body_bytes: int = option("Largest body of a request.", 16 << 20)
    max_header_bytes: int = option("Largest header of a request, all lines together.", 32 << 10)
    max_schema_bytes: int = option("Largest schema or regular expression that an answer must match.", 64 << 10)
    max_n: int = option("Most answers to one request.", 16)
    default_max_tokens: int | None = option(
        "Most tokens of an answer if the request does not say. Default: what fits; 16 in /v1/completions.", None
    )
    request_timeout: float = option("Seconds after which an answer ends as it is; a request may ask for less.", 3600.0)
    heartbeat_seconds: float = option(
        "Seconds of silence after which a stream sends a comment, so that it stays.", 10.0
    )
    drain_seconds: float = option("Seconds that requests in work have to end when the server is told to stop.", 30.0)
    log_prompts: bool = option("Write the text of prompts to the log of requests.", False)

    def __post_init__(self) -> None:
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", self.api_key + _keys(self.api_key_file))
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_key):
            raise UsageError("--api-key: must be printable ASCII, at least one character")
        self._check("port", 0, 65535)
        self._check("max_queue", 0, 1 << 20)
        self._check("max_body_bytes", 1 << 10, 1 << 29)
        self._check("max_header_bytes", 1 << 10, 1 << 20)
        self._check("max_schema_bytes", 1, 1 << 24)
        self._check("max_n", 1, MAX_ANSWERS)
        self._check("default_max_tokens", 1, 1 << 30)
        self._check("request_timeout", 0.001, 1e9)
        self._check("heartbeat_seconds", 0.01, 3600)
        self._check("drain_seconds", 0, 1e9)

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be from {low:g} to {high:g}")


def _keys(file: Path) -> tuple[str, ...]:
    """The lines of a file of keys that are not empty."""
    try:
        keys = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file}: cannot be read ({error})") from error
    if not keys:
        raise UsageError(f"--api-key-file {file}: holds no key; write one a line")
    return keys
