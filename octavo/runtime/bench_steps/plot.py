"""Steps of ``octavo bench prefill`` and ``decode`` as an SVG: where their components stand under an H200's roofline."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from octavo.runtime.bench_kernels.case import BF16_PER_SECOND, BYTES_PER_SECOND, FP8_PER_SECOND
from octavo.runtime.bench_steps.report import best_way, milliseconds, title_of

_COLUMNS, _WIDTH, _HEIGHT, _LEFT, _TOP = 2, 640, 320, 56, 56
_PLOT_WIDTH, _PLOT_HEIGHT = 300, 210
_INTENSITIES, _RATES = (-1, 5), (9, 16)
"""Decades shown: operations a byte, and operations a second."""
_COLOURS = (
    *("#1f6feb", "#d1242f", "#2da44e", "#8250df", "#bf8700", "#0f766e", "#e85aad", "#57606a"),
    *("#e16f24", "#a475f9", "#116329", "#000000", "#8c6d46"),
)


def plot_svg(report: dict[str, Any]) -> str:
    """A panel a step: operations a second over operations a byte, logarithmic, both of the floor's counts.

    A component that reached its floor would lie on the roof. Those that multiply nothing, or were not measured, are in
    the legend alone, with their share of the floor.
    """
    steps = report["steps"]
    rows = -(-len(steps) // _COLUMNS)
    width, height = _WIDTH * min(_COLUMNS, len(steps)), _HEIGHT * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, step in enumerate(steps):
        x, y = place % _COLUMNS * _WIDTH + _LEFT, place // _COLUMNS * _HEIGHT + _TOP
        parts += [f'<g transform="translate({x} {y})">', *_panel(step, report["kind"]), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(step: dict[str, Any], kind: str) -> list[str]:
    best = best_way(step)
    title = (
        f"{title_of(step, kind)}: {milliseconds(best['seconds'])} ms, {best['tokens_per_second']:,.0f} tokens/s, "
        f"{best['share_of_floor']:.1%} of floor"
    )
    parts = [f'<text y="-20" font-size="12">{escape(title)}</text>', *_axes(), *_roof()]
    for place, entry in enumerate(step["components"]):
        colour = _COLOURS[place % len(_COLOURS)]
        share = entry["share_of_floor"]
        label = entry["component"]
        if not entry["floor_seconds"]:
            label += f": {milliseconds(entry['seconds'])} ms, no floor"
        elif share is None:
            label += f": floor {milliseconds(entry['floor_seconds'])} ms"
        else:
            label += f" {share:.1%}: floor {milliseconds(entry['floor_seconds'])} ms"
        y = 12 + 16 * place
        parts.append(f'<circle cx="{_PLOT_WIDTH + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_PLOT_WIDTH + 26}" y="{y}">{escape(label)}</text>')
        if entry["operations"] and entry["seconds"]:
            x = _x(entry["operations"] / entry["bytes"])
            rate = _y(entry["operations"] / entry["seconds"])
            parts.append(f'<circle cx="{x:.1f}" cy="{rate:.1f}" r="4" fill="{colour}"><title>')
            parts.append(f"{escape(label)}</title></circle>")
    return parts


def _axes() -> list[str]:
    parts = []
    for decade in range(_INTENSITIES[0], _INTENSITIES[1] + 1):
        x = _x(10.0**decade)
        parts.append(f'<path d="M{x:.1f} 0V{_PLOT_HEIGHT}" stroke="#eaeef2"/>')
        parts.append(f'<text x="{x:.1f}" y="{_PLOT_HEIGHT + 16}" text-anchor="middle">{10.0**decade:g}</text>')
    for decade in range(_RATES[0], _RATES[1] + 1):
        y = _y(10.0**decade)
        parts.append(f'<path d="M0 {y:.1f}H{_PLOT_WIDTH}" stroke="#eaeef2"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (decade - 12):g}</text>')
    place = f'x="{_PLOT_WIDTH / 2}" y="{_PLOT_HEIGHT + 32}" text-anchor="middle"'
    return [*parts, f"<text {place}>operations a byte</text>", '<text x="-48" y="-6">TFLOP/s</text>']


def _roof() -> list[str]:
    """Memory's bound, and those of BF16 and FP8 products."""
    parts = []
    for peak, dashes in ((BF16_PER_SECOND, ""), (FP8_PER_SECOND, ' stroke-dasharray="4 3"')):
        low = 10.0 ** _INTENSITIES[0]
        corner = f"M{_x(low):.1f} {_y(low * BYTES_PER_SECOND):.1f}L{_x(peak / BYTES_PER_SECOND):.1f} {_y(peak):.1f}"
        parts.append(f'<path d="{corner}H{_PLOT_WIDTH}" fill="none" stroke="#24292f" stroke-width="1.4"{dashes}/>')
    return parts


def _x(intensity: float) -> float:
    return _along(intensity, *_INTENSITIES) * _PLOT_WIDTH


def _y(rate: float) -> float:
    return (1 - _along(rate, *_RATES)) * _PLOT_HEIGHT


def _along(value: float, low: int, high: int) -> float:
    """From 0 to 1 on a logarithmic axis; what lies beyond it stands at its end."""
    return min(max((math.log10(value) - low) / (high - low), 0.0), 1.0)
