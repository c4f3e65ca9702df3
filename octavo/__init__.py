"""Octavo serves DeepSeek-V4.1 from a compiler's graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from octavo.errors import OctavoError, UsageError
    from octavo.runtime.async_engine import AsyncEngine
    from octavo.runtime.config import EngineConfig
    from octavo.runtime.engine import Engine, Result
    from octavo.runtime.loop import EngineFailure
    from octavo.runtime.request import Answer, Delta
    from octavo.runtime.sampling import SamplingParams

__all__ = [
    "Answer",
    "AsyncEngine",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineFailure",
    "OctavoError",
    "Result",
    "SamplingParams",
    "UsageError",
    "__version__",
]

_HOMES = {
    "Answer": "octavo.runtime.request",
    "AsyncEngine": "octavo.runtime.async_engine",
    "Delta": "octavo.runtime.request",
    "Engine": "octavo.runtime.engine",
    "EngineConfig": "octavo.runtime.config",
    "EngineFailure": "octavo.runtime.loop",
    "OctavoError": "octavo.errors",
    "Result": "octavo.runtime.engine",
    "SamplingParams": "octavo.runtime.sampling",
    "UsageError": "octavo.errors",
}


def __getattr__(name: str) -> object:
    """Public names are imported when they are used: ``octavo --help`` and the HTTP layer do without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
