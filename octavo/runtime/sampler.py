"""From logits to tokens, one row per answer that samples in this step.

Every row is computed by itself, with the row-invariant rules of design section 8, and noise is a pure function of
(seed, sample, absolute position, token id). So batching, preemption and the number of ranks cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.kernels.numerics import largest
from octavo.runtime.sampling import SamplingParams

_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64, as signed 64-bit numbers


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability under the model, natural logarithm, and the likeliest tokens at its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log probability) of the K likeliest, best first."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row is drawn with: parameters, noise counters, and the tokens that penalties look at."""

    params: SamplingParams
    seed: int
    index: int
    """Which of the answers to a prompt."""
    tokens: Sequence[int]
    """Prompt and answer so far; its length is the position that is drawn."""
    prompt_length: int
    ending: Sequence[int]
    """Tokens that would end the answer, suppressed before ``min_tokens``."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | Exception]:
    """One token for every row of logits [n, V] F32, or why there is none: a row fails by itself.

    A row fails if its largest logit is NaN or infinite, or if its token mask raises or leaves no token.
    """
    outcomes: list[int | Exception] = [0] * len(draws)
    plain = [i for i, draw in enumerate(draws) if is_greedy(draw)]
    if plain:
        rows = logits if len(plain) == len(draws) else logits[plain]
        for i, token in zip(plain, greedy(rows).tolist(), strict=True):
            outcomes[i] = token if token >= 0 else _not_finite()
    for i in range(len(draws)) if len(plain) < len(draws) else ():
        if not is_greedy(draws[i]):
            try:
                outcomes[i] = sample_row(logits[i], draws[i])
            except Exception as error:  # a hook of the caller's may raise anything
                outcomes[i] = error
    return outcomes


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of every row, ties to the lower id: [n, V] -> [n] int64; -1 where it is NaN or infinite."""
    best = logits.amax(-1, keepdim=True)
    return (logits == best).int().argmax(-1).where(best.squeeze(-1).isfinite(), -1)


def is_greedy(draw: Draw) -> bool:
    """Nothing but the largest logit decides."""
    p = draw.params
    return (
        p.temperature == 0.0
        and p.presence_penalty == 0.0
        and p.frequency_penalty == 0.0
        and p.repetition_penalty == 1.0
        and not p.logit_bias
        and p.token_mask is None
        and p.min_tokens <= len(draw.tokens) - draw.prompt_length
    )


def sample_row(logits: Tensor, draw: Draw) -> int:
    """One token from logits [V] F32. Raises if there is none, and whatever the token mask raises."""
    params = draw.params
    logits = allowed(penalised(logits, draw), draw)
    if params.temperature > 0.0:
        values = logits.double()
        # From the largest down, so that the lowest temperatures do not overflow.
        scaled = filtered((values - values.max()) / params.temperature, params)
        logits = scaled + gumbel_noise(scaled.shape[0], draw.seed, draw.index, len(draw.tokens), scaled.device)
    token = int(greedy(logits.unsqueeze(0)))
    if token < 0:
        raise _not_finite()
    return token


def penalised(logits: Tensor, draw: Draw) -> Tensor:
    """Penalties and bias. Repetition counts prompt and answer; presence and frequency the answer alone."""
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(draw.tokens)), dtype=torch.int64, device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits = logits.index_put((seen,), torch.where(values > 0, values / factor, values * factor))
    if params.presence_penalty or params.frequency_penalty:
        answer = torch.tensor(draw.tokens[draw.prompt_length :], dtype=torch.int64, device=logits.device)
        counts = torch.bincount(answer, minlength=logits.shape[0])
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_put((ids,), logits[ids] + bias)
    return logits


def allowed(logits: Tensor, draw: Draw) -> Tensor:
    """-inf for what may not come: tokens that would end the answer too early, and what the mask forbids."""
    params, made = draw.params, len(draw.tokens) - draw.prompt_length
    if made < params.min_tokens and draw.ending:
        logits = logits.index_fill(0, torch.tensor(list(draw.ending), device=logits.device), -torch.inf)
    if params.token_mask is not None:
        mask = params.token_mask(draw.tokens[draw.prompt_length :])
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != logits.shape or mask.dtype != torch.bool or not mask.any():
                raise ValueError(
                    f"token_mask returned {_described(mask)}; a bool tensor [{logits.shape[0]}] with at least one "
                    "allowed token is expected"
                )
            logits = logits.masked_fill(~mask.to(logits.device), -torch.inf)
            if logits.max() == -torch.inf:
                raise ValueError(
                    f"token_mask allows only tokens that would end the answer, and min_tokens {params.min_tokens} "
                    f"forbids those after {made} tokens"
                )
    return logits


def _not_finite() -> OctavoError:
    return OctavoError(
        "The largest logit is NaN or infinite, so no token can be drawn. The weights are damaged or a kernel is wrong: "
        "compare with --numerics plain."
    )


def _described(mask: object) -> str:
    return f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def filtered(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, top-p and min-p on logits [V] F64 at temperature: -inf for what falls out. The likeliest always stays."""
    if params.top_k and params.top_k < scaled.shape[0]:
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        kept[largest(scaled, params.top_k)] = True
        scaled = scaled.masked_fill(~kept, -torch.inf)
    if params.top_p < 1.0:
        order = largest(scaled, scaled.shape[0])
        probabilities = torch.softmax(scaled[order], dim=0)
        before = probabilities.cumsum(0) - probabilities
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        kept[order] = before < params.top_p
        scaled = scaled.masked_fill(~kept, -torch.inf)
    if params.min_p > 0.0:
        probabilities = torch.softmax(scaled, dim=0)
        scaled = scaled.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
    return scaled


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log probabilities of one token in each row of logits [n, V] F32, and of the ``top`` likeliest."""
    every = torch.log_softmax(logits.float(), dim=-1)
    chosen = every.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = largest(logits, top)  # not of the logarithms, whose rounding makes ties
    ids, values = best.tolist(), every.gather(1, best).tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(row_ids, row_values, strict=True)))
        for token, logprob, row_ids, row_values in zip(tokens, chosen, ids, values, strict=True)
    ]


def gumbel_noise(count: int, seed: int, index: int, position: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [count] F64, element i for token id i."""
    key = torch.zeros((), dtype=torch.int64, device=device)
    for word in (seed, index, position):
        key = _mixed(key + word)
    bits = _mixed(key + torch.arange(count, device=device) * _MIX[0])
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add(0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit words in which every input bit moves every output bit; products wrap around."""
    x = x + _MIX[0]
    x = (x ^ _shifted(x, 30)) * _MIX[1]
    x = (x ^ _shifted(x, 27)) * _MIX[2]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
