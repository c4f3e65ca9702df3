"""Launches of the products with F8 weights, and what is asked of rows and weights before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.quantise import GROUP_Q8
from octavo.kernels.triton_backend.device import multiprocessors
from octavo.kernels.triton_backend.linear_kernels import BLOCK, LARGEST_SCALE, multiply, multiply_pair, multiply_two
from octavo.kernels.triton_backend.linear_steps import dequantise, prepare_rows, sum_parts, sum_parts_of_pair
from octavo.kernels.triton_backend.linear_tiles import Launch, choose_share

_BLOCK: int = BLOCK.value
COLUMNS = 1024
"""Channels of a row that a program of elementwise kernels takes, at most."""
_NUMBERS = 512
_GROUPS = 8


def refuse_rows(operator: str, x: Tensor) -> None:
    """Raise :class:`TypeError` for rows that are not BF16."""
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"{operator}, backend triton: rows are {x.dtype}; allowed: torch.bfloat16. Use numerics reference."
        )


def refuse_large_scales(weights: Mapping[str, Tensor], mine: Callable[[str], bool]) -> str | None:
    """Which F8 weight has a scale that ``linear_kernels`` cannot bear. Waits for the device once.

    ``mine`` says of a weight's name, without its ending, whether the operator multiplies by it.
    """
    names = [name.removesuffix(".weight") for name, weight in weights.items() if weight.dtype == torch.float8_e4m3fn]
    scales = {f"{name}.scale": weights[f"{name}.scale"] for name in names if mine(name)}
    largest = torch.stack([scale.max() for scale in scales.values()]).tolist() if scales else []
    for name, byte in zip(scales, largest, strict=True):
        if byte > LARGEST_SCALE:
            return f"{name} has the scale byte {byte}: allowed are bytes up to {LARGEST_SCALE}, which are 2^7"
    return None


def multiply_few(launch: Launch, x: Tensor, weight: Tensor, scale: Tensor, groups: int, quantised: bool) -> Tensor:
    """x W by groups: x [R, groups * in] BF16, weight [groups * out, in] E4M3 -> [R, groups * out] BF16.

    ``quantised`` says that x goes through Q8.
    """
    source, kind = prepare(launch, x.view(-1, weight.shape[1]), quantised)
    return multiply_prepared(launch, source.view(x.shape[0], -1), kind, weight, scale, groups)


def prepare(launch: Launch, x: Tensor, quantised: bool) -> tuple[Tensor, str]:
    """The rows that a product reads, and what is left to do to them: INPUT of ``load_rows``."""
    if launch.prepared:
        return prepared_rows(x, quantised, fragments=True), "prepared"
    return x, "q8" if quantised else "given"


def multiply_prepared(launch: Launch, x: Tensor, kind: str, weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """As :func:`multiply_few`, of rows [R, groups * in] that are as ``kind`` says."""
    rows, (outputs, channels) = x.shape[0], weight.shape
    grid_rows, tiles, blocks = _tiles(launch, rows, outputs // groups, channels)
    share = choose_share(launch, grid_rows * tiles * groups, blocks, multiprocessors(x.device))
    splits = -(-blocks // share)
    result = x.new_empty(rows, outputs)
    target = result if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    words, by_words = scale_words(scale, channels)
    multiply[(grid_rows, tiles * groups, splits)](
        x,
        code_words(weight),
        words,
        target,
        rows,
        channels,
        x.stride(0),
        x.shape[1] // groups,
        channels // 4,
        words.shape[1],
        outputs // groups,
        outputs,
        share,
        **_cut(launch, kind, channels, by_words),
    )
    if splits > 1:
        size = result.numel()
        sum_parts[(triton.cdiv(size, _NUMBERS),)](
            target, result, splits, size, MOST=most_parts(splits), NUMBERS=_NUMBERS, launch_pdl=True
        )
    return result


def multiply_both(launch: Launch, x: Tensor, kind: str, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor) -> Tensor:
    """Two products of the same rows, in parts that are still to be added: [splits, R, 2, out] F32."""
    rows, (outputs, channels) = x.shape[0], w1.shape
    grid_rows, tiles, blocks = _tiles(launch, rows, outputs, channels)
    share = choose_share(launch, grid_rows * tiles, blocks, multiprocessors(x.device))
    splits = -(-blocks // share)
    parts = torch.empty(splits, rows, 2, outputs, dtype=torch.float32, device=x.device)
    first_scales, by_words = scale_words(s1, channels)
    second_scales, _ = scale_words(s3, channels)
    multiply_two[(grid_rows, tiles, splits)](
        x,
        code_words(w1),
        first_scales,
        code_words(w3),
        second_scales,
        parts,
        rows,
        channels,
        x.stride(0),
        channels // 4,
        first_scales.shape[1],
        outputs,
        share,
        **_cut(launch, kind, channels, by_words),
    )
    return parts


def multiply_pair_few(
    launch: Launch, x: Tensor, weight_a: Tensor, scale_a: Tensor, weight_b: Tensor, scale_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Two products of rows x [R, in] BF16 that go through Q8, by weights [out, in] E4M3 of any numbers of outputs.

    -> [R, out_a] and [R, out_b] BF16. Inputs are split as for one matrix with the outputs of both; split alike, each
    result has the bits of :func:`multiply_few`.
    """
    source, kind = prepare(launch, x, quantised=True)
    rows, (first, channels), second = x.shape[0], weight_a.shape, weight_b.shape[0]
    grid_rows, first_tiles, blocks = _tiles(launch, rows, first, channels)
    _, second_tiles, _ = _tiles(launch, rows, second, channels)
    tiles = first_tiles + second_tiles
    share = choose_share(launch, grid_rows * tiles, blocks, multiprocessors(x.device))
    splits = -(-blocks // share)
    results = x.new_empty(rows, first), x.new_empty(rows, second)
    parts = results if splits == 1 else tuple(x.new_empty(splits, *r.shape, dtype=torch.float32) for r in results)
    first_scales, by_words = scale_words(scale_a, channels)
    second_scales, _ = scale_words(scale_b, channels)
    multiply_pair[(grid_rows, tiles, splits)](
        source,
        code_words(weight_a),
        first_scales,
        parts[0],
        code_words(weight_b),
        second_scales,
        parts[1],
        rows,
        channels,
        source.stride(0),
        channels // 4,
        first_scales.shape[1],
        first,
        second,
        share,
        **_cut(launch, kind, channels, by_words),
    )
    if splits > 1:
        sizes = [result.numel() for result in results]
        sum_parts_of_pair[(sum(triton.cdiv(size, _NUMBERS) for size in sizes),)](
            parts[0],
            results[0],
            parts[1],
            results[1],
            splits,
            *sizes,
            MOST=most_parts(splits),
            NUMBERS=_NUMBERS,
            launch_pdl=True,
        )
    return results


def prepared_rows(x: Tensor, quantised: bool, fragments: bool) -> Tensor:
    """x [N, C] BF16 -> [N, C], or with ``fragments`` [N, C up to 128] in fragment order; ``quantised`` through Q8."""
    rows, channels = x.shape
    padded = padded_width(channels) if fragments else channels
    target = x.new_empty(rows, padded)
    columns = min(COLUMNS, triton.next_power_of_2(padded))
    prepare_rows[(rows, triton.cdiv(padded, columns))](
        x.contiguous(), target, channels, padded, ROUND=quantised, FRAGMENTS=fragments, COLUMNS=columns, launch_pdl=True
    )
    return target


def bf16_weight(weight: Tensor, scale: Tensor, weight_bf16: Tensor | None = None) -> Tensor:
    """The weight in BF16 that was given, or else made of F8 weight [out, in] and tile scales, exact."""
    if weight_bf16 is not None:
        return weight_bf16
    return dequantise_into(weight.new_empty(weight.shape, dtype=torch.bfloat16), weight, scale)


def dequantise_into(target: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """:func:`bf16_weight` into a contiguous tensor of that shape, which it returns."""
    outputs, channels = weight.shape
    dequantise[(triton.cdiv(channels, _GROUPS * GROUP_Q8), scale.shape[0])](
        code_words(weight), scale.contiguous(), target, outputs, channels // 4, scale.shape[1], GROUPS=_GROUPS
    )
    return target


def most_parts(splits: int) -> int:
    """For how many parts the kernel is compiled that adds ``splits`` of them: one kernel for several numbers."""
    return 1 if splits == 1 else -(-splits // 4) * 4


def padded_width(channels: int) -> int:
    """Of rows in fragment order."""
    return -(-channels // _BLOCK) * _BLOCK


def code_words(weight: Tensor) -> Tensor:
    """Four codes a word: [out, in] E4M3 -> [out, in / 4] int32, the same memory."""
    return weight.contiguous().view(torch.int32)


def scale_words(scale: Tensor, channels: int) -> tuple[Tensor, bool]:
    """Four scales a word, [tiles, in / 128] int32, if rows of weights are whole blocks, else as they are, uint8."""
    by_words = channels % _BLOCK == 0
    return scale.contiguous().view(torch.int32) if by_words else scale.contiguous(), by_words


def _cut(launch: Launch, kind: str, channels: int, by_words: bool) -> dict[str, Any]:
    """What all products are told of how they are cut."""
    return {
        "INPUT": kind,
        "WHOLE": channels % (_BLOCK * launch.blocks) == 0,
        "WORDS_OF_SCALES": by_words,
        "ROWS": launch.rows,
        "OUTPUTS": launch.outputs,
        "BLOCKS": launch.blocks,
        "WARPS": launch.warps,
        # One less with scales that are read as bytes: each takes the shared memory of a word.
        "STAGES": launch.stages if by_words else launch.stages - 1,
        "num_warps": launch.warps,
        "launch_pdl": True,
    }


def _tiles(launch: Launch, rows: int, outputs: int, channels: int) -> tuple[int, int, int]:
    """Tiles of rows, tiles of outputs, and blocks of inputs."""
    return -(-rows // launch.rows), -(-outputs // launch.outputs), -(-channels // _BLOCK)
