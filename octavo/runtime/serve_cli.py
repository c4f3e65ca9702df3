"""``octavo serve``: an HTTP server in this process, the engine in another."""

from __future__ import annotations

from octavo.runtime.config import EngineConfig
from octavo.runtime.options import with_options
from octavo.runtime.server.config import ServerConfig


@with_options
def serve_command(engine: EngineConfig, server: ServerConfig) -> None:
    """Answer over HTTP as OpenAI's and Anthropic's APIs do.

    /health answers 200 when it is ready. Ctrl-C or SIGTERM lets requests in work end first; a second one does not.
    """
    from octavo.runtime.server.lifecycle import run_server

    run_server(engine, server)
