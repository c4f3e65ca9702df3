"""The model is written once, for one place: nothing in it knows of ranks, buckets or processes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import octavo.model

FORBIDDEN = frozenset(
    {"rank", "ranks", "cp", "cp_size", "dist", "distributed", "world_size", "communicator", "bucket", "process"}
)
"""As whole names; ``o_lora_rank`` is a width."""
FILES = sorted(Path(next(iter(octavo.model.__path__))).rglob("*.py"))


def names_in(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_rank_in_the_model(file: Path) -> None:
    assert not names_in(file.read_text(encoding="utf-8")) & FORBIDDEN


@pytest.mark.parametrize(
    "source",
    [
        "def f(rank): ...",
        "f(rank=3)",
        "def rank(): ...",
        "import torch.distributed as d",
        "x = self.ranks",
        "from torch import distributed",
    ],
)
def test_it_would_be_found(source: str) -> None:
    assert names_in(source) & FORBIDDEN
