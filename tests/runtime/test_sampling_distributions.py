"""What is drawn: distributions against closed forms, and the noise below them.

Statistics have fixed seeds, so each comes out the same every time. A limit of 1e-4 on both sides of a p-value means
that one set of seeds in 5,000 would be refused although everything is right; these are not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import SamplingParams
from octavo.runtime.filters import filtered, running_sum
from octavo.runtime.noise import gumbel_noise
from octavo.runtime.sampler import Draw, sample
from tests.conftest import ReportCount

CPU = torch.device("cpu")
LIMIT = 1e-4


def p_value(counts: Sequence[float], expected: Sequence[float]) -> float:
    """Chi-square, all cells together: how often chance alone is further from what is expected."""
    assert len(counts) == len(expected)
    cells = [(count, value) for count, value in zip(counts, expected, strict=True) if value > 0]
    assert all(count == 0 for count, value in zip(counts, expected, strict=True) if value == 0), "impossible outcome"
    assert min(value for _, value in cells) >= 5, "too few for the chi-square distribution"
    assert math.isclose(sum(counts), sum(expected))
    statistic = sum((count - value) ** 2 / value for count, value in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def assert_fits(counts: Sequence[float], expected: Sequence[float]) -> None:
    """Neither too far from what is expected, nor closer than chance would be."""
    assert LIMIT < p_value(counts, expected) < 1 - LIMIT


def test_the_chi_square_judge() -> None:
    """Against tabulated quantiles of the distribution: 3.841 and 6.635 for 1 degree of freedom, 18.307 for 10."""
    for degrees, statistic, p in ((1, 3.841459, 0.05), (1, 6.634897, 0.01), (10, 18.307038, 0.05)):
        expected = [100.0] * (degrees + 1)
        offset = math.sqrt(statistic * 100 / 2)
        counts = [100 + offset, 100 - offset, *expected[2:]]
        assert math.isclose(p_value(counts, expected), p, rel_tol=1e-5)


# Distributions.

LOGITS = (2.0, 1.5, 1.0, 1.0, 0.3, 0.0, -0.7, -1.5)
"""A tie among them; at temperature 1 the probabilities are .363 .220 .133 .133 .066 .049 .024 .011."""
ALL = (0, 1, 2, 3, 4, 5, 6, 7)


def probabilities(logits: Sequence[float], temperature: float, kept: Sequence[int]) -> list[float]:
    """The closed form: exp(logit / temperature) over its sum, of the tokens that are kept; 0 for the others."""
    weights = [math.exp(logit / temperature) if i in kept else 0.0 for i, logit in enumerate(logits)]
    return [weight / sum(weights) for weight in weights]


def drawn(params: SamplingParams, count: int, along: str = "seeds", logits: Sequence[float] = LOGITS) -> list[int]:
    """Tokens for one logits row, each with a seed, or at a position, or in an answer of its own."""
    rows = torch.tensor([logits] * count)
    draws = [
        Draw(
            params,
            seed=i if along == "seeds" else 5,
            index=i if along == "answers" else 0,
            tokens=range(3 + i if along == "positions" else 3),
            prompt_length=3,
            ending=(),
        )
        for i in range(count)
    ]
    tokens = [outcome for outcome in sample(rows, draws).read() if isinstance(outcome, int)]
    assert len(tokens) == count
    return tokens


def counted(tokens: Sequence[int], size: int = len(LOGITS)) -> list[int]:
    return torch.tensor(tokens).bincount(minlength=size).tolist()


DISTRIBUTIONS: list[tuple[dict[str, Any], float, Sequence[int]]] = [
    # Parameters, temperature, and which tokens are kept: worked out by hand.
    ({}, 1.0, ALL),
    ({}, 0.7, ALL),
    ({}, 2.0, ALL),
    ({}, 100.0, ALL),
    ({"top_k": 3}, 1.0, (0, 1, 2)),  # of the tie, the lower id
    ({"top_k": 8}, 1.0, ALL),
    ({"top_k": 1000}, 1.0, ALL),
    ({"top_p": 0.6}, 1.0, (0, 1, 2)),  # .363 .583 .716
    ({"top_p": 0.75}, 1.0, (0, 1, 2, 3)),  # .716 .849
    ({"top_p": 0.6}, 2.0, (0, 1, 2, 3)),  # .237 .422 .565 .709
    ({"min_p": 0.1}, 1.0, (0, 1, 2, 3, 4, 5)),  # relative to the likeliest: .135, then .067
    ({"min_p": 0.1}, 0.5, (0, 1, 2, 3)),  # .135, then .033
    ({"top_k": 5, "top_p": 0.81}, 0.5, (0, 1)),  # .598 .818 of the five; of all .590 .807
    ({"top_p": 0.75, "min_p": 0.5}, 1.0, (0, 1)),  # 1 .607 .368
    ({"top_k": 6, "min_p": 0.4}, 2.0, (0, 1, 2, 3, 4)),  # .607 .427 .368
    ({"top_k": 6, "top_p": 0.85, "min_p": 0.5}, 2.0, (0, 1, 2, 3)),
]


@pytest.mark.parametrize(("fields", "temperature", "kept"), DISTRIBUTIONS)
def test_distributions(
    fields: dict[str, Any], temperature: float, kept: Sequence[int], long_form: bool, report_count: ReportCount
) -> None:
    count = 40_000 if long_form else 2_000
    counts = counted(drawn(SamplingParams(temperature=temperature, **fields), count))
    assert_fits(counts, [count * p for p in probabilities(LOGITS, temperature, kept)])
    report_count("tokens drawn against closed forms", count)


@pytest.mark.parametrize("along", ["positions", "answers"])
def test_positions_and_answers_draw_anew(along: str, long_form: bool, report_count: ReportCount) -> None:
    """With one seed: the same distribution, and each token independent of the one before.

    The distribution of a temperature 25 % higher is refused, so there are enough tokens to tell them apart.
    """
    count = 60_000 if long_form else 6_000
    tokens = drawn(SamplingParams(temperature=2.0), count, along)
    p = probabilities(LOGITS, 2.0, ALL)
    assert_fits(counted(tokens), [count * value for value in p])
    assert p_value(counted(tokens), [count * value for value in probabilities(LOGITS, 2.5, ALL)]) < LIMIT
    pairs = counted([8 * a + b for a, b in itertools.pairwise(tokens)], 64)
    assert_fits(pairs, [(count - 1) * a * b for a in p for b in p])
    report_count("tokens drawn against closed forms", count)


def test_what_changes_logits_changes_the_distribution() -> None:
    """Repetition, presence, frequency, bias and mask, all before temperature, and top-k after them."""
    mask = torch.tensor([True] * 7 + [False])
    params = SamplingParams(
        temperature=0.8,
        top_k=6,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={6: 1.5, 7: 50.0},
        token_mask=lambda answer: mask,
    )
    outcomes = sample(
        torch.tensor([LOGITS] * 2_000), [Draw(params, i, 0, (0, 6, 1, 4, 4), 2, ()) for i in range(2_000)]
    ).read()
    # Seen 0 1 4 6: 1.0 .75 .15 -1.4; in the answer 1 once, 4 twice: 0 and -.85; bias: 6 to .1; top-k drops 4.
    expected = probabilities((1.0, 0.0, 1.0, 1.0, -0.85, 0.0, 0.1, 48.5), 0.8, (0, 1, 2, 3, 5, 6))
    assert_fits(counted([int(token) for token in outcomes]), [2_000 * p for p in expected])  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [math.ulp(0.0), 1e-300, 1e-30, 1e-3])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.5}], ids=str)
def test_lowest_temperatures_take_the_likeliest(temperature: float, fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, **fields)
    assert set(drawn(params, 20)) == {0}
    assert set(drawn(params, 40, logits=(-5.0, 30.0, 3.0, 30.0))) == {1, 3}, "a tie is drawn"


def test_filters_keep_what_their_rules_say() -> None:
    """On logits whose probabilities are 1/2, 1/4, 1/8, 1/8: the cases whose sums are exact."""
    logits = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64).log()
    for fields, kept in (
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 5}, [0, 1, 2, 3]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.76}, [0, 1, 2]),
        ({"top_p": 0.88}, [0, 1, 2, 3]),
        ({"top_p": math.ulp(0.0)}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.49}, [0, 1]),
        ({"min_p": 0.51}, [0]),
        ({"min_p": 0.26}, [0, 1]),
        ({"min_p": 0.24}, [0, 1, 2, 3]),
    ):
        (result,) = filtered(logits.unsqueeze(0), [SamplingParams(temperature=1.0, **fields)])
        assert result.isfinite().nonzero().flatten().tolist() == kept, fields
        assert result[kept].equal(logits[kept]), "what is kept is unchanged"


def test_running_sums() -> None:
    generator = torch.Generator().manual_seed(2)
    for size in (1, 2, 3, 517, 4096):
        values = torch.rand(3, size, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(running_sum(values), values.cumsum(1), rtol=1e-13, atol=0.0)


# Noise.

MIX = 2**64


def splitmix64(state: int) -> int:
    """One output of the published generator, in exact integers."""
    z = (state + 0x9E3779B97F4A7C15) % MIX
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MIX
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MIX
    return z ^ (z >> 31)


def test_noise_is_splitmix64() -> None:
    """The function is fixed: an answer with a seed comes out the same in later versions and on other machines."""
    gamma = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64((1234567 + i * gamma) % MIX) for i in range(4)] == published
    for words in ((0, 0, 0), (1, 2, 3), (-1, 63, 10**6), (2**63 - 1, 0, 7), (-(2**63), 5, 2**30)):
        key = 0
        for word in words:
            key = splitmix64((key + word) % MIX)
        bits = [splitmix64((key + i * gamma) % MIX) for i in range(100)]
        expected = [-math.log(-math.log(((b >> 12) + 0.5) / 2**52)) for b in bits]
        (noise,) = gumbel_noise(100, [words], CPU)
        # The two libraries' logarithms may differ in their last bits.
        torch.testing.assert_close(noise, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def uniform(noise: Tensor) -> Tensor:
    """The numbers in (0, 1) that the noise was made from: its distribution function, exp(-exp(-x))."""
    return torch.exp(-torch.exp(-noise))


def test_noise_is_uniform_underneath(long_form: bool, report_count: ReportCount) -> None:
    """Cells of equal probability, and each of the 24 highest bits alone and with each other one."""
    rows = 2_000 if long_form else 50
    noise = gumbel_noise(4096, [(9, 0, position) for position in range(rows)], CPU).flatten()
    assert noise.isfinite().all()
    numbers = uniform(noise)
    cells = (numbers * 1024).long().bincount(minlength=1024).tolist()
    assert_fits(cells, [len(noise) / 1024] * 1024)
    bits = torch.stack([(numbers * 2 ** (i + 1)).long() & 1 for i in range(24)]).double()
    ones = bits.sum(1).tolist()
    both = (bits @ bits.T).tolist()
    for i in range(24):
        assert_fits([ones[i], len(noise) - ones[i]], [len(noise) / 2] * 2)
        for j in range(i):
            table = [both[i][j], ones[i] - both[i][j], ones[j] - both[i][j]]
            assert_fits([*table, len(noise) - sum(table)], [len(noise) / 4] * 4)
    report_count("noise values against the uniform distribution", len(noise))


NEIGHBOURS = {
    "position": (0, 0, 1),
    "answer": (0, 1, 0),
    "seed": (1, 0, 0),
    "seed and answer, opposite": (1, -1, 0),
    "answer and position, opposite": (0, 1, -1),
    "seed and position, opposite": (1, 0, -1),
    "highest bit of the seed": (-(2**63), 0, 0),
    "distant position": (0, 0, 4096),
}


@pytest.mark.parametrize("step", [*NEIGHBOURS.values(), None], ids=[*NEIGHBOURS, "token"])
def test_noise_is_independent_of_its_neighbours(
    step: tuple[int, int, int] | None, long_form: bool, report_count: ReportCount
) -> None:
    """Pairs of values fill 16 x 16 cells evenly and are not correlated; the same at distances of 1 to 3 tokens."""
    rows = 1_000 if long_form else 25
    words = [(3 + i // 8, 1 + i % 8, 100 + 5 * i) for i in range(rows)]
    first = gumbel_noise(4096, words, CPU)
    if step is None:
        pairs = [(first[:, :-distance], first[:, distance:]) for distance in (1, 2, 3)]
    else:
        moved = [(a + step[0], b + step[1], c + step[2]) for a, b, c in words]
        second = gumbel_noise(4096, moved, CPU)
        pairs = [(first, second), (first[:, 1:], second[:, :-1])]
    for a, b in pairs:
        cells = (uniform(a) * 16).long() * 16 + (uniform(b) * 16).long()
        assert_fits(cells.flatten().bincount(minlength=256).tolist(), [a.numel() / 256] * 256)
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel()), "4 standard deviations"
        report_count("pairs of noise values", a.numel())


def test_no_two_counters_share_their_noise() -> None:
    """Small and extreme values of seed, answer and position, exchanged and summed in every way."""
    words = [*range(-3, 8), 2**31, 2**63 - 1, -(2**63)]
    counters = list(itertools.product(words, range(8), (*range(8), 2**20)))
    seen = set(map(tuple, gumbel_noise(2, counters, CPU).tolist()))
    assert len(seen) == len(words) * 8 * 9
    values = gumbel_noise(100_000, [(1, 0, 1), (1, 0, 2)], CPU)
    assert len(values.unique()) == 200_000, "nor do two tokens"
