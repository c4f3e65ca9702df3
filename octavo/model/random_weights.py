"""Random weights with sane statistics, for a checkpoint to be written or for parameters where they are.

Every tensor is drawn from a generator of its own, seeded by (seed, official name): neither order nor the set of other
tensors matters, and ranks with different experts draw one model. Parameters on the CPU get the very values that they
would load from a checkpoint written with the same seed; other devices draw other values.

Means of norms are those published (spec/model.md 2); the rest follows the golden mini model. Embeddings have RMS 1 and
the matrices that write to the streams a reduced gain, so that streams grow by a few per cent a layer at most.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.kernels.quantise import TILE, e8m0_to_float, pack_codes, quantise_q4mx, quantise_q8
from octavo.model.parameters import official_tensors

_PIECE_ELEMENTS = 1 << 22
"""Elements drawn at a time: temporaries are a small multiple of this, however large the tensor."""


@dataclass(frozen=True, slots=True)
class _Normal:
    """Values ``mean + std * normal``, ``std`` divided by sqrt(inputs) where ``per_input``; stored as ``dtype``."""

    std: float
    mean: float = 0.0
    per_input: bool = False
    dtype: torch.dtype = torch.bfloat16


def _gain(value: float) -> _Normal:
    return _Normal(value, per_input=True)


def _norm(mean: float) -> _Normal:
    return _Normal(mean / 10, mean)


def _single(std: float, mean: float = 0.0) -> _Normal:
    return _Normal(std, mean, dtype=torch.float32)


_DISTRIBUTIONS = {
    "embed.weight": _Normal(1.0),
    "head.weight": _gain(3.0),
    "norm.weight": _norm(1.0),
    "image_start": _Normal(1.0),
    "image_end": _Normal(1.0),
    "image_newline": _Normal(1.0),
    "attn_norm.weight": _norm(0.025),
    "ffn_norm.weight": _norm(0.2),
    "attn.wq_a.weight": _gain(1.6),
    "attn.q_norm.weight": _norm(0.97),
    "attn.wq_b.weight": _gain(0.95),
    "attn.wkv.weight": _gain(1.8),
    "attn.kv_norm.weight": _norm(0.4),
    "attn.wo_a.weight": _gain(1.6),
    "attn.wo_b.weight": _gain(0.475),
    "attn.attn_sink": _single(0.55, 1.0),
    # The input has the RMS of attn_norm, 0.025: only a large gain makes gates and head weights differ.
    "attn.compressor.wgate.weight": _gain(60.0),
    "attn.compressor.wkv.weight": _gain(1.8),
    "attn.compressor.norm.weight": _norm(0.6),
    "attn.indexer.wq_b.weight": _gain(1.5),
    "attn.indexer.weights_proj.weight": _gain(5.0),
    "attn.indexer.wk.weight": _gain(1.0),
    "attn.indexer.k_norm.weight": _norm(0.5),
    **{f"hc_{sublayer}_fn": _Normal(1.0, per_input=True, dtype=torch.float32) for sublayer in ("attn", "ffn")},
    **{f"hc_{sublayer}_base": _single(0.66) for sublayer in ("attn", "ffn")},
    **{f"hc_{sublayer}_scale": _single(0.12, 0.79) for sublayer in ("attn", "ffn")},
    "ffn.gate.weight": _gain(2.9),
    # A trained bias deals rows evenly. One of the mini model's size, 0.13, would send most rows to a quarter of the
    # released model's experts.
    "ffn.gate.bias": _single(0.01),
    "ffn.gate.bias_vl": _single(0.01),
    "ffn.experts.w1.weight": _gain(1.95),
    "ffn.experts.w2.weight": _gain(0.67),
    "ffn.experts.w3.weight": _gain(1.95),
    "ffn.shared_experts.w1.weight": _gain(1.5),
    "ffn.shared_experts.w2.weight": _gain(0.52),
    "ffn.shared_experts.w3.weight": _gain(1.5),
    "engram.wkv.weight": _gain(0.9),
    "engram.q_weight": _Normal(0.3, 1.0),
    "engram.k_weight": _Normal(0.3, 1.0),
    "engram.embed.weight": _Normal(0.35),
    "main_proj.weight": _gain(1.0),
    "main_norm.weight": _norm(1.0),
    "markov_head.embed.weight": _Normal(1.0),
    "markov_head.head.weight": _gain(2.0),
    "confidence_head.proj.weight": _gain(1.0),
    "vision.patch_embed.proj.weight": _gain(1.0),
    "vision.patch_embed.proj.bias": _Normal(0.1),
    "vision.attn.wqkv.weight": _gain(1.0),
    "vision.attn.wqkv.bias": _Normal(0.1),
    "vision.attn.wo.weight": _gain(1.0),
    "vision.attn.wo.bias": _Normal(0.1),
    "vision.mlp.w1.weight": _gain(1.0),
    "vision.mlp.w2.weight": _gain(1.0),
    "vision.norm1.weight": _Normal(0.2, 1.0),
    "vision.norm2.weight": _Normal(0.2, 1.0),
    "vision.norm.weight": _Normal(0.2, 1.0),
    "aligner.w1.weight": _gain(1.5),
    "aligner.w1.bias": _Normal(0.02),
    "aligner.w2.weight": _gain(2.0),
    "aligner.w2.bias": _Normal(0.02),
}
"""By official name without numbers; ``layers.N`` and ``mtp.N`` are left out."""


def fill_random(name: str, weight: Tensor, scale: Tensor | None, seed: int) -> None:
    """Fill the tensor with the official ``name`` in place, on its device, together with its ``.scale`` sibling.

    ``scale`` (uint8) is given exactly for quantised tensors: F8 tiles ``[out/32, in/32]``, F4 rows ``[out, in/32]`` of
    a routed expert (``weight`` uint8 ``[out, in/2]``), Engram rows ``[rows, dim/32]``. Other tensors may be of any
    float dtype; values are rounded to the stored one first. Raises :class:`OctavoError` for a name outside the layout.
    """
    short = re.sub(r"^(layers|mtp)\.\d+\.|\b(?:blocks\.)?\d+\.", "", name)
    distribution = _DISTRIBUTIONS.get(short)
    if distribution is None:
        raise OctavoError(f"{name}: no tensor of the layout, so its values have no distribution")
    if (scale is None) == (weight.dtype in (torch.float8_e4m3fn, torch.uint8)):
        raise OctavoError(f"{name}: {weight.dtype} {'without' if scale is None else 'with'} a scale beside it")
    routed = short.startswith("ffn.experts.")
    inputs = weight.shape[-1] * (2 if routed else 1)
    std = distribution.std / inputs**0.5 if distribution.per_input else distribution.std
    generator = torch.Generator(weight.device)
    generator.manual_seed(_tensor_seed(seed, name))

    rows_of = weight if weight.ndim == 2 else weight.unsqueeze(0)
    for first, last in _row_pieces(len(rows_of), inputs):
        values = torch.empty(last - first, inputs, device=weight.device)
        values.normal_(distribution.mean, std, generator=generator)
        if scale is None:
            rows_of[first:last].copy_(values.to(distribution.dtype))
        elif routed:
            codes, scale_bytes = quantise_q4mx(values)
            weight[first:last].copy_(pack_codes(codes))
            scale[first:last].copy_(scale_bytes)
        elif short == "engram.embed.weight":
            codes, scale_bytes = quantise_q8(values)
            weight[first:last].copy_(codes)
            scale[first:last].copy_(scale_bytes)
        else:
            codes, scale_bytes = _quantise_tiles(values)
            weight[first:last].copy_(codes)
            scale[first // TILE : -(-last // TILE)].copy_(scale_bytes)


def randomise(
    parameters: Mapping[str, Tensor],
    seed: int,
    *,
    experts: range | None = None,
    draft_experts: range | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill all ``parameters`` in place, named as for :func:`octavo.model.loading.load_parameters`.

    ``experts`` and ``draft_experts`` say which experts the stacks hold; ``None`` numbers each stack from 0.
    ``progress(done, total)`` is called with bytes of parameters.
    """
    tensors = dict(official_tensors(parameters, experts=experts, draft_experts=draft_experts))
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        if not name.endswith(".scale"):
            fill_random(name, tensor, tensors.get(name.removesuffix("weight") + "scale"), seed)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _row_pieces(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole tiles, about :data:`_PIECE_ELEMENTS` each."""
    step = max(1, _PIECE_ELEMENTS // (columns * TILE)) * TILE
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _quantise_tiles(values: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] F32, out and in multiples of 32 -> codes [out, in] E4M3 and scale bytes [out/32, in/32] uint8."""
    _, row_scale = quantise_q8(values)
    # A tile's largest value needs the largest of its rows' scales: powers of two above keep the order.
    scale = row_scale.view(-1, TILE, row_scale.shape[1]).amax(1)
    factor = e8m0_to_float(scale).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return (values / factor).to(torch.float8_e4m3fn), scale
