"""The walls between the rooms, and the house rules that reading the source can check.

``violations`` reads any tree of the project's shape, so the checks themselves are tested on planted violations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ReportCount

PROJECT = Path(__file__).parents[1]
ROOMS: dict[str, frozenset[str]] = {
    "model": frozenset({"kernels"}),
    "kernels": frozenset(),
    "passes": frozenset({"kernels"}),
    "graphs": frozenset({"passes", "kernels"}),
    "runtime": frozenset({"model", "kernels", "passes", "graphs"}),
}
"""Each room, and the other rooms that it may import."""
CONTRACTS = frozenset({"octavo.kernels.operator", "octavo.kernels.collectives"})
"""What ``passes`` may import of ``kernels``: contracts, and the operators that the compiler inserts."""
MAX_LINES = 500
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def violations(project: Path) -> list[str]:
    """Every broken rule as ``file:line: what``, for the tree at ``project``."""
    found: list[str] = []
    for file in source_files(project):
        where = file.relative_to(project)
        lines = file.read_text(encoding="utf-8").splitlines()
        if len(lines) > MAX_LINES:
            found.append(f"{where}: {len(lines)} lines, at most {MAX_LINES}: one concept a file")
        if where.parts[0] == "octavo":
            tree = ast.parse("\n".join(lines), filename=str(where))
            found += [f"{where}:{line}: {what}" for line, what in _source_violations(where, tree)]
            if not (file.parent / "__init__.py").is_file():
                found.append(f"{where}: no __init__.py beside it, so a wheel would leave it out")
    structures = project / "docs" / "structures.md"
    text = structures.read_text(encoding="utf-8") if structures.is_file() else ""
    found += [f"docs/structures.md: octavo/{room}/ is not described" for room in ROOMS if f"octavo/{room}/" not in text]
    return found


def source_files(project: Path) -> list[Path]:
    folders = ("octavo", "scripts", "tests", "tools")
    return sorted(file for folder in folders for file in (project / folder).rglob("*.py"))


def imports(where: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, wherever it stands: functions and type checks count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = where.parent.parts[: len(where.parent.parts) - node.level + 1] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            match node.func, node.args[0]:
                case (
                    ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                    ast.Constant(value=str(module)),
                ):
                    yield node.lineno, module


def _source_violations(where: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    room = where.parts[1] if len(where.parts) > 2 else where.stem
    if room not in {*ROOMS, "__init__", "errors"}:
        yield 1, f"{room} is neither one of the rooms {', '.join(ROOMS)} nor errors.py"
        return
    for line, name in imports(where, tree):
        top, _, rest = name.partition(".")
        if top == "octavo" and not _may_import(room, rest.partition(".")[0], name):
            yield line, f"{room} may not import {name}"
        if top == "torch" and room == "runtime" and where.parts[2].startswith("server"):
            yield line, "the server may not import torch: it runs in a process without a model"
        if top == "os" and rest in ENVIRONMENT:
            yield line, "no behaviour by environment variable: take it from the configuration"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            yield node.lineno, "no behaviour by environment variable: take it from the configuration"


def _may_import(room: str, target: str, name: str) -> bool:
    """``target`` is the part of ``name`` below ``octavo``: a room, ``errors``, or a name of the package itself."""
    if target == "errors":
        return True
    if room == "__init__":
        return target == "runtime"
    if room == "errors":
        return False
    if room == "passes" and target == "kernels":
        return any(name == module or name.startswith(module + ".") for module in CONTRACTS)
    return room == "runtime" or target == room or target in ROOMS[room]


def test_project_keeps_the_rules(report_count: ReportCount) -> None:
    """The server's rule applies to octavo/runtime/server*: as long as no such file exists, only the planted one is."""
    files = source_files(PROJECT)
    for room in ROOMS:
        assert any(file.is_relative_to(PROJECT / "octavo" / room) for file in files), f"octavo/{room}/ has no source"
    assert violations(PROJECT) == []
    report_count("source files held to the house rules", len(files))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project that keeps every rule."""
    sources = {
        "octavo/__init__.py": "from octavo.runtime.engine import Engine\n__version__ = '0'\n",
        "octavo/errors.py": "class OctavoError(ValueError): ...\n",
        "octavo/kernels/operator.py": "import torch\nfrom octavo.errors import OctavoError\n",
        "octavo/model/block.py": "from octavo.kernels import operator\nfrom . import norm\nfrom .norm import Norm\n",
        "octavo/model/norm.py": "from octavo.errors import OctavoError\n",
        "octavo/passes/place.py": "from octavo.kernels.operator import Contract\nimport octavo.passes.runner\n",
        "octavo/passes/runner.py": "from octavo.kernels import operator\n",
        "octavo/graphs/program.py": "from octavo.passes import place\nfrom octavo.kernels.numerics import exact\n",
        "octavo/runtime/engine.py": "import octavo.model.block\nfrom octavo import graphs, passes, __version__\n",
        "octavo/runtime/server/app.py": "from octavo.errors import OctavoError\n",
        "tests/test_block.py": "import os\nfrom octavo.model import block\nos.environ.get('HOME')\n",
        "docs/structures.md": "".join(f"octavo/{room}/\n" for room in ROOMS),
    }
    for name, text in sources.items():
        plant(tmp_path, name, text)
    assert violations(tmp_path) == []
    return tmp_path


def plant(project: Path, name: str, text: str) -> None:
    file = project / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if name.startswith("octavo/"):
        (file.parent / "__init__.py").touch()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("octavo/kernels/gemm.py", "from octavo.model import block\n", "kernels may not import octavo.model.block"),
        ("octavo/kernels/gemm.py", "import octavo\n", "kernels may not import octavo"),
        ("octavo/model/rank.py", "import octavo.runtime.engine\n", "model may not import octavo.runtime.engine"),
        ("octavo/model/rank.py", "from ..graphs import program\n", "model may not import octavo.graphs.program"),
        ("octavo/model/deep/rank.py", "from ...graphs.program import P\n", "may not import octavo.graphs.program.P"),
        ("octavo/model/rank.py", "from octavo import Engine\n", "model may not import octavo.Engine"),
        ("octavo/model/rank.py", "def f():\n    import octavo.passes.place\n", "rank.py:2: model may not import"),
        ("octavo/model/rank.py", "import importlib as i\ni.import_module('octavo.graphs')\n", "rank.py:2: model may"),
        (
            "octavo/passes/split.py",
            "from octavo.graphs import program\n",
            "passes may not import octavo.graphs.program",
        ),
        ("octavo/passes/split.py", "from octavo.kernels import numerics\n", "may not import octavo.kernels.numerics"),
        ("octavo/graphs/host.py", "from octavo.model import block\n", "graphs may not import octavo.model.block"),
        ("octavo/graphs/host.py", "from octavo.runtime import engine\n", "graphs may not import octavo.runtime.engine"),
        ("octavo/errors.py", "import octavo.kernels.operator\n", "errors may not import octavo.kernels.operator"),
        ("octavo/__init__.py", "from octavo.model import block\n", "__init__ may not import octavo.model.block"),
        ("octavo/helpers/text.py", "", "helpers is neither one of the rooms"),
        ("octavo/runtime/server/app.py", "def f():\n    from torch import nn\n", "app.py:2: the server may not"),
        ("octavo/runtime/server.py", "import torch.nn\n", "server.py:1: the server may not import torch"),
        ("octavo/runtime/cli.py", "import os\nx = os.environ['HOME']\n", "cli.py:2: no behaviour by environment"),
        ("octavo/runtime/cli.py", "from os import getenv\n", "cli.py:1: no behaviour by environment"),
        ("octavo/model/long.py", "\n" * 501, "long.py: 501 lines"),
        ("tests/test_long.py", "\n" * 501, "test_long.py: 501 lines"),
        ("docs/structures.md", "octavo/model/\n" * 5, "octavo/kernels/ is not described"),
    ],
)
def test_planted_violation_is_found(tree: Path, name: str, text: str, expected: str) -> None:
    plant(tree, name, text)
    found = violations(tree)
    assert found, "nothing was found"
    assert expected in found[0]
    assert name.startswith("docs/") or len(found) == (2 if "helpers" in name else 1), found


def test_missing_init_is_found(tree: Path) -> None:
    (tree / "octavo" / "model" / "__init__.py").unlink()
    assert all("no __init__.py" in violation for violation in violations(tree))
    assert len(violations(tree)) == 2
