"""A checkpoint against the layout of its config, and the Engram tables as mapped views."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import OctavoError, UsageError
from octavo.model.checkpoint import Checkpoint
from octavo.model.inspection import inspect, report_lines
from octavo.model.presets import mini
from octavo.model.shards import INDEX_FILE, SINGLE_FILE
from tests.checkpoint_files import write_checkpoint, write_index
from tests.tokenizer_data import MINI

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The golden checkpoint, to be damaged."""
    path = tmp_path / "mini"
    path.mkdir()
    for file in MINI.iterdir():
        shutil.copyfile(file, path / file.name)
    return path


def weight_map(path: Path) -> dict[str, str]:
    entries: dict[str, str] = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    return entries


def test_golden_checkpoint_passes() -> None:
    checkpoint = Checkpoint(MINI)
    assert checkpoint.files_opened == 0
    checkpoint.check()
    assert checkpoint.files_opened == 2
    assert checkpoint.config == mini()


def test_single_file_passes(copy: Path) -> None:
    save_file(load_file(copy / FIRST) | load_file(copy / SECOND), copy / SINGLE_FILE)
    for name in (FIRST, SECOND, INDEX_FILE):
        (copy / name).unlink()
    Checkpoint(copy).check()


def test_everything_wrong_is_listed_at_once(copy: Path) -> None:
    """One error with every name: 70 missing, 3 unexpected, shapes and dtypes."""
    tensors = load_file(copy / SECOND)
    missing = sorted(name for name in tensors if name.startswith("mtp.1.ffn."))
    assert len(missing) > 30
    for name in missing:
        del tensors[name]
    tensors["aligner.w1.bias"] = torch.zeros(129, dtype=torch.bfloat16)
    tensors["vision.norm.weight"] = tensors["vision.norm.weight"].float()
    tensors["mtp.0.hc_ffn_base"] = torch.zeros(8, 3, dtype=torch.float16)
    extra = {f"mtp.9.extra.{index}": torch.zeros(1) for index in range(3)}
    save_file(tensors | extra, copy / SECOND)
    index = {name: file for name, file in weight_map(copy).items() if name not in missing}
    write_index(copy, index | dict.fromkeys(extra, SECOND))
    with pytest.raises(OctavoError) as caught:
        Checkpoint(copy).check()
    text = str(caught.value)
    assert text.startswith(f"{copy} does not hold the checkpoint that its config.json describes:\n")
    lines = [line.strip() for line in text.splitlines()]
    for kind, names in (("missing tensors", missing), ("unexpected tensors", list(extra))):
        start = lines.index(f"{kind} ({len(names)}):")
        assert sorted(lines[start + 1 : start + 1 + len(names)]) == names
    assert "wrong shapes (2):" in lines
    assert "aligner.w1.bias: [129], expected [128]" in lines
    assert "mtp.0.hc_ffn_base: [8, 3], expected [24]" in lines
    assert "wrong dtypes (2):" in lines
    assert "vision.norm.weight: F32, expected BF16" in lines
    assert "mtp.0.hc_ffn_base: F16, expected F32" in lines


def test_index_and_files_disagree(copy: Path) -> None:
    entries = weight_map(copy)
    assert entries["head.weight"] == FIRST
    write_index(copy, entries | {"head.weight": SECOND})
    problems = Checkpoint(copy).problems()
    assert problems == {
        "tensors that are not in the file that the index names": [f"head.weight in {SECOND}"],
        "tensors that the index does not name": [f"head.weight in {FIRST}"],
    }


def test_missing_and_damaged_files_are_problems_too(copy: Path) -> None:
    """The tensors of an unusable file are not called missing as well."""
    (copy / FIRST).write_bytes((copy / FIRST).read_bytes()[:-1])
    (copy / SECOND).unlink()
    problems = Checkpoint(copy).problems()
    assert list(problems) == ["unusable files"]
    truncated, missing = problems["unusable files"]
    assert f"{FIRST}: " in truncated and "truncated" in truncated
    assert f"{SECOND}: missing" in missing


