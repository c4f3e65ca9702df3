"""What ``octavo bench prefill`` and ``decode`` measured, as text: a line a step, then each step's components."""

from __future__ import annotations

from typing import Any

from octavo.graphs.tables import counted, size, table


def report_lines(report: dict[str, Any]) -> list[str]:
    """Tables of steps and of their components; what captures took; what is to be known of the baselines."""
    steps = report["steps"]
    ways, others = list(steps[0]["ways"]), list(report["baselines"])
    headings = [
        *("rows", "context", "pairs", "experts", "floor ms", *(f"{way} ms" for way in ways), "tokens/s", "of floor"),
        *("launches", "kernels", "idle inside"),
        *(heading for name in others for heading in (f"baseline {name} ms", "/ ours, a layer")),
    ]
    program = report["program"]
    lines = [
        f"{report['kind']}: {counted(report['layers'], 'layer')}, {report['resident_experts']} resident experts, "
        f"medians of {report['repeat']}; {counted(program['segments'], 'segment')}, "
        f"{counted(program['breaks'], 'break')}; the floor is an H200's",
        *table(headings, [_row(step, ways, others) for step in steps], right="|".join(headings)),
    ]
    for step in steps:
        lines += ["", *_component_lines(step, report["kind"])]
    for name, capture in report["capture"].items():
        if capture is not None:
            lines.append(
                f"{name}: captured in {capture['seconds']:.1f} s; graphs {size(capture['graph_bytes'])}, "
                f"pool {size(capture['pool_bytes'])}, buffers {size(program['buffer_bytes'])}"
            )
    for name, facts in report["baselines"].items():
        more = "".join(f"; {key.replace('_', ' ')}: {_text(value)}" for key, value in facts.items() if key != "what")
        lines.append(f"baseline {name}: {facts['what']}{more}")
    return lines


def title_of(step: dict[str, Any], kind: str) -> str:
    """``prefill of 128 rows, context 0``."""
    what = (
        f"prefill of {counted(step['rows'], 'row')}"
        if kind == "prefill"
        else f"decode of {counted(step['rows'], 'request')}"
    )
    return f"{what}, context {step['context']:,}"


def best_way(step: dict[str, Any]) -> dict[str, Any]:
    """The last of the ways measured: an engine's own, if it is among them."""
    found: dict[str, Any] = step["ways"][next(reversed(step["ways"]))]
    return found


def _row(step: dict[str, Any], ways: list[str], others: list[str]) -> tuple[str, ...]:
    best = best_way(step)
    cells = [
        *(f"{step['rows']:,}", f"{step['context']:,}", f"{step['pairs']:,.1f}", f"{step['experts']:,.1f}"),
        *(milliseconds(step["floor_seconds"]), *(milliseconds(step["ways"][way]["seconds"]) for way in ways)),
        *(f"{best['tokens_per_second']:,.0f}", _share(best["share_of_floor"])),
        *(
            _or_dash(step["launches"], ","),
            _or_dash(step["kernels"], ","),
            _or_dash(step["segments_idle_share"], ".1%"),
        ),
    ]
    for name in others:
        found = step["baselines"].get(name, {})
        if "error" in found:
            cells += ["out of memory", "-"]
        else:
            cells += [milliseconds(found.get("seconds")), _or_dash(found.get("times_ours"), ",.2f")]
    return tuple(cells)


def _component_lines(step: dict[str, Any], kind: str) -> list[str]:
    measured = sum(entry["seconds"] or 0.0 for entry in step["components"])
    rows = []
    for entry in sorted(step["components"], key=lambda entry: -(entry["seconds"] or 0.0)):
        seconds = entry["seconds"]
        operators = sorted(entry["operators"], key=lambda each: -each["seconds"])
        names = [
            f"{each['operator']}{'*' if each['compiled'] else ''} {milliseconds(each['seconds'])}" for each in operators
        ]
        rows.append(
            (
                entry["component"],
                milliseconds(entry["floor_seconds"]) if entry["floor_seconds"] else "-",
                milliseconds(seconds),
                _share(entry["share_of_floor"]) if entry["floor_seconds"] else "-",
                "-" if seconds is None else f"{seconds / measured:.1%}",
                _or_dash(entry["kernels"], ","),
                ", ".join(names) or "-",
            )
        )
    headings = (
        "component",
        "floor ms",
        "ms",
        "of floor",
        "of step",
        "kernels",
        "ms by operator (* compiled: its kernels fused)",
    )
    rows.append(("all", milliseconds(step["floor_seconds"]), milliseconds(measured or None), "", "", "", ""))
    return [f"{title_of(step, kind)}:", *table(headings, rows, right="|".join(headings[1:6]))]


def milliseconds(seconds: float | None) -> str:
    return _or_dash(None if seconds is None else seconds * 1e3, ",.3f")


def _share(value: float | None) -> str:
    """Of a floor; on a CPU hardly anything."""
    return "-" if value is None else f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
