"""Two dumps compared in words: what one has and the other has not, and what differs in what both have.

Seconds, bytes of captures, what was found in a cache, and the history of steps are left out: they differ from run to
run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import UsageError
from octavo.graphs.describe import GraphText, NodeText
from octavo.graphs.differences import compare
from octavo.graphs.dump import read_measured, read_report
from octavo.graphs.facts import SCHEMA, Facts
from octavo.graphs.tables import counted, layer_span, ranges, size

_LISTED = 20
"""Groups of names that are listed; more are counted."""
_BUFFER_FIELDS = ("dtype", "shape", "dead_rows")
_PLACES = ("writer", "readers", "life", "storage")
"""Of a buffer, where it stands in the program: numbers that shift with any instruction before."""


def compare_dumps(first: Path, second: Path) -> list[str]:
    """Lines of what differs between the dumps A (``first``) and B (``second``); none if nothing does.

    Each may be a whole dump or the directory of one program. Raises :class:`UsageError` for a path that holds none, or
    one of another version.
    """
    (title_a, programs_a), (title_b, programs_b) = _read(first), _read(second)
    lines = _only("title", title_a, title_b)
    lines += _only("programs", list(programs_a), list(programs_b))
    for name in programs_a:
        if name in programs_b:
            found = _program(programs_a[name], programs_b[name])
            lines += [name, *(f"  {line}" for line in found)] if found else []
    return lines


_Program = tuple[Path, Facts]


def _read(directory: Path) -> tuple[list[str], dict[str, _Program]]:
    report = read_report(directory)
    if report is None or not report["complete"]:
        what = "no graph dump" if report is None else "a dump that was not finished"
        raise UsageError(f"{directory} holds {what}. Name a directory that `octavo graphs dump --out` has written.")
    if report["schema"] != SCHEMA:
        raise UsageError(
            f"{directory} has a report of schema {report['schema']}, and this version reads schema {SCHEMA}. Write the "
            "dump again."
        )
    if "programs" not in report:
        return report["title"], {"program": (directory, report)}
    programs = {}
    for name, path in report["programs"].items():
        _, inner = _read((directory / path).parent)
        programs[name] = inner["program"]
    return report["title"], programs


def _program(a: _Program, b: _Program) -> list[str]:
    """What differs between two programs. Ends with the names of fields that no sentence speaks of."""
    (path_a, one), (path_b, other) = a, b
    lines = [
        _changed(field, one[field], other[field]) for field in ("ranks", "rows", "device") if one[field] != other[field]
    ]
    lines += _instructions(one, other) + _breaks(one, other) + _collectives(one, other)
    measured = [read_measured(path) for path in (path_a, path_b)]
    lines += _regions(one, other, measured)
    lines += _buffers(one, other) + _buckets(one, other) + _captures(measured)
    lines += _mapping("backend of", one["backends"], other["backends"])
    lines += _passes(one, other) + _graphs(path_a, path_b, one, other)
    if not lines and _comparable(one) != _comparable(other):
        fields = [field for field in _comparable(one) | _comparable(other) if one.get(field) != other.get(field)]
        lines = [f"differs in {', '.join(fields)} of report.json"]
    return lines


def _comparable(report: Facts) -> Facts:
    """The hash follows from the rest, and the title of a program is that of its dump."""
    return {key: value for key, value in report.items() if key not in ("plan_hash", "title")}


def _changed(what: str, old: object, new: object) -> str:
    return f"{what}: {old} -> {new}"


def _only(what: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Members that only one has."""
    gone, come = [m for m in old if m not in new], [m for m in new if m not in old]
    lines = [f"{what}, only in A: {'; '.join(gone)}"] if gone else []
    return lines + ([f"{what}, only in B: {'; '.join(come)}"] if come else [])