def test_config_of_another_model(copy: Path) -> None:
    """Half as many experts in the config: the rest is unexpected, and the router has the wrong shape."""
    text = dataclasses.replace(mini().text_config, n_routed_experts=4)
    (copy / "config.json").write_text(json.dumps(dataclasses.replace(mini(), text_config=text).to_dict()))
    problems = Checkpoint(copy).problems()
    assert len(problems["unexpected tensors"]) == 10 * 4 * 6
    assert len(problems["wrong shapes"]) == 10 * 3


def test_not_a_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match=r"no config\.json there"):
            Checkpoint(path)
    (tmp_path / "config.json").write_text(json.dumps(mini().to_dict()))
    with pytest.raises(UsageError, match=f"neither {re.escape(INDEX_FILE)} nor"):
        Checkpoint(tmp_path)


def test_engram_tables_are_views_of_the_file() -> None:
    checkpoint = Checkpoint(MINI)
    library = load_file(MINI / SECOND)
    for layer, rows in ((1, 660), (4, 864)):
        weight, scale = checkpoint.engram_table(layer)
        assert (weight.shape, weight.dtype) == ((rows, 32), torch.float8_e4m3fn)
        assert (scale.shape, scale.dtype) == ((rows, 1), torch.uint8)
        name = f"layers.{layer}.engram.embed"
        assert torch.equal(weight.view(torch.uint8), library[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(scale, library[f"{name}.scale"].view(torch.uint8))
        again, _ = checkpoint.engram_table(layer)
        assert again.data_ptr() == weight.data_ptr()
    assert checkpoint.files_opened == 1


def test_engram_table_of_another_layer() -> None:
    with pytest.raises(OctavoError, match=r"layer 2 has no Engram table; layers \[1, 4\] have one"):
        Checkpoint(MINI).engram_table(2)


def test_engram_table_of_the_wrong_size(copy: Path) -> None:
    tensors = load_file(copy / SECOND)
    tensors["layers.4.engram.embed.scale"] = tensors["layers.4.engram.embed.scale"][:-1].clone()
    save_file(tensors, copy / SECOND)
    with pytest.raises(OctavoError, match=r"layers.4.engram.embed.scale is F8_E8M0 \[863, 1\], expected .*864"):
        Checkpoint(copy).engram_table(4)


def test_report_of_the_golden_checkpoint() -> None:
    report = inspect(MINI)
    assert (report.tensors, report.shards, report.payload_bytes) == (1016, 2, 4_798_628)
    assert report.bytes_by_dtype == {
        "F8_E4M3": 1_433_216,
        "F32": 1_281_704,
        "I8": 1_130_496,
        "BF16": 879_680,
        "F8_E8M0": 73_532,
    }
    # 2 codes a byte in I8; BF16 has 2 bytes and F32 4 an element; scales are not counted.
    assert report.parameters == 1_433_216 + 2 * 1_130_496 + 879_680 // 2 + 1_281_704 // 4
    assert (report.layers, report.experts, report.draft_stages, report.draft_experts) == (10, 8, 3, 4)
    assert report.engram_rows == {1: 660, 4: 864}
    assert report.problems == {}
    lines = report_lines(report)
    assert "tensors     1,016 in 2 files" in lines
    assert "problems    none" in lines


def test_report_names_problems(copy: Path) -> None:
    (copy / SECOND).unlink()
    report = inspect(copy)
    assert report.shards == 2
    assert 0 < report.tensors < 1016
    lines = report_lines(report)
    assert "problems    1" in lines
    assert any(SECOND in line and "missing" in line for line in lines)


def test_report_of_a_text_model(tmp_path: Path) -> None:
    config = dataclasses.replace(mini(), vision_config=None, image_token_id=None)
    write_checkpoint(tmp_path, config, lambda _: SINGLE_FILE)
    write_index(tmp_path, dict.fromkeys(Checkpoint(tmp_path).expected, SINGLE_FILE))
    report = inspect(tmp_path)
    assert report.problems == {}
    assert "vision      none" in report_lines(report)
