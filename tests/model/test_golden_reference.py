"""The numerics, module by module and end to end, against the official code (goldens mode ref).

Module by module every module gets the stored input of prompt p37: BF16 and integer results are equal to the bit,
F32 coefficients within 4 units in the last place (``sigmoid`` is composed from ``exp``, which the official code is
not). One exception: products are summed in F64 and rounded once where the official code sums in F32, so a sum beside a
rounding midpoint can fall on the other side. On p37 that happens once, within attention, and is counted and printed.
End to end such a flip spreads to the values computed from it.

F32 products (mHC mixes, router, head, ratio-2 compressor) are sums whose order is the BLAS's. The goldens come from a
CPU where one thread sums as here; where another CPU sums otherwise, what depends on it is skipped with that reason, and
``test_faithful_elsewhere`` alone judges the whole.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.engram import gates
from octavo.kernels.experts import route
from octavo.kernels.select import candidate_mask, entry_scores
from octavo.model.body import Attention
from octavo.model.inputs import Rows, State, Tokens
from octavo.runtime.assemble import Assembly
from octavo.runtime.runner import Runner
from tests.conftest import ReportCount
from tests.model.mini_run import MiniRun, differing, golden, mini_assembly, relative, ulps

KV_SOURCES = (2, 4, 6)
INDEX_SOURCES = (2, 4, 6, 8)
COEFFICIENT_ULPS = 4
P37 = 37


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    return mini_assembly("reference")


@pytest.fixture(scope="module")
def prefill() -> dict[str, Tensor]:
    return golden("prefill", "reference")


@pytest.fixture(scope="module")
def golden_sums(assembly: Assembly, prefill: dict[str, Tensor]) -> None:
    """Skip where this CPU's BLAS does not sum F32 products as the goldens' machine did."""
    layer = assembly.model.body.layers[0]
    mixed = kernels.mhc_mix(
        prefill["p37.X_in.0"], layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, *layer.sinkhorn
    )
    if ulps(mixed[2], prefill["p37.hc.0.attn.comb"]) > COEFFICIENT_ULPS:
        pytest.skip("this CPU's BLAS sums F32 products in another order than the goldens' machine")


def stored_input(prefill: dict[str, Tensor], layer: int) -> Tensor:
    return prefill.get(f"p37.X_in.{layer}", prefill.get(f"p37.X.{layer - 1}"))  # type: ignore[return-value]


def prompt_rows(assembly: Assembly) -> tuple[Rows, State]:
    """Metadata of the whole prompt p37 in slot 0 of fresh pools; embeddings are not used."""
    runner = Runner(assembly)
    runner.set_pages([(0, page, page) for page in range(assembly.capacity.sizes.pages)])
    positions = torch.arange(P37, dtype=torch.int32)
    zeros = torch.zeros_like(positions)
    live = torch.ones(P37, dtype=torch.bool)
    rows = Rows(torch.empty(P37, 0), zeros, positions, live, ~live, [])
    return rows, runner.pools.state(zeros, positions, zeros)


@torch.no_grad()
@pytest.mark.usefixtures("golden_sums")
def test_mhc(assembly: Assembly, prefill: dict[str, Tensor]) -> None:
    """Mixing, collapsing and expanding around both sublayers of every layer."""
    for index, layer in enumerate(assembly.model.body.layers):
        g = {name.removeprefix("p37."): tensor for name, tensor in prefill.items() if name.startswith("p37.")}
        coefficients = [[g[f"hc.{index}.{sub}.{kind}"] for kind in ("pre", "post", "comb")] for sub in ("attn", "ffn")]
        (attn_pre, attn_post, attn_comb), (_, ffn_post, ffn_comb) = coefficients
        streams = stored_input(prefill, index)
        mixed = kernels.mhc_mix(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, *layer.sinkhorn)
        for actual, expected in zip(mixed, coefficients[0], strict=True):
            assert ulps(actual, expected) <= COEFFICIENT_ULPS, index
        pre = g[f"pre.{index - 1}"] if index else torch.eye(1, 4).repeat(P37, 1)
        attn_in = kernels.mhc_collapse(streams, pre, layer.attn_norm.weight, layer.epsilon)
        assert differing(attn_in, g[f"attn_in.{index}"]) == 0, index

        streams = kernels.mhc_expand(streams, g[f"attn_out.{index}"], attn_post, attn_comb)
        mixed = kernels.mhc_mix(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base, *layer.sinkhorn)
        for actual, expected in zip(mixed, coefficients[1], strict=True):
            assert ulps(actual, expected) <= COEFFICIENT_ULPS, index
        ffn_in = kernels.mhc_collapse(streams, attn_pre, layer.ffn_norm.weight, layer.epsilon)
        assert differing(ffn_in, g[f"ffn_in.{index}"]) == 0, index
        streams = kernels.mhc_expand(streams, g[f"ffn_out.{index}"], ffn_post, ffn_comb)
        assert differing(streams, g[f"X.{index}"]) == 0, index


@torch.no_grad()
def test_attention(assembly: Assembly, prefill: dict[str, Tensor], report_count: ReportCount) -> None:
    """Window latents, entries, keys, scores, selections, candidates to the bit; outputs but one or two rows."""
    rows, state = prompt_rows(assembly)
    selection: tuple[Tensor | None, Tensor | None] = (None, None)
    body, flipped_rows, flips = assembly.model.body, 0, 0
    for index, layer in enumerate(assembly.model.body.layers):
        attention = layer.attn
        frequencies = body.yarn if layer.plan.ratio else body.plain
        x = prefill[f"p37.attn_in.{index}"]
        y, selection = attention(x, selection, frequencies, rows, state)
        expected = prefill[f"p37.attn_out.{index}"]
        flipped_rows += int((y != expected).any(1).sum())
        flips += differing(y, expected)
        assert relative(y, expected).max() < 2e-3, index  # a flip moves one F8 code of a row of 64 to its neighbour
        window = prefill[f"p37.window_kv.{index}"]
        last = torch.arange(P37 - 16, P37)
        assert differing(state.rings[index][0, last % 16], window[last]) == 0, index
        if index in INDEX_SOURCES:
            assert selection[0] is not None
            assert torch.equal(selection[0], prefill[f"p37.index.{index}.selected"]), index
            candidates = selection[1] if layer.plan.reads_candidates else None
            expected = prefill[f"p37.index.{index}.score"]
            check_scores(attention, x, frequencies, rows, state, candidates, expected)
    for source, index in enumerate(KV_SOURCES):
        entries, keys = prefill[f"p37.compress_kv.{index}"], prefill[f"p37.index_k.{index}"]
        assert differing(state.entries[source].flatten(0, 1)[: len(entries)], entries) == 0, index
        assert differing(state.keys[source].flatten(0, 1)[: len(keys)], keys) == 0, index
    report_count("attention outputs of p37 compared, module by module", 10 * P37 * 128, f"{flips} flipped")
    assert flipped_rows <= 2 and flips <= 6
    assert selection[1] is not None
    blocks = torch.arange(P37) // 4
    assert torch.equal((selection[1].unsqueeze(2) == blocks).any(1), prefill["p37.candidate.6.mask"])


def check_scores(
    attention: Attention,
    x: Tensor,
    frequencies: Tensor,
    rows: Rows,
    state: State,
    candidates: Tensor | None,
    expected: Tensor,
) -> None:
    """Scores as given to the top-k: -inf where an entry is invisible or outside the candidates."""
    indexer, plan = attention.indexer, attention.plan
    assert plan.entries is not None
    low = kernels.rms_norm(attention.wq_a(x), attention.q_norm.weight, attention.epsilon)
    query = kernels.index_query(indexer.wq_b(low).unflatten(1, (indexer.heads, -1)), rows.positions, frequencies)
    weights = indexer.weights_proj(x) * indexer.scale
    scores = entry_scores(query, weights, state.keys[plan.entries], state.page_table, rows.slots, rows.positions)
    if candidates is not None:
        scores = scores.masked_fill(~candidate_mask(candidates, indexer.block_size, scores.shape[1]), -torch.inf)
    assert torch.equal(scores, expected), plan.layer


@torch.no_grad()
def test_experts(assembly: Assembly, prefill: dict[str, Tensor]) -> None:
    rows, _ = prompt_rows(assembly)
    for index, layer in enumerate(assembly.model.body.layers):
        module = layer.ffn
        x = prefill[f"p37.ffn_in.{index}"]
        assert differing(module(x, rows), prefill[f"p37.ffn_out.{index}"]) == 0, index
        gate = module.gate
        chosen, weights = route(
            x, rows.live, rows.image, gate.weight, gate.bias, gate.bias_vl, module.top_k, module.route_scale
        )
        expected = prefill[f"p37.moe.{index}.experts"].long()
        order, expected_order = chosen.argsort(1), expected.argsort(1)
        assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order)), index
        expected_weights = prefill[f"p37.moe.{index}.weights"].gather(1, expected_order)
        assert ulps(weights.gather(1, order), expected_weights) <= COEFFICIENT_ULPS, index


@torch.no_grad()
@pytest.mark.usefixtures("golden_sums")
def test_engram(assembly: Assembly, prefill: dict[str, Tensor]) -> None:
    ids = prefill["p37.input_ids"].long()
    rows, _ = prompt_rows(assembly)
    prelude = assembly.prelude
    tokens = Tokens(ids, rows.slots, rows.positions, rows.slots, rows.live, rows.image)
    history = torch.full((1, 3), -1)
    classes = kernels.token_classes(ids, rows.image, prelude.classes)
    found = [table.rows(classes, history, tokens, prelude.pad_class) for table in prelude.tables]
    made = prelude(tokens, history)
    looked_up, embeds = made.engram, made.embeds.unsqueeze(1).repeat(1, 4, 1)
    for place, index in enumerate((1, 4)):
        assert torch.equal(found[place], prefill[f"p37.engram.{index}.hash_ids"])
        module = assembly.model.body.layers[index].engram
        projected = module.wkv(looked_up[place])
        assert differing(projected, prefill[f"p37.engram.{index}.kv"]) == 0, index
        streams = prefill[f"p37.X.{index - 1}"]
        keys = projected.unflatten(1, (5, -1))[:, :4]
        gate = gates(streams, keys, module.q_weight, module.k_weight, module.epsilon)
        assert ulps(gate, prefill[f"p37.engram.{index}.gate"]) <= COEFFICIENT_ULPS, index
        assert differing(module(streams, looked_up[place], rows.image), prefill[f"p37.X_in.{index}"]) == 0, index
    assert differing(embeds, prefill["p37.X_in.0"]) == 0


@pytest.mark.usefixtures("golden_sums")
def test_prefill_p37(assembly: Assembly, prefill: dict[str, Tensor], report_count: ReportCount) -> None:
    """End to end: at most 20 of 189,440 stream values flip, ids are equal, and one row's logits move at most."""
    run = MiniRun(assembly)
    record = run.step(prefill["p37.input_ids"].tolist())
    flips = sum(differing(streams, prefill[f"p37.X.{i}"]) for i, streams in enumerate(record.streams))
    report_count("stream values of p37 compared with the goldens", 10 * P37 * 512, f"{flips} flipped")
    assert flips <= 20
    logits = run.logits(record)
    error = relative(logits, prefill["p37.logits"])
    assert (error > 1e-6).sum() <= 1 and error.max() < 0.01
    assert torch.equal(logits.argmax(1), prefill["p37.logits"].argmax(1))