def _mapping(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return [_changed(f"{what} {name}", old.get(name, "none"), new.get(name, "none")) for name in names]


def _instructions(one: Facts, other: Facts) -> list[str]:
    lines = []
    counts_a, counts_b = (Counter(piece["kind"] for piece in report["pieces"]) for report in (one, other))
    total_a, total_b = len(one["pieces"]), len(other["pieces"])
    if total_a != total_b:
        lines.append(_changed("instructions", total_a, total_b))
    lines += [
        _changed(f"{kind}s", counts_a[kind], counts_b[kind])
        for kind in dict.fromkeys((*counts_a, *counts_b))
        if counts_a[kind] != counts_b[kind]
    ]
    kinds_a, kinds_b = ({kind["digest"]: kind for kind in report["kinds"]} for report in (one, other))
    alone_a = [kind for digest, kind in kinds_a.items() if digest not in kinds_b]
    alone_b = [kind for digest, kind in kinds_b.items() if digest not in kinds_a]
    alike = [kind for kind in alone_a if any(_skeleton(kind) == _skeleton(each) for each in alone_b)]
    if alike:
        names = ", ".join(kind["of"] for kind in alike)
        lines.append(f"kinds with the same operators in the same layers, and other shapes or constants: {names}")
    for side, alone in (("A", alone_a), ("B", alone_b)):
        known = [_skeleton(kind) for kind in alike]
        lines += [f"kind {k['of']}, only in {side}: {_kind(k)}" for k in alone if _skeleton(k) not in known]
    for digest in (digest for digest in kinds_a if digest in kinds_b):
        old, new = kinds_a[digest], kinds_b[digest]
        name = old["of"] if old["of"] == new["of"] else f"{old['of']} (in B {new['of']})"
        lines += [
            _changed(f"kind {name}, {what}", old[what], new[what])
            for what in ("count", "why", "weight_bytes", "pool_bytes")
            if old[what] != new[what]
        ]
        if old["layers"] != new["layers"]:
            lines.append(_changed(f"kind {name}, layers", ranges(old["layers"]), ranges(new["layers"])))
    return lines


def _skeleton(kind: Facts) -> tuple[object, ...]:
    """What is left of a kind without its shapes and constants."""
    return kind["kind"], kind["layers"], kind["count"], kind["operators"]


def _kind(kind: Facts) -> str:
    operators = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in kind["operators"].items())
    where = layer_span(kind["layers"]) if kind["layers"] else "outside of layers"
    return f"{kind['kind']} x {kind['count']}, {where}, {counted(kind['nodes'], 'node')} ({operators}); {kind['why']}"


def _breaks(one: Facts, other: Facts) -> list[str]:
    reasons = [Counter(piece["why"] for piece in r["pieces"] if piece["kind"] == "break") for r in (one, other)]
    changed = [why for why in dict.fromkeys((*reasons[0], *reasons[1])) if reasons[0][why] != reasons[1][why]]
    return [_changed(f"breaks because {why}", reasons[0][why], reasons[1][why]) for why in changed]


def _collectives(one: Facts, other: Facts) -> list[str]:
    counts = [Counter(move["operation"] for move in report["collectives"]) for report in (one, other)]
    lines = [
        _changed(f"collectives that {operation}", counts[0][operation], counts[1][operation])
        for operation in dict.fromkeys((*counts[0], *counts[1]))
        if counts[0][operation] != counts[1][operation]
    ]
    sent = [sum(move["bytes_sent_per_row"] for move in report["collectives"]) for report in (one, other)]
    return lines + ([_changed("a rank sends, a row", size(sent[0]), size(sent[1]))] if sent[0] != sent[1] else [])


_Measured = Sequence[Facts | None]


def _regions(one: Facts, other: Facts, measured: _Measured) -> list[str]:
    """What a compiler would be given; and what it was given, where that is another thing."""
    given = _region_counts(one["regions"], other["regions"])
    lines = [f"regions of {line}" for line in given]
    texts_a, texts_b = ({region["text"]: region["name"] for region in report["regions"]} for report in (one, other))
    alone_a = dict.fromkeys(name for text, name in texts_a.items() if text not in texts_b)
    alone_b = {name for text, name in texts_b.items() if text not in texts_a}
    alike = [name for name in alone_a if name in alone_b]
    lines += [f"regions with other shapes or constants: {', '.join(alike)}"] if alike else []
    old, new = (each["regions"] if each is not None else None for each in measured)
    if old is not None and new is not None:
        compiled = _region_counts(old["kinds"], new["kinds"])
        lines += [f"compiled regions of {line}" for line in compiled if line not in given]
        casts = ["kept" if each["casts_survive"] else "dropped" for each in (old, new)]
        lines += [_changed("BF16 round trips inside a region", *casts)] if casts[0] != casts[1] else []
    elif None not in measured and old is not new:
        lines.append(_changed("compiled", *("nothing" if each is None else "regions" for each in (old, new))))
    return lines


