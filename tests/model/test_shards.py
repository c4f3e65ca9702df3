"""Safetensors files: what a damaged one is told, and what the views of a sound one hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import OctavoError, UsageError
from octavo.model.layout import TensorSpec
from octavo.model.shard_header import read_header
from octavo.model.shards import INDEX_FILE, SINGLE_FILE, ShardFile, Shards
from tests.checkpoint_files import header_bytes, write_index, write_tensors
from tests.tokenizer_data import MINI

SPECS = {
    "a.weight": TensorSpec((4, 8), "F32"),
    "b.weight": TensorSpec((6,), "BF16"),
    "c.scale": TensorSpec((3,), "F8_E8M0"),
}


Damage = Callable[[Path], object]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_tensors(path, SPECS, bytes(range(256)))
    return path


def cut(size: int) -> Damage:
    """Cut the file to ``size`` bytes; a negative one counts from the end."""
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def append(data: bytes) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes() + data)


def replace(content: bytes) -> Damage:
    return lambda path: path.write_bytes(content)


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Apply ``change`` to the header's entries and keep the data."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        path.write_bytes(header_bytes(entries) + content[8 + length :])

    return damage


def entry(name: str, **values: object) -> Damage:
    """Other ``dtype``, ``shape`` or ``data_offsets`` for one tensor."""
    return header(lambda entries: entries[name].update(values))


def test_sound_file(file: Path) -> None:
    assert {name: span.spec for name, span in read_header(file).items()} == SPECS


@pytest.mark.parametrize(
    ("expected", "damage"),
    [
        ("5 bytes are too few for a safetensors file: truncated", cut(5)),
        ("header of .* bytes reaches beyond the file of 60 bytes: truncated", cut(60)),
        ("c.scale: its bytes end at .*, the file at .* truncated", cut(-1)),
        ("a.weight: its bytes end at", cut(-60)),
        ("3 bytes follow those of c.scale, the last tensor", append(b"123")),
        ("not a safetensors file .*would have a header of", replace(b"PK" + b"\x07" * 400)),
        ("not a safetensors file .*not JSON", replace((9).to_bytes(8, "little") + b"x" * 40)),
        ("not a safetensors file .*not JSON", replace((4).to_bytes(8, "little") + b"\xff" * 4)),
        ("not a safetensors file .*not a JSON object", replace((4).to_bytes(8, "little") + b"[1] ")),
        ("b.weight: its bytes overlap those of a.weight", entry("b.weight", data_offsets=[120, 132])),
        ("c.scale: its bytes overlap those of b.weight", entry("c.scale", data_offsets=[139, 142])),
        ("c.scale: its bytes end at .* out of range", entry("c.scale", data_offsets=[900, 903])),
        (r"b.weight: data_offsets \[128, 142\] span 14 bytes, but BF16", entry("b.weight", data_offsets=[128, 142])),
        ("b.weight: data_offsets .* span -12 bytes", entry("b.weight", data_offsets=[140, 128])),
        (r"b.weight: \[-12, 0\] are no data_offsets", entry("b.weight", data_offsets=[-12, 0])),
        (r"b.weight: \[128\] are no data_offsets", entry("b.weight", data_offsets=[128])),
        (r"b.weight: .* span 12 bytes, but BF16 \[5\] has 10", entry("b.weight", shape=[5])),
        (r"b.weight: \[6.0\] is no shape", entry("b.weight", shape=[6.0])),
        ("b.weight: unknown dtype 'Q4'; known are", entry("b.weight", dtype="Q4")),
        ("b.weight: expected dtype, shape and data_offsets", header(lambda entries: entries["b.weight"].pop("shape"))),
        ("3 bytes follow those of b.weight", header(lambda entries: entries.pop("c.scale"))),
    ],
)
def test_damaged_file(file: Path, expected: str, damage: Damage) -> None:
    damage(file)
    with pytest.raises(OctavoError, match=expected) as caught:
        ShardFile(file)
    assert str(file) in str(caught.value)


def test_gap_in_the_data(file: Path) -> None:
    """Two bytes that belong to nobody, between the first and the second tensor."""
    content = file.read_bytes()
    end = len(content) - 15  # b.weight and c.scale
    file.write_bytes(content[:end] + b"??" + content[end:])
    entry("b.weight", data_offsets=[130, 142])(file)
    entry("c.scale", data_offsets=[142, 145])(file)
    with pytest.raises(OctavoError, match=r"b.weight: its bytes leave 2 unused bytes after those of a.weight"):
        ShardFile(file)


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match=r"cannot be read \(Is a directory\)"):
        ShardFile(tmp_path)


def test_views_hold_the_stored_values() -> None:
    """All golden tensors against the safetensors library, bit for bit; scales and F4 codes come as uint8."""
    compared = 0
    for path in sorted(MINI.glob("*.safetensors")):
        file, library = ShardFile(path), load_file(path)
        assert file.spans.keys() == library.keys()
        for name, expected in library.items():
            view = file.tensor(name)
            quantised = expected.dtype in (torch.int8, torch.float8_e8m0fnu)
            assert view.dtype == (torch.uint8 if quantised else expected.dtype)
            assert view.shape == expected.shape
            assert torch.equal(view.view(torch.uint8), expected.view(torch.uint8)), name
            compared += 1
    assert compared == 1016


def test_values_survive_release(file: Path) -> None:
    mapped = ShardFile(file)
    before = mapped.tensor("a.weight").clone()
    mapped.release()
    mapped.will_need("a.weight")
    mapped.random_access("c.scale")
    assert torch.equal(mapped.tensor("a.weight").view(torch.uint8), before.view(torch.uint8))
    assert mapped.tensor("c.scale").tolist() == list(range(140, 143))


def test_misaligned_tensor(tmp_path: Path) -> None:
    """The format does not promise alignment: F32 after an odd number of bytes."""
    specs = {"a.scale": TensorSpec((3,), "F8_E8M0"), "b": TensorSpec((2,), "F32")}
    write_tensors(tmp_path / "x.safetensors", specs, b"\x00\x00\x00" + b"\x00\x00\x80\x3f" * 2)
    assert ShardFile(tmp_path / "x.safetensors").tensor("b").tolist() == [1.0, 1.0]


def test_reading_does_not_warn(file: Path, recwarn: pytest.WarningsRecorder) -> None:
    ShardFile(file).tensor("a.weight")
    assert not recwarn.list


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / SINGLE_FILE)
    shards = Shards(tmp_path)
    assert shards.files == (SINGLE_FILE,)
    assert shards.file_of == {"a": SINGLE_FILE, "b": SINGLE_FILE}
    assert shards.locate("a").tensor("a").tolist() == [1.0, 1.0]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two files and their index."""
    for number, names in enumerate((("a.weight", "b.weight"), ("c.scale",)), start=1):
        write_tensors(tmp_path / f"{number}.safetensors", {name: SPECS[name] for name in names}, b"0123")
    write_index(tmp_path, {"a.weight": "1.safetensors", "b.weight": "1.safetensors", "c.scale": "2.safetensors"})
    return tmp_path