@pytest.mark.usefixtures("golden_sums")
def test_prefill_p1(assembly: Assembly, prefill: dict[str, Tensor]) -> None:
    run = MiniRun(assembly)
    record = run.step(prefill["p1.input_ids"].tolist())
    for index, streams in enumerate(record.streams):
        assert differing(streams, prefill[f"p1.X.{index}"]) == 0, index
    assert relative(run.logits(record), prefill["p1.logits"]).max() < 1e-6


@pytest.mark.usefixtures("golden_sums")
def test_prefill_p96(assembly: Assembly, prefill: dict[str, Tensor], report_count: ReportCount) -> None:
    """Rows after the first flipped code drift: the goldens' own spread is 0.009 in the median and 0.08 at most.

    Rows 66 and 79 of layer 6 are exact ties, which the official code breaks by no fixed rule.
    """
    run = MiniRun(assembly)
    logits = run.logits(run.step(prefill["p96.input_ids"].tolist()))
    error = relative(logits, prefill["p96.logits"])
    equal = int((error < 1e-6).sum())
    report_count("rows of p96 whose logits equal the goldens", equal, f"of 96, largest error {error.max():.3f}")
    assert error.median() < 0.009 and error.max() < 0.08
    assert torch.equal(logits.argmax(1), prefill["p96.logits"].argmax(1))


