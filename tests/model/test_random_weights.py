"""Random weights: repeatable by name, equal however they come, and of sane size."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest
import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.kernels.quantise import dequantise_f4_rows, dequantise_q8, dequantise_tiles
from octavo.model.layout import expected_tensors
from octavo.model.presets import mini, released
from octavo.model.random_weights import fill_random, randomise
from tests.checkpoint_files import parameter_tensors


def filled(name: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """An F8 matrix and its tile scales."""
    weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows // 32, columns // 32, dtype=torch.uint8)
    fill_random(name, weight, scale, seed)
    return weight, scale


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_seed_and_name_decide() -> None:
    def values(name: str, seed: int) -> str:
        return digest(filled(name, 64, 128, seed)[0])

    again = values("layers.0.attn.wkv.weight", 0)
    assert values("layers.0.attn.wkv.weight", 0) == again
    others = ("layers.0.attn.wkv.weight", 1), ("layers.1.attn.wkv.weight", 0), ("mtp.0.attn.wkv.weight", 0)
    assert len({again, *(values(name, seed) for name, seed in others)}) == 4


def test_every_tensor_of_the_layout_has_a_distribution() -> None:
    """The names of the released model with one expert a layer, on small stand-ins."""
    names = [name for name in expected_tensors(released()) if not re.search(r"\.experts\.[1-9]", name)]
    scales = {name for name in names if name.endswith(".scale")}
    plain = 0
    for name in names:
        if name.removesuffix("weight") + "scale" in scales:
            if ".experts." in name:
                fill_random(name, torch.empty(32, 16, dtype=torch.uint8), torch.empty(32, 1, dtype=torch.uint8), 0)
            elif ".engram.embed." in name:
                fill_random(name, torch.empty(1, 32).to(torch.float8_e4m3fn), torch.empty(1, 1, dtype=torch.uint8), 0)
            else:
                filled(name, 32, 32)
        elif name not in scales:
            tensor = torch.full((4, 4), torch.nan)
            fill_random(name, tensor, None, 0)
            assert tensor.isfinite().all(), name
            plain += 1
    assert plain + 2 * len(scales) == len(names)
    assert plain > 500


def test_unknown_name() -> None:
    with pytest.raises(OctavoError, match=r"layers\.0\.attn\.wx\.weight: no tensor of the layout"):
        fill_random("layers.0.attn.wx.weight", torch.empty(2, 2), None, 0)


def test_scale_belongs_to_quantised_tensors() -> None:
    with pytest.raises(OctavoError, match=r"norm\.weight: torch\.float32 with a scale beside it"):
        fill_random("norm.weight", torch.empty(32), torch.empty(1, dtype=torch.uint8), 0)
    with pytest.raises(OctavoError, match=r"wkv\.weight: torch\.float8_e4m3fn without a scale beside it"):
        fill_random("layers.0.attn.wkv.weight", torch.empty(32, 32, dtype=torch.float8_e4m3fn), None, 0)


def root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def test_quantised_matrices_use_their_range() -> None:
    """Scales are the smallest powers of two that hold each block: its largest code lies in the upper half."""
    weight, scale = filled("layers.0.attn.wq_b.weight", 96, 256)
    largest = weight.float().abs().view(3, 32, 8, 32).amax((1, 3))
    assert largest.shape == scale.shape
    assert ((largest >= 216) & (largest <= 448)).all()
    # 0.95 / sqrt(256), within the sampling error of 24,576 values (3 sigma: 1.4 %) and E4M3 rounding
    assert root_mean_square(dequantise_tiles(weight, scale)) == pytest.approx(0.95 / 16, rel=0.02)

    codes, scale = torch.empty(96, 128, dtype=torch.uint8), torch.empty(96, 8, dtype=torch.uint8)
    fill_random("layers.0.ffn.experts.3.w2.weight", codes, scale, 0)
    values = dequantise_f4_rows(codes, scale)
    # E2M1 rounds by up to a third of a value
    assert root_mean_square(values) == pytest.approx(0.67 / 16, rel=0.05)
    counts = Counter((codes & 15).flatten().tolist())
    assert len(counts) >= 15, "all codes but perhaps minus zero"

    table, scale = torch.empty(500, 64, dtype=torch.float8_e4m3fn), torch.empty(500, 2, dtype=torch.uint8)
    fill_random("layers.1.engram.embed.weight", table, scale, 0)
    assert root_mean_square(dequantise_q8(table, scale)) == pytest.approx(0.35, rel=0.02)
    assert table.float().abs().view(500, 2, 32).amax(2).min() >= 216


def test_embedding_and_norms() -> None:
    embedding = torch.empty(4096, 64, dtype=torch.bfloat16)
    fill_random("embed.weight", embedding, None, 0)
    assert root_mean_square(embedding) == pytest.approx(1.0, rel=0.01)
    norm = torch.empty(5120, dtype=torch.bfloat16)
    fill_random("layers.7.attn_norm.weight", norm, None, 0)
    assert float(norm.float().mean()) == pytest.approx(0.025, rel=0.01)


def test_wider_parameters_hold_stored_values() -> None:
    """A float32 head is what a BF16 head in a file would be."""
    narrow, wide = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(64, 32)
    fill_random("head.weight", narrow, None, 5)
    fill_random("head.weight", wide, None, 5)
    assert torch.equal(narrow.float(), wide)
    bias = torch.empty(4096)
    fill_random("layers.0.ffn.gate.bias", bias, None, 5)
    assert not torch.equal(bias, bias.bfloat16().float()), "stored as F32, so not rounded to BF16"


def test_experts_are_the_same_on_every_rank() -> None:
    def stacks(experts: range) -> dict[str, Tensor]:
        parameters = parameter_tensors(mini(), lambda name: ".3.ffn.experts." in name, experts=experts)
        randomise(parameters, 9, experts=experts)
        return parameters

    whole, part = stacks(range(8)), stacks(range(2, 5))
    assert len(part) == 6
    for name, tensor in part.items():
        assert torch.equal(tensor, whole[name][2:5]), name
    first = whole["layers.3.ffn.experts.w1.weight"]
    assert not torch.equal(first[0], first[1])


def test_large_tensors_are_filled_in_pieces() -> None:
    """Pieces continue one stream of values: no piece repeats another, and all rows are written."""
    weight, scale = filled("layers.0.attn.wo_b.weight", 2048, 4096)
    rows = {digest(row) for row in weight}
    assert len(rows) == 2048
    assert weight.float().isfinite().all()
    assert scale.min() > 100