def _region_counts(old: Sequence[Facts], new: Sequence[Facts]) -> list[str]:
    """Kinds of one name are added up: they differ in their shapes."""
    counts_a, counts_b = Counter[str](), Counter[str]()
    for counts, kinds in ((counts_a, old), (counts_b, new)):
        for kind in kinds:
            counts[kind["name"]] += kind["count"]
    names = dict.fromkeys((*counts_a, *counts_b))
    return [_changed(name, counts_a[name], counts_b[name]) for name in names if counts_a[name] != counts_b[name]]


def _captures(measured: _Measured) -> list[str]:
    """How much was captured, and what torch tells about it; nothing that a clock or an allocator says."""
    started = [each for each in measured if each is not None]
    if len(started) < 2:
        return []
    graphs = [sum(capture["segments"] for capture in each["captures"]) for each in started]
    features = [{f["name"]: "found" if f["found"] else "not there" for f in each["features"]} for each in started]
    lines = [_changed("CUDA graphs", *graphs)] if graphs[0] != graphs[1] else []
    return lines + _mapping("feature of torch", *features)


def _buffers(one: Facts, other: Facts) -> list[str]:
    old, new = ({buffer["name"]: buffer for buffer in report["buffers"]} for report in (one, other))
    lines = [_changed("buffers", len(old), len(new))] if len(old) != len(new) else []
    storages = [len(report["storages"]) for report in (one, other)]
    lines += [_changed("storages", *storages)] if storages[0] != storages[1] else []
    rows = [sum(storage["bytes_per_row"] for storage in report["storages"]) for report in (one, other)]
    lines += [_changed("bytes of buffers, a row", *(f"{count:,}" for count in rows))] if rows[0] != rows[1] else []
    lines += _names("buffers, only in A", (name for name in old if name not in new))
    lines += _names("buffers, only in B", (name for name in new if name not in old))
    both = [name for name in old if name in new]
    changes: dict[str, list[str]] = defaultdict(list)
    for name in both:
        for field in _BUFFER_FIELDS:
            if old[name][field] != new[name][field]:
                changes[_changed(field.replace("_", " "), old[name][field], new[name][field])].append(name)
    for change, names in changes.items():
        lines += _names(f"buffers with another {change}", names)
    moved = [name for name in both if any(old[name][place] != new[name][place] for place in _PLACES)]
    if moved:
        lines.append(f"{counted(len(moved), 'buffer')} of both with another writer, reader or storage")
    return lines


def _names(what: str, names: Iterable[str]) -> list[str]:
    """Names with their layers taken together: ``L*.attend (layers 0-3)``."""
    groups: dict[str, list[int]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"^L\d+\.", "L*.", name)].extend(_layer_of(name))
    if not groups:
        return []
    shown = [f"{name} ({layer_span(layers)})" if layers else name for name, layers in groups.items()][:_LISTED]
    return [f"{what}: {', '.join(shown)}" + (f", and {len(groups) - _LISTED} more" if len(groups) > _LISTED else "")]


def _layer_of(name: str) -> list[int]:
    found = re.match(r"(?:L|layers\.)(\d+)\.", name)
    return [int(found[1])] if found else []


