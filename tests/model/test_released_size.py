"""The released checkpoint at its true size: 48 files whose headers are real and whose 510 GB of data are a hole."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from octavo.model.checkpoint import Checkpoint
from octavo.model.inspection import inspect
from octavo.model.presets import released
from tests.checkpoint_files import released_file, write_checkpoint
from tests.peak_memory import load_in_subprocess


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("released")
    write_checkpoint(path, released(), released_file)
    on_disk = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    assert on_disk < 100e6, "this file system has no holes"
    return path


def test_inspect(sparse: Path) -> None:
    """The bound is generous: it takes about two seconds."""
    started = time.monotonic()
    report = inspect(sparse)
    assert time.monotonic() - started < 60
    assert report.problems == {}
    assert (report.tensors, report.shards, report.payload_bytes) == (96_085, 48, 510_286_023_000)
    assert report.parameters == 763_205_315_794


def test_files_open_when_needed(sparse: Path) -> None:
    checkpoint = Checkpoint(sparse)
    assert checkpoint.files_opened == 0
    weight, scale = checkpoint.engram_table(14)
    assert (weight.shape, scale.shape) == ((384_016_682, 256), (384_016_682, 8))
    assert checkpoint.files_opened == 1


@pytest.mark.parametrize(
    ("layers", "files", "engram_rows"),
    [((0, 0), 1, []), ((1, 1), 2, [384_006_168])],
    ids=["a plain layer", "a layer with an Engram table"],
)
def test_one_layer_with_48_experts(sparse: Path, layers: tuple[int, int], files: int, engram_rows: list[int]) -> None:
    """The Engram table of 98 GB is mapped, never copied; memory stays within 15 % of the layer."""
    report = load_in_subprocess(sparse, *layers, 48)
    assert report["files_opened"] == files
    assert report["engram_rows"] == engram_rows
    assert report["resident"] > 48 * 3 * (2304 * 5120 / 2)
    assert report["maximum"] < 1.15 * report["resident"], report
