"""The compiled mini body is what it was: a change of graph, pieces or buffers shows as a difference of text.

If a difference is meant, ``python -m tests.passes.regenerate_goldens`` writes the files anew. The texts hold nothing
that torch names, so they are the same on every supported torch.
"""

from __future__ import annotations

import difflib

import pytest

from tests.passes.golden_text import CASES, GOLDENS, texts

FILES = [f"{case}.{kind}.txt" for case in CASES for kind in ("graph", "plan")]


@pytest.mark.parametrize("name", FILES)
def test_golden_text(name: str) -> None:
    expected, actual = (GOLDENS / name).read_bytes(), texts()[name].encode()
    if expected != actual:
        lines = difflib.unified_diff(
            expected.decode().splitlines(), actual.decode().splitlines(), "golden", "now", lineterm="", n=1
        )
        pytest.fail("\n".join([f"{name} differs; if it is meant, python -m tests.passes.regenerate_goldens", *lines]))


def test_no_stray_files() -> None:
    assert sorted(path.name for path in GOLDENS.glob("*.txt")) == sorted(FILES) == sorted(texts())
