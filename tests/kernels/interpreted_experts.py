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
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from octavo.kernels.experts import choose_experts
from octavo.kernels.experts import experts as reference
from octavo.kernels.numerics import blocked_matmul
from octavo.kernels.quantise import round_q8
from octavo.kernels.triton_backend import (
    expert_few,
    expert_few_kernels,
    expert_products,
    expert_routing,
    experts,
)
from octavo.kernels.triton_backend.expert_tiles import WIDE_TILES, Launch, Tile, Wide, choose_few
from octavo.kernels.triton_backend.expert_wide import round_pairs_in_order
from octavo.kernels.triton_backend.expert_wide_kernel import MORE
from tests.kernels.batches import Batch, Request, random_batch
from tests.kernels.cases import CASES, Arguments
from tests.kernels.draw import MINI, WIDE, Size
from tests.kernels.interpreted_linear import round_rows_q8
from tests.kernels.run_interpreted import launch_one_after_another, pretend_to_have_processors
from tests.kernels.tolerances import LARGEST

TYPICAL = 2.0**-7
"""Median over rows: results are truncated to BF16 here, so that every value may be off by a step."""
_LAUNCH = Launch(warps=4, stages=2, programs=1)
_SMALL = Tile(rows=16, gate_and_up=_LAUNCH, down=_LAUNCH, outputs=128)
_WIDE_LAUNCH = Launch(warps=8, blocks=2, stages=2, programs=1)
_LARGE = Tile(rows=32, gate_and_up=_WIDE_LAUNCH, down=_WIDE_LAUNCH, outputs=256)


def main(long_form: bool) -> None:
    replace_what_the_interpreter_lacks()
    for size, name, batch, tile in (
        (MINI, "experts_all", random_batch(1, seed=1), _SMALL),
        (MINI, "experts_all", random_batch(29, seed=3), _SMALL),
        (MINI, "experts_of_one_rank", random_batch(77, seed=5), _LARGE),
        (MINI, "experts_all", Batch((), dead=9), _LARGE),
        (WIDE, "experts_of_one_rank", random_batch(11, seed=4), _LARGE),
        *(((WIDE, "experts_all", random_batch(96, seed=7), _LARGE),) if long_form else ()),
    ):
        error = compare(size, name, batch, tile)
        print(f"{size.name} {name}, {batch.rows} rows, tiles of {tile.rows}: {error:.1e}", flush=True)
    for size, name, batch in (
        (MINI, "experts_all", random_batch(1, seed=1)),
        (MINI, "experts_of_one_rank", random_batch(4, seed=4)),
        (MINI, "experts_all", Batch((), dead=4)),
        *((WIDE, "experts_all", random_batch(rows, seed=7)) for rows in ((1, 3, 4) if long_form else ())),
    ):
        print(f"{size.name} {name}, {batch.rows} rows, few: {compare_few(size, name, batch):.1e}", flush=True)
    check_gated(7, 384, 1)
    check_gated(7, 384, 4)
    for rows in (70, 500, 1100):
        for _, tile in WIDE_TILES:
            check_wide_order(tile, rows)
    check_ties(Batch((Request(0, 0, 5),)))


def compare(size: Size, name: str, batch: Batch, tile: Tile) -> float:
    """The largest relative error of a row; raises where a step before the products differs at all."""
    given, logits, local = draw_and_route(size, name, batch)
    resident = given["w1"].shape[0]
    rounded, counts = experts.round_inputs(given["x"], resident)
    check_rounded(rounded, given, size)
    chosen, weights = check_choice(logits, given, local, counts, True)
    assert torch.equal(counts.long(), torch.bincount(local[local >= 0], minlength=resident))
    work = experts.place(chosen, counts, tile)
    check_order(work, local)
    hidden = experts.multiply_gate_and_up(
        rounded, weights, work, given["w1"], given["s1"], given["w3"], given["s3"], given["limit"]
    )
    return error_of(experts.sum_results(chosen, experts.multiply_down(hidden, work, given["w2"], given["s2"])), given)


