"""Holders of parameters, named as in the official checkpoint; one small module per storage class.

Weights keep their storage type: F8 codes, packed F4 codes, scale bytes, BF16. What the model multiplies in F32 (head,
router, ratio-2 compressor) is promoted by the operator (spec/model.md 2).
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.kernels.torch_backend.dequantise import bf16_tiles
from octavo.model.config import SCALE_BLOCK


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Weight(nn.Module):
    """A bare ``weight`` (norms, tables); the operator that uses it takes the tensor."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = parameter(*shape, dtype=dtype)


class Linear(Weight):
    """Unquantised BF16 matrix [out, in]."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight)


class LinearF32(Weight):
    """BF16 matrix [out, in], used as F32."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_f32(x, self.weight)


class TiledWeight(nn.Module):
    """F8 matrix [out, in] with one scale byte for each 32 x 32 tile."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        tiles = (-(-outputs // SCALE_BLOCK), -(-inputs // SCALE_BLOCK))
        self.weight = parameter(outputs, inputs, dtype=torch.float8_e4m3fn)
        self.scale = parameter(*tiles, dtype=torch.uint8)


class HeldInBF16(nn.Module, abc.ABC):
    """A module whose F8 matrices may be held in BF16 too, one above another: exact, and converted once."""

    weight_bf16: Tensor | None
    """[all outputs, in], or None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight_bf16", None, persistent=False)

    @abc.abstractmethod
    def f8_weights(self) -> list[TiledWeight]:
        """The matrices, all with as many inputs, in their order."""

    def hold_bf16(self) -> None:
        """Make room, to be filled when the weights are there."""
        weights = [each.weight for each in self.f8_weights()]
        rows = sum(weight.shape[0] for weight in weights)
        self.weight_bf16 = weights[0].new_empty(rows, weights[0].shape[1], dtype=torch.bfloat16)

    def fill_bf16(self) -> None:
        """Convert the weights, if there is room."""
        if self.weight_bf16 is not None:
            weights = self.f8_weights()
            parts = self.weight_bf16.split([each.weight.shape[0] for each in weights])
            for part, each in zip(parts, weights, strict=True):
                part.copy_(bf16_tiles(each.weight, each.scale))


class DenseF8(TiledWeight, HeldInBF16):
    """An F8 matrix that every row is multiplied by."""

    def f8_weights(self) -> list[TiledWeight]:
        return [self]


class LinearF8(DenseF8):
    """F8 matrix applied to Q8-quantised rows."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_f8(x, self.weight, self.scale, self.weight_bf16)


class PackedExperts(nn.Module):
    """The same F4 matrix of all resident experts: weight [n, out, in / 2], scale [n, out, in / 32], uint8."""

    def __init__(self, count: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = parameter(count, outputs, inputs // 2, dtype=torch.uint8)
        self.scale = parameter(count, outputs, inputs // SCALE_BLOCK, dtype=torch.uint8)
