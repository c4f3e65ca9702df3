"""The suites by name."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Protocol

from octavo.errors import UsageError
from octavo.runtime.suites import arithmetic, facts, recall
from octavo.runtime.suites.base import Item, Split


class MakeItem(Protocol):
    """Item number ``index`` of the stream ``seed``, on one side of the split."""

    def __call__(self, seed: int, index: int, side: Split = "evaluate") -> Item: ...


SUITES = MappingProxyType[str, MakeItem](
    {
        "arithmetic": arithmetic.item,
        "recall@1k": functools.partial(recall.item, tokens=1000),
        "recall@4k": functools.partial(recall.item, tokens=4000),
        "trace@1k": functools.partial(recall.item, tokens=1000, traced=True),
        "facts": facts.item,
    }
)
"""What asks the items of each suite."""
GROUPS = MappingProxyType({"recall": ("recall@1k", "recall@4k")})
"""Names for several suites at once."""


def item_of(name: str, thinking: bool) -> MakeItem:
    """The suite as it is asked of a model that thinks first or does not."""
    make = SUITES[name]
    if thinking and isinstance(make, functools.partial) and make.func is recall.item:
        return functools.partial(make, start=recall.THINKING_START)
    return make


def suite_names(name: str) -> tuple[str, ...]:
    """The suites that ``name`` stands for. Raises :class:`UsageError` if there is no such suite."""
    if name in GROUPS:
        return GROUPS[name]
    if name not in SUITES:
        raise UsageError(
            f"--suite {name}: there is no such suite. There are {', '.join([*SUITES, *GROUPS])}, "
            "or the name of a file that ends in .jsonl."
        )
    return (name,)
