"""Tables that read as plain text and render as Markdown; byte counts and lists of numbers for people."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KB", "MB", "GB", "TB")


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: str = "") -> list[str]:
    """A Markdown table with padded columns. ``right`` names the right-aligned headings, separated by ``|``."""
    if not rows:
        return ["(none)"]
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, len(heading), *(len(row[i]) for row in cells)) for i, heading in enumerate(headings)]
    aligned_right = [heading in right.split("|") for heading in headings]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, aligned_right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + ":" if to_right else "-" * width
        for width, to_right in zip(widths, aligned_right, strict=True)
    ]
    return [line(list(headings)), line(rule), *(line(row) for row in cells)]


def size(count: float) -> str:
    """Bytes with three digits and a decimal unit."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def layer_span(layers: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-3, 7``."""
    return f"layer{'' if len(set(layers)) == 1 else 's'} {ranges(layers)}"


def counted(count: int, noun: str) -> str:
    """``1 node``, ``1,200 nodes``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for ``0, 1, 2, 3, 7``; ``-`` for none."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "-"
