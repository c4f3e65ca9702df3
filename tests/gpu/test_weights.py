"""Weights on a CUDA device: loaded bit for bit, drawn in place without large temporaries."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import OctavoError
from octavo.kernels.quantise import dequantise_f4_rows
from octavo.model.checkpoint import Checkpoint
from octavo.model.loading import load_parameters
from octavo.model.memory import available_memory, check_memory
from octavo.model.presets import mini
from octavo.model.random_weights import fill_random, randomise
from tests.checkpoint_files import parameter_tensors
from tests.tokenizer_data import MINI

CUDA = torch.device("cuda")


def test_loading_equals_loading_on_the_host() -> None:
    host = parameter_tensors(mini(), lambda name: True, range(2, 5), range(1, 3))
    device = {name: torch.empty_like(tensor, device=CUDA) for name, tensor in host.items()}
    device["head.weight"] = device["head.weight"].float()
    for parameters in (host, device):
        load_parameters(parameters, Checkpoint(MINI), experts=range(2, 5), draft_experts=range(1, 3))
    host["head.weight"] = host["head.weight"].float()
    assert len(host) > 500
    for name, tensor in host.items():
        assert torch.equal(tensor.view(torch.uint8), device[name].cpu().view(torch.uint8)), name


def test_random_values_are_repeatable_and_finite() -> None:
    def draw() -> dict[str, torch.Tensor]:
        parameters = parameter_tensors(mini(), lambda name: True)
        parameters = {name: torch.empty_like(tensor, device=CUDA) for name, tensor in parameters.items()}
        randomise(parameters, 3)
        return parameters

    first, second = draw(), draw()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
        assert tensor.dtype == torch.uint8 or tensor.float().isfinite().all(), name


def test_random_expert_at_the_released_size() -> None:
    """11.8 million values in pieces of 4 million: the temporaries stay below 256 MiB whatever the stack holds."""
    codes = torch.empty(5120, 1152, dtype=torch.uint8, device=CUDA)
    scale = torch.empty(5120, 72, dtype=torch.uint8, device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fill_random("layers.0.ffn.experts.0.w2.weight", codes, scale, 0)
    assert torch.cuda.max_memory_allocated() - before < 256 << 20
    # E2M1 rounds by up to a third of a value.
    assert float(dequantise_f4_rows(codes, scale).square().mean().sqrt()) == pytest.approx(0.67 / 2304**0.5, rel=0.05)


def test_memory_of_the_device() -> None:
    total = torch.cuda.get_device_properties(CUDA).total_memory
    assert 0 < available_memory(CUDA) <= total
    with pytest.raises(OctavoError, match=r"cuda: .* GiB are needed"):
        check_memory(2 * total, CUDA)
