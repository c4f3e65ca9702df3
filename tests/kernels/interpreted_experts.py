"""Triton's interpreter runs ``experts``: python -m tests.kernels.interpreted_experts, with TRITON_INTERPRET=1.

It has no PTX, no libdevice and no products of BF16, and truncates where F32 becomes BF16. These few functions are
replaced by what they mean; indices, masks, permutations, orders and sums are those of the kernels. Prints the largest
relative error against the reference.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octavo.kernels.experts import choose_experts
from octavo.kernels.experts import experts as reference
from octavo.kernels.numerics import blocked_matmul
from octavo.kernels.quantise import round_q8
from octavo.kernels.triton_backend import expert_products, expert_routing, experts
from octavo.kernels.triton_backend.expert_tiles import Launch, Tile
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.cases import CASES
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.run_interpreted import pretend_to_have_processors
from tests.kernels.tolerances import LARGEST

TYPICAL = 2.0**-7
"""Median over rows: results are truncated to BF16 here, so that every value may be off by a step."""
_LAUNCH = Launch(warps=4, stages=2, programs=1)
_SMALL = Tile(rows=16, gate_and_up=_LAUNCH, down=_LAUNCH, outputs=128)
_WIDE_LAUNCH = Launch(warps=8, blocks=2, stages=2, programs=1)
_LARGE = Tile(rows=32, gate_and_up=_WIDE_LAUNCH, down=_WIDE_LAUNCH, outputs=256)


def main(long_form: bool) -> None:
    replace_what_the_interpreter_lacks()
    for size, name, batch, tile, tail in (
        (MINI, "experts_all", random_batch(1, seed=1), _SMALL, None),
        (MINI, "experts_all", random_batch(29, seed=3), _SMALL, None),
        (MINI, "experts_of_one_rank", random_batch(77, seed=5), _LARGE, _SMALL),
        (MINI, "experts_all", Batch((), dead=9), _LARGE, _SMALL),
        (WIDE, "experts_of_one_rank", random_batch(29, seed=4), _LARGE, None),
        *(((WIDE, "experts_all", random_batch(96, seed=7), _LARGE, _SMALL),) if long_form else ()),
    ):
        error = compare(size, name, batch, tile, tail)
        print(f"{size.name} {name}, {batch.rows} rows, tiles of {tile.rows}: {error:.1e}", flush=True)
    check_ties(Batch((Request(0, 0, 5),)))


def compare(size: Size, name: str, batch: Batch, tile: Tile, tail: Tile | None) -> float:
    """The largest relative error of a row; raises where a step before the products differs at all."""
    given = next(case for case in CASES if case.name == name).arguments(batch, size, torch.bfloat16)
    x, resident = given["x"], given["w1"].shape[0]
    x[~given["live"]] = torch.nan
    rounded, counts = experts.round_inputs(x, resident)
    live = given["live"]
    assert torch.equal(in_channel_order(rounded.float())[live][:, : size.hidden], round_q8(x[live]).float() * 2.0**64)

    logits = blocked_matmul(x.float(), given["gate"].float())
    routing = given["live"], given["image"], given["bias"], given["bias_vl"]
    expected, expected_weights = choose_experts(logits, *routing, given["top_k"], given["route_scale"])
    chosen, weights = experts.choose(
        logits, *routing, counts, given["first_expert"], given["top_k"], given["route_scale"]
    )
    local = expected - given["first_expert"]
    local = torch.where((local >= 0) & (local < resident) & live.unsqueeze(1), local, -1)
    assert torch.equal(chosen.long(), local), (chosen, local)
    torch.testing.assert_close(weights[live], expected_weights[live], rtol=1e-5, atol=0)
    assert torch.equal(counts.long(), torch.bincount(local[local >= 0], minlength=resident))

    work = experts.place(chosen, counts, tile, tail)
    check_order(work, local, tile, tail)
    hidden = experts.multiply_gate_and_up(
        rounded, weights, work, given["w1"], given["s1"], given["w3"], given["s3"], given["limit"]
    )
    actual = experts.sum_results(chosen, experts.multiply_down(hidden, work, given["w2"], given["s2"])).double()
    exact = reference(**{**given, "x": x.masked_fill(~live.unsqueeze(1), 0.0)})
    assert not actual[~live].any()
    size_of_rows = torch.linalg.vector_norm(exact, dim=1)
    errors = torch.linalg.vector_norm(actual - exact, dim=1)
    relative = errors / size_of_rows.clamp_min(1e-30)
    assert (relative <= LARGEST["experts"]).all() and (relative <= TYPICAL).double().mean() >= 0.5, relative
    return float(relative.max())


def check_order(work: experts.Work, local: Tensor, tile: Tile, tail: Tile | None) -> None:
    """Every resident pair stands once in the tiles of its expert, in order of their numbers, and tiles are full."""
    seen: dict[int, list[int]] = {}
    for part, table, count in work.parts:
        for expert, low, high in table[: int(count)].tolist():
            assert 0 < high - low <= part.rows
            if tail is not None:
                assert part is tail or high - low > tail.rows
            seen.setdefault(expert, []).extend(work.order[low:high].tolist())
    flat = local.flatten()
    expected = {int(e): (flat == e).nonzero().squeeze(1).tolist() for e in flat[flat >= 0].unique()}
    assert seen == expected, (seen, expected)


def check_ties(batch: Batch) -> None:
    """Of equal scores the lower numbers, whatever the rows."""
    counts = torch.zeros(300, dtype=torch.int32)
    routing = batch.live, batch.image, torch.zeros(300), None
    chosen, weights = experts.choose(torch.ones(batch.rows, 300), *routing, counts, 0, 6, 1.5)
    assert torch.equal(chosen, torch.arange(6, dtype=torch.int32).expand(batch.rows, 6))
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))
    assert counts[:6].eq(batch.rows).all() and not counts[6:].any()
    print("ties: lower numbers first", flush=True)


def in_channel_order(fragments: Tensor) -> Tensor:
    """Out of fragment order, as ``expert_routing`` defines it channel by channel: [..., C], C a multiple of 128."""
    place = torch.empty(128, dtype=torch.int64)
    for channel in range(128):
        q, w, p, a, b = channel // 32, channel // 8 % 4, channel // 4 % 2, channel // 2 % 2, channel % 2
        place[channel] = 32 * w + 16 * a + 8 * b + 2 * q + p
    return torch.unflatten(fragments, -1, (-1, 128))[..., place].flatten(-2)


def replace_what_the_interpreter_lacks() -> None:
    libdevice = types.SimpleNamespace(exp=lambda x: tl.exp(x), log1p=lambda x: tl.log(1.0 + x))
    vars(expert_routing).update(libdevice=libdevice)
    vars(expert_products).update(decode_words=decode_words, add_product=add_product, _through_bf16=through_bf16)
    vars(experts).update(route=_WithoutOptions(vars(experts)["route"]))
    pretend_to_have_processors(3)


def add_product(total: Any, words: Any, scales: Any, x: Any, WARPS: Any) -> Any:
    weights = expert_products.fragments(words, scales, WARPS)
    return tl.dot(weights.to(tl.float32), x.to(tl.float32), total)


def through_bf16(x: Any) -> Any:
    """To the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


def decode_words(words: Any, factors: Any) -> Any:
    """Nibbles n and n + 4 of a word times a BF16 factor, in F32."""
    factor = (factors << 16).to(tl.float32, bitcast=True)
    pairs = []
    for n in range(4):
        low, high = (_value((words >> (4 * nibble)) & 15) * factor for nibble in (n, n + 4))
        pairs.append(tl.join(low, high))
    return tuple(pairs)


def _value(code: Any) -> Any:
    """Sign, exponent and mantissa where F32 has them: 2^-126 of the value of the code, doubled as often as it takes."""
    magnitude = code & 7
    value = tl.where(magnitude < 4, magnitude * 0.5, (2.0 + (magnitude & 1)) * tl.where(magnitude >= 6, 2.0, 1.0))
    return tl.where(code >= 8, -value, value) * 2.0**-126


class _WithoutOptions:
    """Launches of a kernel without the compiler options that the interpreter does not know."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, enable_reflect_ftz, **kwargs: self.kernel[grid](*args, **kwargs)


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