@pytest.mark.usefixtures("golden_sums")
def test_greedy_decoding(
    assembly: Assembly, prefill: dict[str, Tensor], report_count: ReportCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 greedy ids. Where the goldens record an exact tie (margin 0) their choice is taken for ours.

    From the first flipped code on logits drift, by 0.11 at most between faithful runs (goldens' README).
    """
    expected = golden("decode", "reference")
    run = MiniRun(assembly)
    record = run.step(prefill["p37.input_ids"].tolist())
    generated = [int(run.logits(record)[-1].argmax())]
    errors, ties = [], 0
    calls: list[int] = []
    select, select_candidates = kernels.select, kernels.select_candidates

    def chosen(step: int, ours: Tensor) -> Tensor:
        nonlocal ties
        layer = INDEX_SOURCES[len(calls) % len(INDEX_SOURCES)]
        calls.append(layer)
        if expected[f"index.{layer}.margin"][step] != 0:
            return ours
        ties += 1
        return expected[f"index.{layer}.selected"][step : step + 1]

    for step in range(24):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "select", lambda *args, step=step: chosen(step, select(*args)))

            def with_candidates(*args: object, step: int = step) -> tuple[Tensor, Tensor]:
                selected, candidates = select_candidates(*args)  # type: ignore[arg-type]
                return chosen(step, selected), candidates

            patch.setattr(kernels, "select_candidates", with_candidates)
            logits = run.logits(run.step([generated[-1]]))
        errors.append(float(relative(logits, expected["logits"][step : step + 1])[0]))
        generated.append(int(logits[0].argmax()))
    assert len(calls) == 24 * len(INDEX_SOURCES) and ties == 5
    assert generated == expected["generated"].tolist()
    assert max(errors) < 1e-6, "with their choice at the ties, every step equals the goldens"
    pools = run.runner.pools
    for pair, index in enumerate((2, 4)):
        for half, name in enumerate(("kv", "gate")):
            waiting = pools.pending[pair][0, half : half + 1]
            # F32 products of one row, which the official code sums in another order: a few units in the last place
            assert relative(waiting, expected[f"end.pending.{index}.{name}"]).max() < 1e-6, (index, name)
    for index, ring in enumerate(pools.rings):
        assert differing(ring[0], expected[f"end.ring.{index}"]) == 0, index
    report_count("greedy steps equal to the goldens", 24, f"{ties} exact ties decided as theirs")


@pytest.mark.parametrize("prompt", ["p1", "p37", "p96"])
def test_faithful_elsewhere(assembly: Assembly, prefill: dict[str, Tensor], prompt: str) -> None:
    """On any CPU: with other F32 sums a few codes flip and drift.

    Measured with sums in F64, which is as far as a faithful run can be: median 0.05, largest 0.13. Above a median of
    0.1 a rounding point is missing (goldens' README).
    """
    run = MiniRun(assembly)
    logits = run.logits(run.step(prefill[f"{prompt}.input_ids"].tolist()))
    error = relative(logits, prefill[f"{prompt}.logits"])
    assert error.median() < 0.1 and error.max() < 0.2
    assert (logits.argmax(1) == prefill[f"{prompt}.logits"].argmax(1)).double().mean() >= 0.9
