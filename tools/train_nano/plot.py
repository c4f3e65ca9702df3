"""The loss plot, as an SVG written by hand: the training machine need not have a plotting library."""

from __future__ import annotations

import json
import math
from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 900, 420, 56
_COLOURS = (
    *("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7a8a", "#57606a"),
    *("#e16f24", "#6639ba", "#3192aa", "#953800"),
)
_LOW, _HIGH = 0.001, 10.0
_SMOOTHING = 0.8


def write_plot(log: Path, target: Path) -> None:
    """Loss of every kind over training time, on a logarithmic scale, smoothed."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    entries = [json.loads(line) for line in lines]
    seconds = max((entry["seconds"] for entry in entries), default=1.0)
    kinds = sorted({kind for entry in entries for kind in entry["loss"]})

    def x(value: float) -> float:
        return _MARGIN + value / seconds * (_WIDTH - 2 * _MARGIN)

    def y(value: float) -> float:
        share = math.log(min(max(value, _LOW), _HIGH) / _LOW) / math.log(_HIGH / _LOW)
        return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for exponent in range(-3, 2):
        level = y(10.0**exponent)
        parts.append(f'<path d="M{_MARGIN} {level:.1f}H{_WIDTH - _MARGIN}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{level + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')
    for index in range(6):
        time = seconds * index / 5
        parts.append(f'<text x="{x(time):.1f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{time:.0f} s</text>')
    for index, kind in enumerate(kinds):
        colour = _COLOURS[index % len(_COLOURS)]
        points, smooth = [], None
        for entry in entries:
            if kind in entry["loss"]:
                value = entry["loss"][kind]
                smooth = value if smooth is None else _SMOOTHING * smooth + (1 - _SMOOTHING) * value
                points.append(f"{x(entry['seconds']):.1f} {y(smooth):.1f}")
        parts.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{_WIDTH - _MARGIN - 110}" y="{24 + 16 * index}" fill="{colour}">{kind}</text>')
    parts.append(f'<text x="{_MARGIN}" y="24">loss by kind over training time</text></svg>')
    target.write_text("\n".join(parts) + "\n", encoding="utf-8")
