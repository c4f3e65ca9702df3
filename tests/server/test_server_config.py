"""What a server may be started with."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.runtime.config import EngineConfig
from octavo.runtime.model_source import served_name
from octavo.runtime.server.config import ServerConfig
from octavo.runtime.server.lifecycle import listen


def test_it_is_for_this_machine_alone_unless_told_otherwise() -> None:
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "--port 70000: must be from 0 to 65535"),
        ({"max_queue": -1}, "--max-queue -1"),
        ({"max_n": 65}, "--max-n 65: must be from 1 to 64"),
        ({"request_timeout": 0.0}, "--request-timeout 0"),
        ({"drain_seconds": float("nan")}, "--drain-seconds nan"),
        ({"api_key": ("",)}, "--api-key"),
        ({"api_key": ("two\nlines",)}, "--api-key"),
        ({"api_key_file": Path("nowhere")}, "--api-key-file nowhere: cannot be read"),
    ],
)
def test_what_no_server_can_have_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServerConfig(**values)


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n")
    config = ServerConfig(api_key=("given",), api_key_file=file)
    assert config.api_key == ("given", "first", "second")
    file.write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        ServerConfig(api_key_file=file)


def test_keys_of_a_pipe() -> None:
    """Which can be read once."""
    ours, theirs = os.pipe()
    os.write(theirs, b"first\n")
    os.close(theirs)
    assert ServerConfig(api_key_file=Path(f"/dev/fd/{ours}")).api_key == ("first",)
    os.close(ours)


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError, match="cannot listen there"):
        listen(*taken.getsockname())
    with pytest.raises(UsageError, match="--host 203"):
        listen("203.0.113.1", 0)  # an address of nobody


def test_other_families_of_addresses() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with listen("::1", 0) as listener:
            assert listener.family == socket.AF_INET6
    except UsageError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (EngineConfig(), "octavo-nano"),
        (EngineConfig(model=Path("/models/DeepSeek-V4.1-Flash/")), "DeepSeek-V4.1-Flash"),
        (EngineConfig(weights="random", preset="mini"), "mini"),
    ],
)
def test_name_under_which_a_model_is_served(config: EngineConfig, name: str) -> None:
    assert served_name(config) == name
