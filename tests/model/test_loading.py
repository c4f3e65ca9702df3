"""Copying a checkpoint into parameters: values, subsets, promotions, refusals, and the memory that it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.errors import OctavoError, UsageError
from octavo.model.checkpoint import Checkpoint
from octavo.model.loading import load_parameters
from octavo.model.presets import cut_layers, mini
from tests.checkpoint_files import parameter_tensors, write_checkpoint
from tests.peak_memory import load_in_subprocess
from tests.tokenizer_data import MINI


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """All golden tensors, read by the safetensors library."""
    return {name: tensor for file in MINI.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_bytes(mine: Tensor, stored: Tensor) -> bool:
    return mine.shape == stored.shape and torch.equal(mine.view(torch.uint8), stored.view(torch.uint8))


def assert_loaded(
    parameters: dict[str, Tensor], stored: dict[str, Tensor], experts: range, draft_experts: range
) -> None:
    for name, tensor in parameters.items():
        prefix, experts_in_name, matrix = name.rpartition(".experts.")
        if not experts_in_name:
            assert same_bytes(tensor, stored[name]), name
            continue
        resident = experts if name.startswith("layers") else draft_experts
        assert len(tensor) == len(resident)
        for index, expert in enumerate(resident):
            assert same_bytes(tensor[index], stored[f"{prefix}.experts.{expert}.{matrix}"]), (name, expert)


def test_every_tensor(stored: dict[str, Tensor]) -> None:
    parameters = parameter_tensors(mini(), lambda name: True)
    # 1016 tensors less 2 x 2 of the Engram tables; 10 x 8 + 3 x 4 experts of 6 tensors become 13 x 6 stacks.
    assert len(parameters) == 1016 - 4 - (10 * 8 + 3 * 4) * 6 + 13 * 6
    calls: list[tuple[int, int]] = []
    load_parameters(parameters, Checkpoint(MINI), progress=lambda done, total: calls.append((done, total)))
    assert_loaded(parameters, stored, range(8), range(4))
    total = sum(tensor.nbytes for tensor in parameters.values())
    assert len(calls) == 1012
    assert calls[-1] == (total, total)
    assert {count for _, count in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_parameters_of_a_module(stored: dict[str, Tensor]) -> None:
    """Parameters that require a gradient are filled all the same."""
    module = nn.Module()
    module.head = nn.Linear(128, 512, bias=False, dtype=torch.bfloat16)
    load_parameters(dict(module.named_parameters()), Checkpoint(MINI))
    assert same_bytes(module.head.weight.detach(), stored["head.weight"])


@pytest.mark.parametrize(
    ("experts", "draft_experts"), [(range(8), range(1, 3)), (range(2, 5), range(4)), (range(7, 8), range(1))]
)
def test_some_experts(stored: dict[str, Tensor], experts: range, draft_experts: range) -> None:
    parameters = parameter_tensors(mini(), lambda name: True, experts, draft_experts)
    assert len(parameters["layers.3.ffn.experts.w1.weight"]) == len(experts)
    load_parameters(parameters, Checkpoint(MINI), experts=experts, draft_experts=draft_experts)
    assert_loaded(parameters, stored, experts, draft_experts)


def test_fewer_layers_read_fewer_files(stored: dict[str, Tensor]) -> None:
    """Drafts and vision lie in the second file: a text model of three layers never opens it."""
    config = cut_layers(mini(), 3)
    parameters = parameter_tensors(config, lambda name: name.startswith(("layers.", "embed.", "head.", "norm.")))
    assert not any(name.startswith("layers.3.") for name in parameters)
    checkpoint = Checkpoint(MINI)
    load_parameters(parameters, checkpoint)
    assert_loaded(parameters, stored, range(8), range(4))
    assert checkpoint.files_opened == 1


def test_wider_parameters(stored: dict[str, Tensor]) -> None:
    parameters = {
        "head.weight": torch.empty(512, 128),
        "layers.2.attn.compressor.wgate.weight": torch.empty(64, 128, dtype=torch.float64),
        "layers.0.ffn.gate.bias": torch.empty(8, dtype=torch.float64),
    }
    load_parameters(parameters, Checkpoint(MINI))
    for name, tensor in parameters.items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype))


def test_any_strides(stored: dict[str, Tensor]) -> None:
    parameter = torch.empty(128, 512, dtype=torch.bfloat16).t()
    load_parameters({"head.weight": parameter}, Checkpoint(MINI))
    assert torch.equal(parameter, stored["head.weight"])


def test_every_mismatch_is_named_and_nothing_is_copied() -> None:
    good = torch.full((512, 128), 7.0, dtype=torch.bfloat16)
    parameters = {
        "embed.weight": good,
        "layers.0.attn.wq_a.weight": torch.empty(64, 128),
        "layers.0.attn.wq_a.scale": torch.empty(2, 4, dtype=torch.float8_e8m0fnu),
        "layers.0.attn.attn_sink": torch.empty(4, dtype=torch.bfloat16),
        "layers.0.ffn.gate.bias": torch.empty(9),
        "layers.0.attn.wkv.bias": torch.empty(9),
        "layers.1.engram.embed.weight": torch.empty(660, 32, dtype=torch.float8_e4m3fn),
        "norm.weight": torch.empty(128, dtype=torch.bfloat16, device="meta"),
    }
    with pytest.raises(OctavoError) as caught:
        load_parameters(parameters, Checkpoint(MINI))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{MINI} does not fit the model:"
    expected = [
        "layers.0.attn.wq_a.weight: the parameter is torch.float32; F8_E4M3 of the checkpoint needs torch.float8",
        "layers.0.attn.wq_a.scale: the parameter is torch.float8_e8m0fnu; F8_E8M0 of the checkpoint needs torch.uint8",
        "layers.0.attn.attn_sink: the parameter is torch.bfloat16; F32 of the checkpoint needs torch.float32 or",
        "layers.0.ffn.gate.bias: the parameter is [9], the checkpoint has [8]",
        "layers.0.attn.wkv.bias: no tensor of a checkpoint with this config.json",
        "layers.1.engram.embed.weight: Engram tables are mapped",
        "norm.weight: the parameter is on the meta device",
    ]
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(f"  - {beginning}"), line
    assert (good == 7.0).all()


def test_stack_of_another_size() -> None:
    parameters = parameter_tensors(mini(), lambda name: ".ffn.experts." in name, experts=range(3))
    with pytest.raises(
        OctavoError, match=r"layers.0.ffn.experts.w1.weight: a stack of 3 experts for the 8 experts 0 to 7"
    ):
        load_parameters(parameters, Checkpoint(MINI))


def test_experts_beyond_the_last() -> None:
    parameters = parameter_tensors(mini(), lambda name: name.startswith("layers.0.ffn.experts."), experts=range(6, 9))
    with pytest.raises(
        OctavoError, match=r"layers.0.ffn.experts.8.w1.weight: no tensor of a checkpoint with this config"
    ):
        load_parameters(parameters, Checkpoint(MINI), experts=range(6, 9))


@pytest.mark.parametrize("experts", [range(0), range(0, 8, 2), range(-1, 3)])
def test_experts_that_are_no_range_of_neighbours(experts: range) -> None:
    with pytest.raises(UsageError, match="expected a contiguous, non-empty range"):
        load_parameters({}, Checkpoint(MINI), experts=experts)


def test_peak_memory(tmp_path: Path) -> None:
    """300 MB of experts: while they are copied, 15 % more than the parameters must do."""
    text = dataclasses.replace(mini().text_config, n_routed_experts=64, moe_intermediate_size=2560)
    write_checkpoint(
        tmp_path,
        dataclasses.replace(mini(), text_config=text),
        lambda name: f"{'layers' if name.startswith('layers') else 'rest'}.safetensors",
        payload=bytes(range(251)) * 4096,
    )
    report = load_in_subprocess(tmp_path, 0, 9, 64)
    assert 300e6 < report["resident"] < 400e6
    assert report["resident"] < report["maximum"] < 1.15 * report["resident"]
    assert report["files_opened"] == 1
