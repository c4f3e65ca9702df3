"""The latencies of ``octavo bench serve`` as an SVG: for each, the share of requests that took no longer."""

from __future__ import annotations

from html import escape
from typing import Any

_PANELS = (
    ("first_token", "first token"),
    ("inter_token", "between tokens, mean of a request"),
    ("latency", "whole answer"),
)
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 220, 48, 64
_PLOT_WIDTH, _PLOT_HEIGHT = 230, 120


def plot_svg(report: dict[str, Any]) -> str:
    """Three cumulative distributions in milliseconds, with the medians, the 99th percentiles and the bounds."""
    answered = [call for call in report["calls"] if call["error"] is None]
    bounds = report["goodput"]["bounds"] if "goodput" in report else {}
    title = (
        f"{report['answered']} of {report['load']['requests']} requests answered, "
        f"{report['requests_per_second']:.2f} requests/s, {report['answer_tokens_per_second']:.1f} answer tokens/s"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH * len(_PANELS)} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH * len(_PANELS)}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="13">{escape(title)}</text>',
    ]
    for index, (name, label) in enumerate(_PANELS):
        values = sorted(call[name] * 1e3 for call in answered)
        bound = bounds[name] * 1e3 if name in bounds else None
        parts += [f'<g transform="translate({index * _WIDTH + _LEFT} {_TOP})">', *_panel(label, values, bound), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(label: str, values: list[float], bound: float | None) -> list[str]:
    most = max(values[-1], bound or 0.0) or 1.0

    def x(value: float) -> float:
        return value / most * _PLOT_WIDTH

    def y(share: float) -> float:
        return (1 - share) * _PLOT_HEIGHT

    parts = [f'<text y="-18">{label}</text>']
    for share in (0.0, 0.5, 0.99):
        parts.append(f'<path d="M0 {y(share):.1f}H{_PLOT_WIDTH}" stroke="#d0d7de"/>')
        parts.append(f'<text x="-6" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        place = f'x="{share * _PLOT_WIDTH:.1f}" y="{_PLOT_HEIGHT + 16}" text-anchor="{anchor}"'
        parts.append(f"<text {place}>{share * most:.4g} ms</text>")
    steps = [f"H{x(value):.1f}V{y((rank + 1) / len(values)):.1f}" for rank, value in enumerate(values)]
    parts.append(f'<path d="M0 {_PLOT_HEIGHT}{"".join(steps)}" fill="none" stroke="#1f6feb" stroke-width="1.6"/>')
    if bound is not None:
        parts.append(f'<path d="M{x(bound):.1f} 0V{_PLOT_HEIGHT}" stroke="#d1242f" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x(bound):.1f}" y="-4" text-anchor="middle" fill="#d1242f">bound</text>')
    return parts