def compare_few(size: Size, name: str, batch: Batch) -> float:
    """As :func:`compare`, of the kernels for few rows."""
    given, logits, local = draw_and_route(size, name, batch)
    rounded, parts, counts = experts.round_and_score(given["x"], given["gate"], given["w1"].shape[0])
    check_rounded(rounded, given, size)
    assert not counts.any()
    live = given["live"]
    torch.testing.assert_close(parts.sum(0)[live], logits[live], rtol=1e-4, atol=1e-5)
    chosen, weights = check_choice(parts, given, local, counts, False)
    assert not counts.any()
    form = choose_few(batch.rows)
    assert form is not None
    matrices = given["w1"], given["s1"], given["w3"], given["s3"]
    hidden = expert_few.multiply_gate_and_up_few(form, rounded, chosen, weights, *matrices, given["limit"])
    return error_of(expert_few.multiply_down_and_sum(form, hidden, chosen, given["w2"], given["s2"]), given)


def check_wide_order(tile: Wide, rows: int) -> None:
    """Tiles and rounded rows of a step whose experts get from no row to many."""
    random = torch.Generator().manual_seed(rows)
    local = torch.tensor([[-1, 0, 1, 2, 2, 2, 3]])[0, torch.randint(7, (rows, 2), generator=random)]
    chosen, counts = local.int(), torch.bincount(local[local >= 0], minlength=5).int()
    work = experts.place(chosen, counts, tile)
    check_order(work, local)
    x = torch.randn(rows, 256, generator=random).bfloat16()
    rounded = in_channel_order(round_pairs_in_order(x, work.order, work.totals).float())
    pairs = int(work.totals[1])
    assert torch.equal(rounded[:pairs], round_q8(x[work.order[:pairs].long() // 2]).float() * 2.0**64)
    print(f"{rows} rows in order: {int(work.totals[0])} tiles of {tile.rows} and more", flush=True)


def check_gated(pairs: int, channels: int, at_once: int) -> None:
    """``gate_pairs`` on what the products of a tile would have written, to the bit but for single codes; no row beyond
    the last pair is touched."""
    random = torch.Generator().manual_seed(pairs)
    parts = torch.randn(pairs + 3, 2, channels, generator=random).bfloat16() * 8
    weights = torch.rand(pairs + 3, 1, generator=random)
    order = torch.randperm(pairs + 3, generator=random).int()
    hidden = torch.full((pairs + 3, channels), torch.nan, dtype=torch.bfloat16)
    totals = torch.tensor([2, pairs], dtype=torch.int32)
    for_launch = expert_products.gate_pairs[(3, -(-channels // 256))]
    for_launch(parts, weights, order, totals, hidden, 10.0, channels=channels, ROWS=at_once, COLUMNS=256)
    gate, up = parts[:pairs].float().unbind(1)
    product = weights[order[:pairs].long()] * (F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0))
    expected = round_q8(product.bfloat16()).float() * 2.0**64
    found = in_channel_order(hidden[:pairs].float())
    apart = (found - expected).abs() > 2.0**-3 * expected.abs()  # silu may differ by a bit, and a code move by a step
    assert apart.double().mean() < 1e-3 and hidden[pairs:].isnan().all()
    print(f"gates of {pairs} pairs, {channels} channels", flush=True)


def draw_and_route(size: Size, name: str, batch: Batch) -> tuple[Arguments, Tensor, Tensor]:
    """Arguments whose dead rows are NaN, the router's product, and the choice that the reference makes of it.

    The latter as local numbers, -1 for other ranks' and dead rows.
    """
    given = next(case for case in CASES if case.name == name).arguments(batch, size, torch.bfloat16)
    live, resident = given["live"], given["w1"].shape[0]
    given["x"][~live] = torch.nan
    logits = blocked_matmul(given["x"].float(), given["gate"].float())
    expected, _ = choose_experts(logits, *routing_of(given), given["top_k"], given["route_scale"])
    local = expected - given["first_expert"]
    return given, logits, torch.where((local >= 0) & (local < resident) & live.unsqueeze(1), local, -1)


def routing_of(given: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return given["live"], given["image"], given["bias"], given["bias_vl"]


def check_rounded(rounded: Tensor, given: Arguments, size: Size) -> None:
    """To the bit."""
    x, live = given["x"], given["live"]
    assert torch.equal(in_channel_order(rounded.float())[live][:, : size.hidden], round_q8(x[live]).float() * 2.0**64)


def check_choice(logits: Tensor, given: Arguments, local: Tensor, counts: Tensor, count: bool) -> tuple[Tensor, Tensor]:
    """What the kernel chooses: the expected experts ``local``, and weights as near as sums in another order are."""
    live, choice = given["live"], (given["top_k"], given["route_scale"])
    chosen, weights = experts.choose(logits, *routing_of(given), counts, given["first_expert"], *choice, count=count)
    assert torch.equal(chosen.long(), local), (chosen, local)
    _, expected = choose_experts(logits if logits.dim() == 2 else logits.sum(0), *routing_of(given), *choice)
    torch.testing.assert_close(weights[live], expected[live], rtol=1e-5, atol=0)
    return chosen, weights


def error_of(result: Tensor, given: Arguments) -> float:
    """The largest relative error of a row, none above the bounds; dead rows must be zero."""
    live, actual = given["live"], result.double()
    exact = reference(**{**given, "x": given["x"].masked_fill(~live.unsqueeze(1), 0.0)})
    assert not actual[~live].any()
    size_of_rows = torch.linalg.vector_norm(exact, dim=1)
    errors = torch.linalg.vector_norm(actual - exact, dim=1)
    relative = errors / size_of_rows.clamp_min(1e-30)
    assert (relative <= LARGEST["experts"]).all() and (relative <= TYPICAL).double().mean() >= 0.5, relative
    return float(relative.max())


def check_order(work: experts.Work, local: Tensor) -> None:
    """Every resident pair stands once in the tiles of its expert, in order of their numbers; tiles are as few as their
    rows allow, and the largest come first."""
    tile, flat = work.tile, local.flatten()
    most = tile.rows + (MORE.value if isinstance(tile, Wide) else 0)
    count, pairs = work.totals.tolist()
    tiles = work.tiles[:count].tolist()
    sizes = [high - low for _, low, high in tiles]
    assert all(0 < size <= most for size in sizes), sizes
    assert [-(-size // 32) for size in sizes] == sorted((-(-size // 32) for size in sizes), reverse=True), sizes
    expected = {int(e): (flat == e).nonzero().squeeze(1).tolist() for e in flat[flat >= 0].unique()}
    seen: dict[int, list[int]] = {}
    for expert, low, high in sorted(tiles, key=lambda one: one[1]):
        seen.setdefault(expert, []).extend(work.order[low:high].tolist())
    assert seen == expected and pairs == sum(sizes), (seen, expected)
    for expert, mine in expected.items():
        fewest = max(1, -(-(len(mine) - (most - tile.rows)) // tile.rows))
        assert sum(one[0] == expert for one in tiles) == fewest, (expert, len(mine))


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
    products = {"add_product": add_product, "through_bf16": through_bf16}
    vars(expert_routing).update(libdevice=libdevice, multiply=multiply)
    vars(expert_products).update(decode_words=decode_words, **products)
    vars(expert_few_kernels).update(round_rows_q8=round_rows_q8, **products)
    launch_one_after_another(
        (expert_routing, expert_products, expert_few_kernels),
        {
            experts: ("route", "score_rows", "sum_pairs"),
            expert_few: ("gate_and_up_few", "down_and_sum"),
        },
    )
    pretend_to_have_processors(3)


def multiply(weights: Any, x: Any) -> Any:
    return tl.dot(weights.to(tl.float32), x.to(tl.float32))


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


if __name__ == "__main__":
    main(sys.argv[1:] == ["long"])
