"""A directory that shows what became of a step's graphs: before and after each pass, and the programs that came out.

It holds an overview and a directory for each program. It is claimed before any work starts. Everything in it is a
function of the model, the options and the versions, except ``timings.json`` and ``report.html``, the page that shows
them; so two dumps can be compared with ``diff -r``, or in words with ``octavo graphs diff``. An engine's dump also has
what its start measured: ``measured.json``, and the pages ``regions.md`` and ``buckets.md`` that tell it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.errors import OctavoError, UsageError
from octavo.graphs import pages
from octavo.graphs.describe import GraphText, describe
from octavo.graphs.differences import Difference, compare
from octavo.graphs.facts import GENERATOR, SCHEMA, Facts, facts_of
from octavo.graphs.program_text import program_text
from octavo.graphs.report_page import LAST_STEPS, report_page
from octavo.passes.base import Compilation, Pass, PassContext
from octavo.passes.runner import PassResult

REPORT = "report.json"
MEASURED = "measured.json"
"""What a start measured of a program, beside its report; only an engine has that."""
_PAGES = ("index.md", "pieces.md", "buffers.md", "buckets.md", "collectives.md", "regions.md")
_OTHER_FILES = ("program.py.txt", "timings.json", MEASURED)
REPLAY_LOG = "replay.jsonl"
"""Where an engine writes a line for every step, beside the overview."""
PAGE = "report.html"
"""The dump as one page to look at, beside the overview."""
BODY, PRELUDE, EPILOGUE = "body", "prelude", "epilogue"
_PROGRAMS = (
    BODY,
    PRELUDE,
    EPILOGUE,
    *(f"{part}-{placement}" for part in (BODY, PRELUDE) for placement in ("sharded", "replicated")),
)
"""Directories of programs in a dump: of one rank, and of several."""


def claim(directory: Path) -> None:
    """Make ``directory`` an empty dump: create it, or replace the dump that it holds.

    Raises :class:`UsageError` if it cannot be written, or holds something else.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        foreign = any(directory.iterdir()) and not _is_dump(directory)
        programs = [directory / name for name in _PROGRAMS]
        if foreign or any(p.exists() and any(p.iterdir()) and not _is_dump(p) for p in programs):
            raise UsageError(
                f"{directory} is not empty and holds no graph dump ({REPORT} of `{GENERATOR}`). "
                "Name a new or empty directory, or one that a dump was written to."
            )
        _write_json(directory / REPORT, {"schema": SCHEMA, "generator": GENERATOR, "complete": False})
        for program in programs:
            if _is_dump(program):
                _empty(program)
                (program / REPORT).unlink()
                program.rmdir()
        _empty(directory)
        for file in (REPLAY_LOG, PAGE):
            (directory / file).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be written: {error.strerror or error}. Name a directory that can be made or written."
        ) from error


def _empty(directory: Path) -> None:
    """Remove what a dump wrote, but its report."""
    for file in (*_PAGES, *_OTHER_FILES):
        (directory / file).unlink(missing_ok=True)
    if (directory / "passes").is_dir():
        for text in (directory / "passes").glob("[0-9][0-9]_*.txt"):
            text.unlink()
        (directory / "passes").rmdir()


def read_measured(directory: Path) -> Facts | None:
    """What a start measured of one program, or None where none did."""
    file = directory / MEASURED
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _is_dump(directory: Path) -> bool:
    return read_report(directory) is not None


def read_report(directory: Path) -> Facts | None:
    """The report of a dump or of one of its programs, finished or not; None where there is none."""
    try:
        report = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and report.get("generator") == GENERATOR else None


