"""From logits to tokens, one row per answer that samples in this step.

Every row is computed by itself, with the row-invariant rules of design section 8, and noise is a pure function of
(seed, sample, absolute position, token id). So batching, preemption and the number of ranks cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.runtime.download import Download
from octavo.runtime.filters import filtered
from octavo.runtime.noise import gumbel_noise
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.upload import upload

_ROWS_AT_ONCE = 32
"""That are drawn with noise: a row takes about ten megabytes at the full vocabulary."""


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


class Sampled:
    """One token of every row, on its way to the host, or why there is none."""

    def __init__(self, tokens: Tensor, failed: Mapping[int, Exception]) -> None:
        """Tokens [n] int64 of the device, -1 where the largest logit is NaN or infinite; ``failed``: rows that have no
        token for another reason."""
        self.tokens = tokens
        self._failed = failed
        self._download = Download(tokens)

    def read(self) -> list[int | Exception]:
        """Wait for the tokens -> by row."""
        (tokens,) = self._download.read()
        return [
            self._failed[row] if row in self._failed else token if token >= 0 else _not_finite()
            for row, token in enumerate(tokens.tolist())
        ]


def sample(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    """One token for every row of logits [n, V] F32, or why there is none: a row fails by itself.

    A row fails if its largest logit is NaN or infinite, or if its token mask raises or leaves no token. The device is
    not waited for.
    """
    failed: dict[int, Exception] = {}
    plain = [row for row, draw in enumerate(draws) if is_greedy(draw)]
    if len(plain) == len(draws):
        return Sampled(greedy(logits), failed)
    rows, tokens = [*plain], list[Tensor]()
    if plain:
        tokens = [greedy(logits.index_select(0, _integers(plain, logits)))]
    changed: list[tuple[int, Tensor]] = []
    for row, draw in enumerate(draws):
        if not is_greedy(draw):
            try:
                changed.append((row, allowed(penalised(logits[row], draw), draw)))
            except Exception as error:  # a hook of the caller's may raise anything
                failed[row] = error
    for low in range(0, len(changed), _ROWS_AT_ONCE):
        some = changed[low : low + _ROWS_AT_ONCE]
        rows += [row for row, _ in some]
        tokens.append(draw_tokens(torch.stack([values for _, values in some]), [draws[row] for row, _ in some]))
    drawn = torch.full((len(draws),), -1, device=logits.device)
    return Sampled(drawn.index_copy(0, _integers(rows, logits), torch.cat(tokens)) if rows else drawn, failed)


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens [n] int64 of logits [n, V] F32 behind penalties and masks; -1 where the largest is NaN or infinite.

    The likeliest where the temperature is 0, else what Gumbel noise makes the largest.
    """
    warm = [row for row, draw in enumerate(draws) if draw.params.temperature > 0.0]
    if not warm:
        return greedy(logits)
    index = upload(torch.tensor(warm), logits.device)
    drawn = [draws[row] for row in warm]
    values = logits.index_select(0, index).double()
    temperatures = torch.tensor([[draw.params.temperature] for draw in drawn], dtype=torch.float64)
    # From the largest down, so that the lowest temperatures do not overflow.
    scaled = (values - values.amax(-1, keepdim=True)) / upload(temperatures, logits.device)
    words = [(draw.seed, draw.index, len(draw.tokens)) for draw in drawn]
    noisy = filtered(scaled, [draw.params for draw in drawn]) + gumbel_noise(logits.shape[1], words, logits.device)
    tokens = greedy(noisy)
    return tokens if len(warm) == len(draws) else greedy(logits).index_copy(0, index, tokens)


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


def penalised(logits: Tensor, draw: Draw) -> Tensor:
    """Penalties and bias. Repetition counts prompt and answer; presence and frequency the answer alone."""
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = _integers(sorted(set(draw.tokens)), logits)
        values = logits[seen]
        factor = params.repetition_penalty
        logits = logits.index_put((seen,), torch.where(values > 0, values / factor, values * factor))
    if params.presence_penalty or params.frequency_penalty:
        answer = torch.tensor(draw.tokens[draw.prompt_length :], dtype=torch.int64)
        counts = upload(torch.bincount(answer, minlength=logits.shape[0]), logits.device)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.logit_bias:
        ids = _integers(list(params.logit_bias), logits)
        bias = upload(torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype), logits.device)
        logits = logits.index_put((ids,), logits[ids] + bias)
    return logits


def allowed(logits: Tensor, draw: Draw) -> Tensor:
    """-inf for what may not come: tokens that would end the answer too early, and what the mask forbids."""
    params, made = draw.params, len(draw.tokens) - draw.prompt_length
    too_early = list(draw.ending) if made < params.min_tokens else []
    if too_early:
        logits = logits.index_fill(0, _integers(too_early, logits), -torch.inf)
    if params.token_mask is not None:
        mask = params.token_mask(draw.tokens[draw.prompt_length :])
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != logits.shape or mask.dtype != torch.bool or not mask.any():
                raise ValueError(
                    f"token_mask returned {_described(mask)}; a bool tensor [{logits.shape[0]}] with at least one "
                    "allowed token is expected"
                )
            mask = mask.cpu()
            if too_early and not mask.index_fill(0, torch.tensor(too_early), False).any():
                raise ValueError(
                    f"token_mask allows only tokens that would end the answer, and min_tokens {params.min_tokens} "
                    f"forbids those after {made} tokens"
                )
            logits = logits.masked_fill(~upload(mask, logits.device), -torch.inf)
    return logits


def _integers(values: Sequence[int], beside: Tensor) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.int64), beside.device)


def _not_finite() -> OctavoError:
    return OctavoError(
        "The largest logit is NaN or infinite, so no token can be drawn. The weights are damaged or a kernel is wrong: "
        "compare with --numerics plain."
    )


def _described(mask: object) -> str:
    return f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
