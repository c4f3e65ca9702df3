"""From logits to tokens and log probabilities: tables of penalties and masks, ties, and rows by themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import OctavoError, SamplingParams
from octavo.runtime.logprobs import Logprobs, TokenLogprob
from octavo.runtime.sampler import Draw, allowed, greedy, is_greedy, penalised, sample
from tests.conftest import ReportCount

MINUS = -math.inf


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    return Logprobs(logits, torch.tensor(tokens), [top] * len(tokens)).read()


# Penalties, bias, min_tokens and mask.

BASE = (2.0, -1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("fields", "prompt", "answer", "expected"),
    [
        ({}, (0, 1), (2,), BASE),
        ({"repetition_penalty": 2.0}, (0, 1), (), (1.0, -2.0, 0.5, 0.0)),
        ({"repetition_penalty": 2.0}, (0,), (1,), (1.0, -2.0, 0.5, 0.0)),
        ({"repetition_penalty": 2.0}, (0, 0), (0, 0), (1.0, -1.0, 0.5, 0.0)),
        ({"repetition_penalty": 2.0}, (3,), (2, 2), (2.0, -1.0, 0.25, 0.0)),
        ({"repetition_penalty": 0.5}, (0, 1), (2,), (4.0, -0.5, 1.0, 0.0)),
        ({"presence_penalty": 0.5}, (0, 1), (), BASE),
        ({"presence_penalty": 0.5}, (0, 1), (2, 2, 3), (2.0, -1.0, 0.0, -0.5)),
        ({"presence_penalty": -0.5}, (0, 1), (2, 2, 3), (2.0, -1.0, 1.0, 0.5)),
        ({"frequency_penalty": 0.25}, (0, 1), (), BASE),
        ({"frequency_penalty": 0.25}, (0, 1), (2, 2, 3), (2.0, -1.0, 0.0, -0.25)),
        ({"frequency_penalty": -0.25}, (0, 1), (2, 2, 3), (2.0, -1.0, 1.0, 0.25)),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, (0,), (2, 2, 0), (1.25, -1.0, -0.5, 0.0)),
        ({"logit_bias": {1: 3.0, 3: -0.5}}, (0,), (), (2.0, 2.0, 0.5, -0.5)),
        ({"logit_bias": {0: -100, 3: 100}}, (0,), (), (-98.0, -1.0, 0.5, 100.0)),
        # Repetition 1 -2 .25 0, then presence and frequency, then bias: the factor is never of what was added.
        (
            {
                "repetition_penalty": 2.0,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "logit_bias": {1: 1.0, 2: -0.5},
            },
            (0, 1),
            (2, 2, 3),
            (1.0, -1.0, -1.25, -0.75),
        ),
    ],
)
def test_penalties_and_bias(
    fields: dict[str, Any], prompt: tuple[int, ...], answer: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    logits = torch.tensor(BASE)
    result = penalised(logits, Draw(SamplingParams(**fields), 0, 0, prompt + answer, len(prompt), ()))
    assert result.dtype == torch.float32 and result.tolist() == list(expected)
    assert logits.tolist() == list(BASE), "log probabilities are still to be read from these"


@pytest.mark.parametrize(
    ("made", "min_tokens", "ending", "mask", "expected"),
    [
        (0, 0, (1, 3), None, BASE),
        (0, 2, (1, 3), None, (2.0, MINUS, 0.5, MINUS)),
        (1, 2, (1, 3), None, (2.0, MINUS, 0.5, MINUS)),
        (2, 2, (1, 3), None, BASE),
        (0, 2, (), None, BASE),
        (0, 0, (), (True, True, True, True), BASE),
        (0, 0, (), (False, True, False, True), (MINUS, -1.0, MINUS, 0.0)),
        (0, 1, (1,), (False, True, False, True), (MINUS, MINUS, MINUS, 0.0)),
    ],
)
def test_what_may_not_come(
    made: int, min_tokens: int, ending: tuple[int, ...], mask: tuple[bool, ...] | None, expected: tuple[float, ...]
) -> None:
    params = SamplingParams(
        min_tokens=min_tokens, token_mask=None if mask is None else lambda answer: torch.tensor(mask)
    )
    logits = torch.tensor(BASE)
    assert allowed(logits, Draw(params, 0, 0, (7, 8, *range(made)), 2, ending)).tolist() == list(expected)
    assert logits.tolist() == list(BASE)


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_no_end_before_min_tokens(temperature: float) -> None:
    """However likely the tokens that end the answer are, and however long the prompt is."""
    params = SamplingParams(min_tokens=2, temperature=temperature)
    draws = [Draw(params, 0, 0, range(9 + made), 9, (0, 1)) for made in range(4)]
    assert sample(torch.tensor([BASE] * 4), draws).read() == [2, 2, 0, 0]


def test_the_mask_sees_the_answer_and_nothing_else() -> None:
    seen: list[Sequence[int]] = []

    def mask(answer: Sequence[int]) -> None:
        seen.append(list(answer))
        if isinstance(answer, list):
            answer.clear()  # what the hook does to it is its own affair

    tokens = [5, 6, 1, 2, 3]
    params = SamplingParams(token_mask=mask)
    assert sample(torch.tensor([BASE]), [Draw(params, 0, 0, tokens, 2, ())]).read() == [0]
    assert seen == [[1, 2, 3]] and tokens == [5, 6, 1, 2, 3]


class HookError(Exception):
    pass


def raising(answer: Sequence[int]) -> Tensor:
    raise HookError("no grammar")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (raising, "no grammar"),
        (lambda answer: [True] * 4, r"returned list; a bool tensor \[4\]"),
        (lambda answer: True, r"returned bool; a bool tensor \[4\]"),
        (lambda answer: torch.ones(5, dtype=torch.bool), r"returned torch.bool \[5\]; a bool tensor \[4\]"),
        (lambda answer: torch.ones(1, 4, dtype=torch.bool), r"returned torch.bool \[1, 4\]; a bool tensor \[4\]"),
        (lambda answer: torch.ones((), dtype=torch.bool), r"returned torch.bool \[\]; a bool tensor \[4\]"),
        (lambda answer: torch.ones(4), r"returned torch.float32 \[4\]; a bool tensor \[4\]"),
        (lambda answer: torch.tensor([0, 2]), r"returned torch.int64 \[2\]; a bool tensor \[4\]"),
        (lambda answer: torch.zeros(4, dtype=torch.bool), "at least one allowed token"),
        (lambda answer: torch.tensor([False, False, False, True]), "min_tokens 2 forbids those after 0 tokens"),
        (lambda: None, "argument"),
    ],
)
def test_a_mask_that_fails_fails_its_row_alone(hook: Any, message: str, temperature: float) -> None:
    """Above all it never lets a token through that it forbids, nor one that ends the answer too early."""
    good = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logit_bias={3: 9.0})]
    bad = SamplingParams(temperature=temperature, token_mask=hook, min_tokens=2)
    draws = [Draw(params, 1, 0, (0,), 1, (3,)) for params in (good[0], bad, *good[1:])]
    logits = torch.tensor([BASE] * 4)
    outcomes = sample(logits, draws).read()
    failure = outcomes.pop(1)
    assert isinstance(failure, HookError if hook is raising else Exception)
    with pytest.raises(type(failure), match=message):
        raise failure
    assert outcomes == sample(logits[:3], [draws[i] for i in (0, 2, 3)]).read()
    assert outcomes[0] == 0 and outcomes[2] == 3


# Greedy.


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ((1.0, 3.0, 3.0, 2.0), 1),
        ((3.0, 3.0, 3.0, 3.0), 0),
        ((-2.0, -1.0, -3.0, -1.0), 1),
        ((0.0, -0.0, -1.0, 0.0), 0),
        ((-0.0, 0.0, -1.0, 0.0), 0),
        ((MINUS, -1e38, MINUS, -1e38), 1),
        ((1.0, 2.9999998, 3.0, 3.0), 2),
    ],
)
def test_greedy_takes_the_lower_id_of_a_tie(logits: tuple[float, ...], token: int) -> None:
    """Also where something else than the largest logit could have decided, but does not."""
    everything = torch.ones(4, dtype=torch.bool)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": -0.0},
        {"logit_bias": {0: 0.0}},
        {"token_mask": lambda answer: everything},
    ]
    for fields in settings:
        assert sample(torch.tensor([logits]), [Draw(SamplingParams(**fields), 0, 0, (0,), 1, ())]).read() == [token]


def test_greedy_ties_anywhere() -> None:
    """In rows as wide as the vocabulary, at random places."""
    torch.manual_seed(0)
    logits = torch.randn(40, 129_280).clamp(max=2.0)  # some 3,000 ties a row
    expected = [row.tolist().index(2.0) for row in logits]
    assert greedy(logits).tolist() == expected
    draws = [Draw(SamplingParams(), 0, 0, (0,), 1, ())] * 40
    assert all(map(is_greedy, draws)) and sample(logits, draws).read() == expected


# Log probabilities.


def test_logprobs_are_the_log_softmax() -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(7, 517)
    tokens = [0, 516, 5, 5, 100, 200, 300]
    exact = torch.log_softmax(logits.double(), -1)
    for row, entry in enumerate(logprobs_of(logits, tokens, 20)):
        assert entry.id == tokens[row]
        # F32 rounds values of up to 20 to 1e-6.
        assert math.isclose(entry.logprob, float(exact[row, tokens[row]]), abs_tol=4e-6)
        order = sorted(range(517), key=lambda i: (-logits[row, i].item(), i))[:20]
        assert [i for i, _ in entry.top] == order
        torch.testing.assert_close([value for _, value in entry.top], exact[row, order].tolist(), rtol=0, atol=4e-6)
        assert all(a >= b for (_, a), (_, b) in itertools.pairwise(entry.top))
        assert dict(entry.top).get(entry.id, entry.logprob) == entry.logprob


def test_logprobs_of_ties_and_bounds() -> None:
    (entry,) = logprobs_of(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), [2], 4)
    assert [i for i, _ in entry.top] == [1, 2, 3, 0]
    total = math.log(math.exp(-2) + 1 + 1 + math.exp(-1))
    # F32 logarithms near 1.
    assert math.isclose(entry.logprob, -total, abs_tol=1e-6) and entry.top[0][1] == entry.top[1][1] == entry.logprob
    assert logprobs_of(torch.tensor([[1.0, 3.0]]), [0], 0)[0].top == ()


def test_the_likeliest_is_the_greedy_token_even_where_logarithms_tie() -> None:
    """Two different logits may have the same log probability in F32; the order is that of the logits."""
    near = torch.full((1, 100_000), 1.0)
    near[0, 7], near[0, 8] = 1.0000001, 1.0000002
    (entry,) = logprobs_of(near, [8], 3)
    assert entry.top[0][1] == entry.top[1][1] == entry.top[2][1], "they do tie"
    assert [i for i, _ in entry.top] == [8, 7, 0]
    assert greedy(near).tolist() == [8]


# Rows by themselves.


def assorted(count: int, generator: torch.Generator) -> list[Draw]:
    """Draws of every kind, one after another."""

    def numbers(high: int, size: int) -> list[int]:
        return torch.randint(high, (size,), generator=generator).tolist()

    odd = torch.arange(517) % 2 == 1
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 1.5, "top_p": 0.95, "repetition_penalty": 0.9},
        {"temperature": 1.0, "logit_bias": {3: 4.0, 516: -2.0}},
        {"min_tokens": 20, "max_tokens": 30},
        {"temperature": 0.9, "token_mask": lambda answer: odd},
        {},
        {"temperature": 3.0, "min_p": 0.1},
    ]
    return [
        Draw(
            SamplingParams(**kinds[i % len(kinds)]),
            numbers(2**62, 1)[0] - 2**61,
            i % 3,
            numbers(517, 6 + i),
            4,
            (1, 2),
        )
        for i in range(count)
    ]


def test_a_token_depends_on_its_own_row_alone(long_form: bool, report_count: ReportCount) -> None:
    """Alone, in batches of any size and order, strided, and with two threads: the same token."""
    generator = torch.Generator().manual_seed(4)
    rounds = 40 if long_form else 1
    threads = torch.get_num_threads()
    for _ in range(rounds):
        draws = assorted(60, generator)
        logits = 2 * torch.randn(60, 517, generator=generator)
        before = logits.clone()
        alone = [sample(logits[i : i + 1].clone(), [draws[i]]).read()[0] for i in range(60)]
        assert all(isinstance(token, int) for token in alone) and len(set(alone)) > 30
        assert sample(logits, draws).read() == alone
        for size in (2, 3, 7, 16, 61):
            parts = [sample(logits[i : i + size], draws[i : i + size]).read() for i in range(0, 60, size)]
            assert list(itertools.chain(*parts)) == alone
        order = torch.randperm(60, generator=generator).tolist()
        assert sample(logits[order], [draws[i] for i in order]).read() == [alone[i] for i in order]
        strided = torch.empty(517, 180).t()[::3].copy_(logits)
        assert not strided.is_contiguous() and sample(strided, draws).read() == alone
        torch.set_num_threads(2)
        try:
            assert sample(logits, draws).read() == alone
        finally:
            torch.set_num_threads(threads)
        assert logits.equal(before), "log probabilities are read from the same logits afterwards"
    report_count("sampled rows that do not see the others", 60 * rounds)


@pytest.mark.parametrize("width", [517, 129_280])
def test_logprobs_depend_on_their_own_row_alone(width: int) -> None:
    """To the bit: a prompt's come in blocks of rows, an answer's one by one."""
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(12, width, generator=generator)
    tokens = torch.randint(width, (12,), generator=generator).tolist()
    together = logprobs_of(logits, tokens, 5)
    threads = torch.get_num_threads()
    for size in (1, 5):
        parts = [logprobs_of(logits[i : i + size], tokens[i : i + size], 5) for i in range(0, 12, size)]
        assert list(itertools.chain(*parts)) == together
    torch.set_num_threads(2)
    try:
        assert logprobs_of(logits, tokens, 5) == together
    finally:
        torch.set_num_threads(threads)


def test_seeds() -> None:
    """The same seed, the same tokens; another seed, others; the most extreme seeds are seeds too."""
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(200, 517)
    runs = {
        seed: sample(logits, [Draw(params, seed, 0, range(3 + i), 3, ()) for i in range(200)]).read()
        for seed in (0, 1, -1, 2**63 - 1, -(2**63))
    }
    again = sample(logits, [Draw(params, 1, 0, range(3 + i), 3, ()) for i in range(200)]).read()
    assert again == runs[1]
    for a, b in itertools.combinations(runs.values(), 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 8, "one in 517 is equal by chance"


# Logits that are no numbers.

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.5},
    {"repetition_penalty": 2.0},
    {"logit_bias": {1: 5.0}},
    {"token_mask": lambda answer: None},
]


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: " ".join(fields) or "greedy")
@pytest.mark.parametrize(
    "broken",
    [
        (math.nan, 1.0, 2.0, 3.0),
        (0.0, 1.0, 2.0, math.nan),
        (math.nan,) * 4,
        (0.0, math.inf, 2.0, 3.0),
        (math.inf, MINUS, math.inf, 3.0),
        (math.nan, math.inf, 1.0, 1.0),
        (MINUS,) * 4,
    ],
    ids=str,
)
def test_logits_that_are_not_finite_fail_their_row(broken: tuple[float, ...], fields: dict[str, Any]) -> None:
    """Never a token by accident; the rows beside it are drawn as ever."""
    draws = [Draw(SamplingParams(**fields), 1, 0, (0, 1), 1, ())] * 3
    outcomes = sample(torch.tensor([BASE, broken, BASE]), draws).read()
    assert outcomes[0] == outcomes[2] and isinstance(outcomes[0], int)
    assert isinstance(outcomes[1], OctavoError) and "NaN or infinite" in str(outcomes[1])


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: " ".join(fields) or "greedy")
def test_minus_infinity_never_comes(fields: dict[str, Any]) -> None:
    """Some rows may have forbidden tokens already: they have probability 0."""
    logits = torch.tensor([[MINUS, 0.5, MINUS, 0.5]] * 50)
    outcomes = sample(logits, [Draw(SamplingParams(**fields), i, 0, (0, 1), 1, ()) for i in range(50)]).read()
    assert set(outcomes) <= {1, 3}


def test_no_rows() -> None:
    assert sample(torch.empty(0, 4), []).read() == []