def _buckets(one: Facts, other: Facts) -> list[str]:
    old, new = ({bucket["rows"]: bucket for bucket in report["buckets"]} for report in (one, other))
    lines = _only("buckets", [f"{rows:,}" for rows in old], [f"{rows:,}" for rows in new])
    both = [rows for rows in old if rows in new]
    for field, what in (
        ("buffer_bytes", "buffers"),
        ("collective_bytes_sent_per_rank", "sent by a rank"),
        ("most_padding_rows", "most rows of padding"),
    ):
        changed = [rows for rows in both if old[rows][field] != new[rows][field]]
        if changed:
            top = changed[-1]
            shown = [f"{r[top][field]:,}" if field == "most_padding_rows" else size(r[top][field]) for r in (old, new)]
            lines.append(_changed(f"{what} in the bucket of {top:,} rows", *shown) + _and_others(len(changed) - 1))
    return lines


def _and_others(count: int) -> str:
    return f"; {counted(count, 'other bucket')} likewise" if count else ""


def _passes(one: Facts, other: Facts) -> list[str]:
    old, new = ({entry["name"]: entry for entry in report["passes"]} for report in (one, other))
    lines = _only("passes", list(old), list(new))
    for name in (name for name in old if name in new):
        if old[name]["difference"] != new[name]["difference"]:
            lines.append(_changed(f"pass {name} did", old[name]["difference"], new[name]["difference"]))
        if old[name]["notes"] != new[name]["notes"]:
            lines.append(
                _changed(f"pass {name} noted", *("; ".join(e[name]["notes"]) or "nothing" for e in (old, new)))
            )
    return lines


def _graphs(path_a: Path, path_b: Path, one: Facts, other: Facts) -> list[str]:
    """Nodes of the graphs: the first pass after which they differ, and what differs after the last that both have."""
    old, new = ({entry["name"]: entry["file"] for entry in report["passes"]} for report in (one, other))
    differences = {}
    for name in (name for name in old if name in new):
        file_a, file_b = path_a / old[name], path_b / new[name]
        if file_a.is_file() and file_b.is_file() and file_a.read_bytes() != file_b.read_bytes():
            differences[name] = compare(read_graph(file_a), read_graph(file_b))
    apart = [name for name, each in differences.items() if each.added or each.removed or each.changed or each.moved]
    if not apart:
        return []
    last = differences[apart[-1]]
    described = last.lines()
    words = [f"  {line}" for line in described[1 : described.index("text: what is computed, line by line")] if line]
    return [f"graphs differ from pass {apart[0]} on; after {apart[-1]}: {last.summary()}", *words]


_INPUT = re.compile(r"  (\S+) +(\S+) +(.+?)(?:    # (.*))?$")
_CALL = re.compile(r"  (\S+) = (\w+)\((.*)\) -> (.+?)(?:    # (.*))?$")


def read_graph(file: Path) -> GraphText:
    """The graph that a dump shows after a pass, read back from its text; numbers of pieces are left out."""
    inputs: list[NodeText] = []
    calls: list[NodeText] = []
    results: tuple[str, ...] = ()
    open_call = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if open_call or line.endswith("("):
            open_call = f"{open_call} {line.strip()}" if open_call else line
            if not line.startswith("  ) -> "):
                continue
            line, open_call = open_call.replace("( ", "(", 1).replace(", ) -> ", ") -> "), ""
        if found := _CALL.match(line):
            name, operation, arguments, shapes, notes = found.groups()
            calls.append(_node(name, operation, tuple(_arguments(arguments)), shapes, notes))
        elif not calls and (found := _INPUT.match(line)):
            name, kind, shapes, notes = found.groups()
            inputs.append(_node(name, kind, (), shapes, notes))
        elif line.startswith("return "):
            results = tuple(line.removeprefix("return ").split(", "))
    return GraphText(tuple(inputs), tuple(calls), results, {})


def _node(name: str, operation: str, arguments: tuple[str, ...], shapes: str, notes: str | None) -> NodeText:
    pairs = [tuple(note.split(" ", 1)) for note in (notes or "").split("; ") if note]
    kept = tuple((key, value) for key, value in pairs if key != "piece")
    layers = _layer_of(name)
    return NodeText(name, operation, arguments, shapes, layers[0] if layers else None, kept)


def _arguments(text: str) -> Iterable[str]:
    """``a=x, b=[y, z]`` -> its arguments: commas within brackets separate none."""
    depth, begin = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()
