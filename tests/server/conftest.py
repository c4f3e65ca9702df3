"""A server over a stub, shared by all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import Served, serve


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    with serve(heartbeat_seconds=0.1, max_schema_bytes=1000, max_n=4) as served:
        yield served


@pytest.fixture
def server(module_server: Served) -> Iterator[Served]:
    """With an engine that was just made; it has nothing to do at the end of a test."""
    module_server.stub.reset()
    yield module_server
    module_server.wait_until_free()
