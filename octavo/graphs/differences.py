"""What a pass did to a graph: nodes added, removed and changed, by meaning first and then line by line."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.graphs.describe import GraphText, NodeText
from octavo.graphs.tables import layer_span

_CONTEXT = 2
_LISTED = 12
"""Notes of more different values than this are counted, not listed."""


@dataclass(frozen=True, slots=True)
class Change:
    """One node that both graphs have, and what differs: (what, before, after)."""

    node: NodeText
    differences: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two graphs compared."""

    added: tuple[NodeText, ...]
    removed: tuple[NodeText, ...]
    changed: tuple[Change, ...]
    moved: int
    """Nodes of both graphs that stand in another order."""
    text: tuple[str, ...]
    """Unified diff of the canonical texts."""

    def summary(self) -> str:
        """A few words for a table."""
        noted = sum(any(what not in _COMPUTED for what, _, _ in change.differences) for change in self.changed)
        computed = sum(any(what in _COMPUTED for what, _, _ in change.differences) for change in self.changed)
        parts = [f"+{len(self.added)}" * bool(self.added), f"-{len(self.removed)}" * bool(self.removed)]
        parts += [f"{computed} changed" * bool(computed), f"{noted} annotated" * bool(noted)]
        parts += [f"{self.moved} moved" * bool(self.moved)]
        return ", ".join(filter(None, parts)) or "nothing"

    def lines(self) -> list[str]:
        """The whole comparison, meaning first."""
        lines = [f"Nodes: {self.summary()}.", ""]
        lines += [*_grouped("added", self.added), *_grouped("removed", self.removed)]
        lines += _changes([change for change in self.changed if any(d[0] in _COMPUTED for d in change.differences)])
        lines += _notes(self.changed)
        if self.moved:
            lines += [f"moved: {self.moved} nodes stand in another order", ""]
        lines.append("text: what is computed, line by line")
        return lines + (list(self.text) or ["  (the same)"])


_COMPUTED = ("operation", "arguments", "shapes")


def compare(before: GraphText, after: GraphText) -> Difference:
    """What makes ``after`` of ``before``; nodes are the same if their names are."""
    old = {node.name: node for node in before.nodes}
    new = {node.name: node for node in after.nodes}
    added = tuple(node for node in after.nodes if node.name not in old)
    removed = tuple(node for node in before.nodes if node.name not in new)
    changed = []
    for name, node in new.items():
        if name in old and old[name] != node:
            changed.append(Change(node, tuple(_differences(old[name], node))))
    order = [name for name in old if name in new]
    moved = sum(a != b for a, b in zip(order, (name for name in new if name in old), strict=True))
    text = difflib.unified_diff(before.canonical(), after.canonical(), "before", "after", n=_CONTEXT, lineterm="")
    return Difference(added, removed, tuple(changed), moved, tuple(text))


def _differences(old: NodeText, new: NodeText) -> Iterable[tuple[str, str, str]]:
    if old.operation != new.operation:
        yield "operation", old.operation, new.operation
    if old.shapes != new.shapes:
        yield "shapes", old.shapes, new.shapes
    gone = [argument for argument in old.arguments if argument not in new.arguments]
    come = [argument for argument in new.arguments if argument not in old.arguments]
    if gone or come:
        yield "arguments", ", ".join(gone), ", ".join(come)
    notes, news = dict(old.notes), dict(new.notes)
    for key in dict.fromkeys((*notes, *news)):
        if notes.get(key) != news.get(key):
            yield key, notes.get(key, "unknown"), news.get(key, "unknown")


def _grouped(title: str, nodes: Sequence[NodeText]) -> list[str]:
    if not nodes:
        return []
    groups: dict[tuple[str, str], list[NodeText]] = defaultdict(list)
    for node in nodes:
        groups[node.operation, node.shapes].append(node)
    lines = [f"{title}: {len(nodes)}"]
    for (operation, shapes), members in groups.items():
        where = _layers(members)
        lines.append(f"  {len(members):4} x {operation} -> {shapes}  ({where})")
    return [*lines, ""]


def _changes(changes: Sequence[Change]) -> list[str]:
    """Equal changes of equal nodes of several layers are one line."""
    if not changes:
        return []
    groups: dict[tuple[str, ...], list[NodeText]] = defaultdict(list)
    for change in changes:
        for what, old, new in change.differences:
            if what in _COMPUTED:
                own = f"L{change.node.layer}."
                key = (change.node.operation, what, old.replace(own, "L*."), new.replace(own, "L*."))
                groups[key].append(change.node)
    lines = [f"changed: {len(changes)}"]
    for (operation, what, old, new), members in groups.items():
        lines.append(f"  {len(members):4} x {operation}, {what}  ({_layers(members)})")
        lines += [f"         - {old}", f"         + {new}"]
    return [*lines, ""]


def _notes(changes: Sequence[Change]) -> list[str]:
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for change in changes:
        for what, old, new in change.differences:
            if what not in _COMPUTED:
                counts[what][old, new] += 1
    lines = []
    for what, pairs in counts.items():
        lines.append(f"annotated with {what}: {sum(pairs.values())}")
        if len(pairs) > _LISTED:
            lines.append(f"  {len(pairs)} different values")
        else:
            lines += [
                f"  {count:4} x {new}" if old == "unknown" else f"  {count:4} x {old} -> {new}"
                for (old, new), count in pairs.items()
            ]
        lines.append("")
    return lines


def _layers(nodes: Sequence[NodeText]) -> str:
    layers = [node.layer for node in nodes if node.layer is not None]
    outside = len(nodes) - len(layers)
    parts = [layer_span(layers)] if layers else []
    return ", ".join(parts + [f"{outside} outside of layers"] * bool(outside))
