"""``report.html``: a dump as one page to look at, which needs nothing but a browser.

The facts travel in it as JSON; the scripts in ``data/`` draw them. Everything is inlined: the page asks for no other
file and no network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from octavo.graphs.facts import Facts

_DATA = Path(__file__).parent / "data"
_STYLE = "report.css"
_SCRIPTS = ("report.js", "report_charts.js", "report_regions.js", "report_start.js")
"""In the order in which they run."""

LAST_STEPS = 2000
"""Steps of the replay history that a page shows."""


def report_page(
    title: Sequence[str],
    programs: Mapping[str, Facts],
    timings: Mapping[str, Mapping[str, float]],
    replays: Sequence[Mapping[str, object]] = (),
    differences: Mapping[str, Mapping[str, str]] | None = None,
    measured: Mapping[str, Facts | None] | None = None,
) -> str:
    """The page of a dump.

    Args:
        title: what the model is, in lines.
        programs: reports by program.
        timings: seconds by phase, by program.
        replays: lines of an engine's log of steps, oldest first; the last :data:`LAST_STEPS` of them are shown.
        differences: what each pass did, by program and name of the pass.
        measured: what a start measured, by program; None for what was not started.
    """
    island = {
        "title": list(title),
        "programs": {name: _without_aliases(report) for name, report in programs.items()},
        "timings": timings,
        "replays": list(replays[-LAST_STEPS:]),
        "differences": differences or {},
        "measured": measured or {},
    }
    parts = {
        "title": escape(title[0] if title else "Graph dump"),
        "style": _text(_STYLE),
        "facts": script_json(island),
        "script": "\n".join(_text(name) for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("report.html"))


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it ends the element or begins a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _without_aliases(report: Facts) -> Facts:
    """Storages name their buffers already; with hundreds of buffers in a storage, aliases are most of the report."""
    buffers = [{key: value for key, value in buffer.items() if key != "aliases"} for buffer in report["buffers"]]
    return report | {"buffers": buffers}


def _text(name: str) -> str:
    return (_DATA / name).read_text(encoding="utf-8")