def test_files_open_when_needed(pair: Path) -> None:
    shards = Shards(pair)
    assert shards.files == ("1.safetensors", "2.safetensors")
    assert shards.files_opened == 0
    shards.locate("a.weight")
    shards.locate("b.weight")
    assert shards.files_opened == 1
    assert shards.spec("c.scale") == SPECS["c.scale"]
    assert shards.files_opened == 2


def test_missing_shard(pair: Path) -> None:
    (pair / "2.safetensors").unlink()
    shards = Shards(pair)
    shards.locate("a.weight")
    with pytest.raises(OctavoError, match=rf"2.safetensors: missing, though {INDEX_FILE} names it"):
        shards.locate("c.scale")


def test_index_names_the_wrong_file(pair: Path) -> None:
    write_index(pair, {"a.weight": "1.safetensors", "b.weight": "2.safetensors", "c.scale": "2.safetensors"})
    with pytest.raises(OctavoError, match=r"2.safetensors: no tensor b.weight there, though"):
        Shards(pair).locate("b.weight")


def test_unknown_tensor(pair: Path) -> None:
    with pytest.raises(OctavoError, match=r"the checkpoint has no tensor d.weight"):
        Shards(pair).locate("d.weight")


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ('{"metadata": {}}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', r"weight_map\['a'\] is 3"),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"weight_map\['a'\] is '../b.safetensors'; expected the name"),
    ],
)
def test_bad_index(tmp_path: Path, index: str, expected: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(OctavoError, match=expected):
        Shards(tmp_path)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"neither {re.escape(INDEX_FILE)} nor {SINGLE_FILE} there"):
        Shards(tmp_path)