class DumpWriter:
    """Writes one program. Call :meth:`captured`, pass :meth:`after` to ``run_passes``, end with :meth:`finish`."""

    def __init__(self, directory: Path) -> None:
        """Claims the directory. Raises :class:`UsageError` for one that cannot be used."""
        claim(directory)
        self._directory = directory
        self._stages: list[tuple[str, GraphText, Difference | None]] = []

    def captured(self, compilation: Compilation) -> None:
        """Note the graph before the first pass."""
        self._stages.append(("captured", describe(compilation), None))

    def after(self, each: Pass, compilation: Compilation) -> None:
        """Note the graph behind a pass."""
        assert self._stages, "captured() comes first"
        text = describe(compilation)
        self._stages.append((each.name, text, compare(self._stages[-1][1], text)))

    def finish(
        self,
        compilation: Compilation,
        context: PassContext,
        buckets: Sequence[int],
        results: Sequence[PassResult],
        title: Sequence[str] = (),
        timeline: Mapping[str, float] | None = None,
        measured: Facts | None = None,
    ) -> Facts:
        """Write everything -> the report. ``title`` says what the model is; ``timeline`` holds seconds by phase,
        ``measured`` what a start measured (:mod:`octavo.graphs.measured`).

        Raises :class:`OctavoError` if writing fails after all, such as on a full disk.
        """
        report = self._report(compilation, context, buckets, results, title)
        program = program_text(compilation, report, GENERATOR)
        seconds = dict(timeline or {}) | {f"pass {result.name}": result.seconds for result in results}
        try:
            (self._directory / "passes").mkdir(exist_ok=True)
            for entry, (_, text, difference) in zip(report["passes"], self._stages, strict=True):
                heading = [f"The graph after {entry['name']}. r: rows on this rank.", ""]
                self._write(entry["file"], [*heading, *text.annotated()])
                if difference is not None:
                    self._write(entry["diff"], [f"What {entry['name']} did.", "", *difference.lines()])
            for file, page in _pages(report, measured).items():
                self._write(file, page)
            self._write("program.py.txt", program)
            _write_json(self._directory / "timings.json", {name: round(value, 4) for name, value in seconds.items()})
            if measured is not None:
                _write_json(self._directory / MEASURED, measured)
            _write_json(self._directory / REPORT, report)
        except OSError as error:
            raise OctavoError(f"the dump in {self._directory} is incomplete: {error}") from error
        return report

    def _report(
        self,
        compilation: Compilation,
        context: PassContext,
        buckets: Sequence[int],
        results: Sequence[PassResult],
        title: Sequence[str],
    ) -> Facts:
        by_name = {result.name: result.report for result in results}
        passes = []
        for number, (name, text, difference) in enumerate(self._stages):
            done = by_name.get(name)
            stem = f"passes/{number:02}_{name}"
            passes.append(
                {
                    "number": number,
                    "name": name,
                    "nodes": len(text.nodes),
                    "judged": done.matched if done else 0,
                    "added": len(difference.added) if difference else 0,
                    "removed": len(difference.removed) if difference else 0,
                    "difference": difference.summary() if difference else "-",
                    "notes": list(done.notes) if done else [],
                    "file": f"{stem}.txt",
                    "diff": f"{stem}.diff.txt" if difference else None,
                }
            )
        head = {"schema": SCHEMA, "generator": GENERATOR, "complete": True, "title": list(title), "passes": passes}
        return head | facts_of(compilation, context, buckets)

    def _write(self, file: str, lines: Sequence[str]) -> None:
        (self._directory / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pages(report: Facts, measured: Facts | None) -> dict[str, list[str]]:
    """Lines by file."""
    written = {
        "index.md": pages.index_page(report, measured),
        "pieces.md": pages.pieces_page(report),
        "buffers.md": pages.buffers_page(report),
        "buckets.md": pages.buckets_page(report, measured),
        "collectives.md": pages.collectives_page(report),
    }
    return written if measured is None else written | {"regions.md": pages.regions_page(report, measured)}


def write_overview(directory: Path, title: Sequence[str], programs: Mapping[str, Facts]) -> None:
    """Index, report and page of a claimed directory whose subdirectories hold ``programs``, by name."""
    try:
        (directory / "index.md").write_text(
            "\n".join(pages.overview_page(title, dict(programs))) + "\n", encoding="utf-8"
        )
        report = {
            "schema": SCHEMA,
            "generator": GENERATOR,
            "complete": True,
            "title": list(title),
            "programs": {name: f"{name}/{REPORT}" for name in programs},
        }
        _write_json(directory / REPORT, report)
        write_page(directory)
    except OSError as error:
        raise OctavoError(f"the dump in {directory} is incomplete: {error}") from error


def write_page(directory: Path) -> None:
    """``report.html`` from what stands in a finished dump, with the log of steps if an engine has written one.

    Raises :class:`OSError` if a file of the dump is gone or the page cannot be written.
    """
    overview = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    programs, timings, differences, measured = {}, {}, {}, {}
    for name, path in overview["programs"].items():
        program = (directory / path).parent
        programs[name] = report = json.loads((directory / path).read_text(encoding="utf-8"))
        timings[name] = json.loads((program / "timings.json").read_text(encoding="utf-8"))
        measured[name] = read_measured(program)
        differences[name] = {
            entry["name"]: (program / entry["diff"]).read_text(encoding="utf-8")
            for entry in report["passes"]
            if entry["diff"]
        }
    steps = _last_steps(directory / REPLAY_LOG)
    page = report_page(overview["title"], programs, timings, steps, differences, measured)
    (directory / PAGE).write_text(page, encoding="utf-8")


def _last_steps(log: Path) -> list[Facts]:
    if not log.is_file():
        return []
    with log.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in deque(lines, maxlen=LAST_STEPS)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
