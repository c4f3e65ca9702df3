"""The pages of a dump, written from its facts, so that no page can say anything else than the report.

``measured`` is what a start measured (:mod:`octavo.graphs.measured`), or None where nothing was started.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from octavo.graphs.facts import GENERATOR, Facts
from octavo.graphs.tables import counted, layer_span, ranges, size, table

_PLACEMENTS = {
    "whole": "one rank: every row is here",
    "sharded": "rows are dealt over the ranks (prefill and mixed steps)",
    "replicated": "every rank has all rows (decode steps, and steps of fewer rows than ranks)",
}


def index_page(report: Facts, measured: Facts | None = None) -> list[str]:
    """What to read first."""
    kinds, buckets = report["kinds"], report["buckets"]
    by_kind: dict[str, int] = defaultdict(int)
    for kind in kinds:
        by_kind[kind["kind"]] += kind["count"]
    instructions = ", ".join(counted(count, kind) for kind, count in by_kind.items())
    top = buckets[-1]
    unshared = sum(buffer["bytes_per_row"] for buffer in report["buffers"])
    shared = sum(storage["bytes_per_row"] for storage in report["storages"])
    passes = [
        (
            f"{entry['number']:02}",
            entry["name"],
            entry["nodes"],
            entry["difference"],
            "; ".join(entry["notes"]),
            f"[graph]({entry['file']})" + (f" [diff]({entry['diff']})" if entry["diff"] else ""),
        )
        for entry in report["passes"]
    ]
    return [
        "# Graph dump",
        "",
        *(f"{line}  " for line in report["title"]),
        f"{counted(report['ranks'], 'rank')} on {report['device']}; {_PLACEMENTS[report['rows']]}",
        "",
        f"A step is **{counted(sum(by_kind.values()), 'instruction')} of {counted(len(kinds), 'kind')}**: "
        f"{instructions}.  ",
        f"They work on {len(report['buffers'])} static buffers that share {len(report['storages'])} storages: "
        f"{size(shared)} a row instead of {size(unshared)}, {size(top['buffer_bytes'])} in all.  ",
        f"Programs are ready for {len(buckets)} row counts up to {top['rows']:,} rows on a rank.  ",
        f"{_region_line(report, measured)}  ",
        _collective_line(report),
        "",
        "| page | answers |",
        "| ---- | ------- |",
        "| [pieces.md](pieces.md) | what is captured as one, why each boundary is there, what crosses it; regions |",
        "| [buffers.md](buffers.md) | who writes and reads each static buffer, its life, its neighbours, its padding |",
        "| [buckets.md](buckets.md) | which row counts are prepared, and what each costs |",
        "| [collectives.md](collectives.md) | what moves between ranks, for whom, and how many bytes |",
        "| [program.py.txt](program.py.txt) | the whole step as Python |",
        "| [report.json](report.json) | the same facts for programs |",
        *_measured_lines(measured),
        "",
        "`L3.mhc_mix.2` is the second `mhc_mix` of layer 3, `L3.mhc_mix[1]` the second result of its first; inputs "
        "and weights go by their paths. `L*` stands for the layer. r: rows on a rank; b: rows of a bucket.",
        "",
        "## Passes",
        "",
        "Nodes are inputs and calls; `+` added, `-` removed, changed: computes something else, annotated: a pass wrote "
        "down what it learned.",
        "",
        *table(("no", "pass", "nodes", "what it did", "notes", "files"), passes, right="nodes"),
        "",
        "## Pieces",
        "",
        *_kinds_table(kinds),
        "",
        f"Plan hash {report['plan_hash']}: equal on all ranks, or they would not fit together.",
    ]


def _measured_lines(measured: Facts | None) -> list[str]:
    """Of the table of pages: what differs from run to run."""
    if measured is None:
        return ["| [timings.json](timings.json) | seconds of this dump; the only file that differs from run to run |"]
    return [
        "| [regions.md](regions.md) | what was compiled, how long it took, and what this torch can do |",
        "| [measured.json](measured.json) | what this start measured, as buckets.md and regions.md tell it |",
        "| [timings.json](timings.json) | seconds by phase; what was measured differs from start to start |",
    ]


def _region_line(report: Facts, measured: Facts | None) -> str:
    regions = report["regions"]
    if not regions:
        return _no_regions(report)
    count = sum(region["count"] for region in regions)
    line = f"{counted(count, 'region')} of {counted(len(regions), 'kind')}: operators whose insides may be fused"
    if measured is None:
        return f"{line}."
    return f"{line}; {'none is' if measured['regions'] is None else 'they are'} compiled."


def _no_regions(report: Facts) -> str:
    if set(report["backends"].values()) == {"reference"}:
        return "No regions: all backends are reference, defined to the bit, which no compiler keeps."
    return "No regions: no operator here has a backend whose insides may be fused."


def _collective_line(report: Facts) -> str:
    moves = report["collectives"]
    if not moves:
        return "No rows move between ranks."
    sent = report["buckets"][-1]["collective_bytes_sent_per_rank"]
    return f"{len(moves)} collectives send {size(sent)} from each rank in the largest bucket."


def _kinds_table(kinds: Sequence[Facts]) -> list[str]:
    rows = [
        (
            kind["of"],
            kind["kind"],
            f"x {kind['count']}",
            ranges(kind["layers"]),
            kind["nodes"],
            f"{size(kind['buffer_bytes_in_per_row'])} -> {size(kind['buffer_bytes_out_per_row'])}",
            size(kind["weight_bytes"]),
            _without_layer(kind["why"]) if kind["count"] > 1 else kind["why"],
        )
        for kind in kinds
    ]
    headings = ("kind", "is a", "count", "layers", "nodes", "bytes a row", "weights", "why")
    return table(headings, rows, right="count|nodes|bytes a row|weights")


def _without_layer(text: str) -> str:
    return re.sub(r"\bL\d+\.", "L*.", text)


def pieces_page(report: Facts) -> list[str]:
    lines = [
        "# Pieces",
        "",
        "A step runs these in order. Segments are captured as one; breaks are called, since they cannot be captured; "
        "collectives move rows between ranks. Pieces that do the same are one kind, checked once.",
        "",
        "## Kinds",
        "",
        *_kinds_table(report["kinds"]),
    ]
    first = {piece["number"]: piece for piece in report["pieces"]}
    for kind in report["kinds"]:
        piece = first[kind["pieces"][0]]
        operators = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in kind["operators"].items())
        lines += [
            "",
            f"### {kind['of']}: {kind['kind']} x {kind['count']}",
            "",
            f"* {layer_span(kind['layers'])}; pieces {ranges(kind['pieces'])}; digest {kind['digest']}",
            f"* why: {kind['why']}",
            f"* {counted(kind['nodes'], 'node')}: {operators}",
            *_regions_of(kind),
            f"* is given weights {size(kind['weight_bytes'])}, pools {size(kind['pool_bytes'])}, and "
            f"{size(kind['buffer_bytes_in_per_row'])} a row of buffers; "
            f"writes {size(kind['buffer_bytes_out_per_row'])} a row",
        ]
        for provenance in ("buffer", "weight", "constant", "pool", "live"):
            found = [operand["name"] for operand in piece["inputs"] if operand["from"] == provenance]
            if found:
                lines.append(f"* from {provenance}: {', '.join(found)}")
        if piece["writes"]:
            lines.append(f"* writes: {', '.join(piece['writes'])}")
        if piece["updates"]:
            lines.append(f"* updates in place: {', '.join(piece['updates'])}")
    rows = [
        (piece["number"], piece["of"], piece["kind"], ranges(piece["layers"]), piece["why"])
        for piece in report["pieces"]
    ]
    lines += ["", "## Regions", "", *_regions_table(report)]
    return [*lines, "", "## In order", "", *table(("no", "kind", "is a", "layers", "why"), rows, right="no")]


def _regions_of(kind: Facts) -> list[str]:
    counts = Counter(call["region"] for call in kind["calls"] if "region" in call)
    names = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items())
    return [f"* regions: {names}"] if names else []


def _regions_table(report: Facts) -> list[str]:
    if not report["regions"]:
        return [_no_regions(report)]
    rows = [(r["of"], r["name"], f"x {r['count']}", ranges(r["layers"])) for r in report["regions"]]
    return [
        "What a compiler would be given: calls of operators whose insides may be fused. Equal ones are one kind.",
        "",
        *table(("kind", "operator and backend", "count", "layers"), rows, right="count"),
    ]


def buffers_page(report: Facts) -> list[str]:
    groups: dict[tuple[str, ...], list[Facts]] = defaultdict(list)
    for buffer in report["buffers"]:
        key = (_without_layer(buffer["name"]), buffer["dtype"], buffer["shape"], buffer["dead_rows"])
        groups[key].append(buffer)
    kinds = [
        (name, f"{dtype}{shape}", f"x {len(members)}", size(members[0]["bytes_per_row"]), dead)
        for (name, dtype, shape, dead), members in groups.items()
    ]
    storages = [
        (s["storage"], size(s["bytes_per_row"]), len(s["buffers"]), _shortened(s["buffers"]))
        for s in report["storages"]
    ]
    every = [
        (
            buffer["name"],
            f"{buffer['dtype']}{buffer['shape']}",
            size(buffer["bytes_per_row"]),
            buffer["writer"],
            _readers(buffer),
            _life(buffer, len(report["pieces"])),
            buffer["storage"],
            len(buffer["aliases"]),
            buffer["dead_rows"],
        )
        for buffer in report["buffers"]
    ]
    headings = ("buffer", "shape", "a row", "writer", "readers", "life", "storage", "aliases", "dead rows")
    return [
        "# Buffers",
        "",
        "Every value that crosses from one piece into another lies in a static buffer: allocated once at the largest "
        "bucket, so its address never changes, and sliced for the others. b is the bucket's row count. One piece "
        "writes it; buffers of one storage have disjoint lives.",
        "",
        "Dead rows are the bucket's padding. `zero` and `minus one`: the writer's contract says so. `carried`: a "
        "function of the dead input row, which no live row ever reads. `filled with`: what a step's inputs bring.",
        "",
        "## Kinds",
        "",
        *table(("buffer", "shape", "count", "a row", "dead rows"), kinds, right="count|a row"),
        "",
        "## Storages",
        "",
        *table(("storage", "a row", "buffers", "which, in the order of their lives"), storages, right="a row|buffers"),
        "",
        "## All",
        "",
        "Writers and readers are pieces.",
        "",
        *table(headings, every, right="a row|storage|aliases"),
    ]


def _readers(buffer: Facts) -> str:
    pieces = [reader for reader in buffer["readers"] if reader != "result"]
    return ", ".join([ranges(pieces)] * bool(pieces) + ["result"] * ("result" in buffer["readers"]))


def _life(buffer: Facts, end: int) -> str:
    first, last = buffer["life"]
    return f"{'start' if first < 0 else first} to {'end' if last >= end else last}"


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, ... {names[-1]}"


def buckets_page(report: Facts, measured: Facts | None = None) -> list[str]:
    ranks = report["ranks"] if report["rows"] == "sharded" else 1
    captures = {capture["rows"]: capture for capture in measured["captures"]} if measured is not None else {}
    rows: list[tuple[object, ...]] = [
        (
            f"{bucket['rows']:,}",
            f"{bucket['rows'] * ranks:,}",
            bucket["most_padding_rows"],
            f"{bucket['most_padding_rows'] / bucket['rows']:.1%}",
            size(bucket["buffer_bytes"]),
            size(bucket["collective_bytes_sent_per_rank"]),
            *(_captured(captures[bucket["rows"]]) if captures else ()),
        )
        for bucket in report["buckets"]
    ]
    headings = ["rows on a rank", "rows of a step", "padding at most", "share", "buffers", "sent by a rank"]
    headings += ["captured in", "pool grew by", "graphs take"] if captures else []
    return [
        "# Buckets",
        "",
        "A step takes the smallest bucket that holds its rows; the rest of the bucket is padding. Buffers are slices "
        "of one allocation, as large as the last line says.",
        *(_capture_lines(measured["captures"]) if measured is not None else ()),
        "",
        *table(headings, rows, right="|".join(headings)),
    ]


def _captured(capture: Facts) -> tuple[str, str, str]:
    return f"{capture['seconds']:.2f} s", size(capture["pool_bytes"]), size(capture["graph_bytes"])


def _capture_lines(captures: Sequence[Facts]) -> list[str]:
    if not captures:
        return ["", "Nothing is captured: without CUDA graphs a replay calls the same pieces on the same buffers."]
    seconds, pool, graphs = (sum(c[key] for c in captures) for key in ("seconds", "pool_bytes", "graph_bytes"))
    return [
        "",
        f"A bucket is {counted(captures[0]['segments'], 'CUDA graph')}, one for each segment. All of them took "
        f"{seconds:.1f} s, {size(pool)} of the pool that all programs share, and {size(graphs)} of their own. The "
        "largest bucket is captured first, and the temporaries of smaller ones fit into what it left in the pool.",
    ]


def regions_page(report: Facts, measured: Facts) -> list[str]:
    """What was compiled at this start, and what newer versions of torch would bring."""
    regions, compiled = {region["text"]: region for region in report["regions"]}, measured["regions"]
    kinds = compiled["kinds"] if compiled is not None else []
    if not regions:
        told = [_no_regions(report)]
    elif compiled is None:
        told = ["Nothing is compiled (`--compile none`): operators run as they are."]
    else:
        told = _compiled_lines(regions, compiled)
    features = [(f["name"], "found" if f["found"] else "not there", f["use"]) for f in measured["features"]]
    lines = [
        "# Compiled regions",
        "",
        "A region is a call of an operator whose insides Inductor may fuse. Equal ones are one kind, compiled once for "
        "all row counts.",
        "",
        *told,
        "",
        "## Features of torch",
        "",
        "What newer versions tell about CUDA graphs. Each is used where it is found, and nothing depends on it.",
        "",
        *table(("feature", "in this torch", "with it"), features),
    ]
    if kinds:
        lines += ["", "## What makes the kinds"]
    for kind in kinds:
        of = regions[kind["text"]]["of"]
        lines += ["", f"### {of}: {kind['name']} x {kind['count']}", "", "```", *kind["text"].splitlines(), "```"]
    return lines


def _compiled_lines(regions: Mapping[str, Facts], compiled: Facts) -> list[str]:
    """``regions`` of the report by text."""
    kinds = compiled["kinds"]
    rows = [
        (
            regions[kind["text"]]["of"],
            kind["name"],
            f"x {kind['count']}",
            ranges(regions[kind["text"]]["layers"]),
            f"{kind['seconds']:.2f}",
            "yes" if kind["cached"] else "no",
        )
        for kind in kinds
    ]
    casts = (
        "are kept: insides round where eager PyTorch rounds."
        if compiled["casts_survive"]
        else "are dropped: insides keep more precision than eager PyTorch; results are rounded where they are stored."
    )
    return [
        f"{counted(sum(kind['count'] for kind in kinds), 'region')} of {counted(len(kinds), 'kind')}, compiled in "
        f"{compiled['seconds']:.1f} s; {sum(kind['cached'] for kind in kinds)} of the kinds came from Inductor's "
        "cache on disk.  ",
        f"BF16 round trips inside a region {casts}",
        "",
        *table(("kind", "operator and backend", "count", "layers", "seconds", "cached"), rows, right="count|seconds"),
    ]


def collectives_page(report: Facts) -> list[str]:
    moves = report["collectives"]
    lines = ["# Collectives", "", f"{counted(report['ranks'], 'rank')}; {_PLACEMENTS[report['rows']]}."]
    if not moves:
        return [*lines, "", "None: no rows move."]
    rows = [
        (
            move["piece"],
            ranges(move["layers"]),
            move["operation"],
            ", ".join(move["values"]),
            size(move["bytes_in_per_row"]),
            size(move["bytes_out_per_row"]),
            size(move["bytes_sent_per_row"]),
            move["why"],
        )
        for move in moves
    ]
    headings = ("piece", "layers", "operation", "values", "brought", "received", "sent", "why")
    captured = report["collectives_captured"]
    sent = captured["bytes_sent_per_row"]
    where = "in captured segments" if captured["value"] else "instructions of their own, between captured segments"
    return [
        *lines,
        "All ranks run them in this order. Bytes are for each row of the bucket, on each rank: what it brings, what it "
        "has afterwards, and what it sends if the ring algorithm carries it out.",
        "",
        *table(headings, rows, right="piece|brought|received|sent"),
        "",
        f"In all a rank sends {size(sent)} a row, {size(report['buckets'][-1]['collective_bytes_sent_per_rank'])} in "
        "the largest bucket.",
        "",
        f"They are {where}: {captured['reason']}.",
    ]


def overview_page(title: Sequence[str], programs: dict[str, Facts]) -> list[str]:
    """Index of a dump: the directory of each program -> its report."""
    rows = [
        (
            f"[{name}]({name}/index.md)",
            _PLACEMENTS[report["rows"]],
            len(report["pieces"]),
            len(report["collectives"]),
            f"{report['buckets'][-1]['rows']:,}",
            size(report["buckets"][-1]["buffer_bytes"]),
            report["plan_hash"],
        )
        for name, report in programs.items()
    ]
    headings = ("program", "for", "instructions", "collectives", "rows to", "buffers", "plan hash")
    return [
        "# Graph dump",
        "",
        *(f"{line}  " for line in title),
        "",
        "A step runs a prelude (tokens to rows: embedding, Engram), the body (all layers) and an epilogue (the head, "
        "for the rows that sample).",
        *([] if len(rows) == 3 else ["Prelude and body exist twice: with rows dealt over the ranks, and without."]),
        f"Written by `{GENERATOR}`. `report.html` shows all of it as one page in a browser; `octavo graphs diff` "
        "compares two such directories in words.",
        "",
        *table(headings, rows, right="instructions|collectives|rows to|buffers"),
    ]
