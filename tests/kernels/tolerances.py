"""How far results of the backend ``torch`` may lie from the reference's, and why.

Quantisers and stored types are the same, so an answer differs where a sum in F32 falls on the other side of a rounding
boundary than the exact sum does. Sums of 500 terms are off by 2^-22 of their size, a BF16 step is at least 2^-8: that
is one value in some thousands. It moves by one step, unless a quantiser follows, whose steps are larger.
"""

from __future__ import annotations

import torch

from tests.kernels.calls import Outcome

TYPICAL = 2e-3
"""Median over the rows of the relative L2 error: that of four BF16 steps in a row of 67 values. An input that was not
quantised to Q8 gives 2e-2."""
_F32_SUMS = 1e-5
"""Of operators that round nothing: thousands of terms in another order; 20 Sinkhorn rounds keep the error. Tensor cores
cut off what an F32 sum cannot hold: 6e-6 of sums of 5120 products."""
_BF16_STEPS = 2.0**-7
"""Of every value by one step at most."""
LARGEST = {
    "linear": _BF16_STEPS,
    "linear_f8": _BF16_STEPS,
    "linear_f8_pair": _BF16_STEPS,
    "grouped_linear": _BF16_STEPS,
    "linear_f32": _F32_SUMS,
    "mhc_mix": _F32_SUMS,
    # One E4M3 code of 64 channels moves by an eighth: 1.6e-2. Two may.
    "window_latent": 0.03,
    "shared_expert": 0.03,
    "experts": 0.03,
    # An E2M1 code moves by half of the scale or, of the largest ones, by two scales: 2e-2 of a row of 512 values.
    "index_query": 0.04,
}
"""Of every row, by operator."""


def assert_near(name: str, actual: Outcome, expected: Outcome, what: str) -> None:
    """Results of the operator called ``name``: no row off by more than its bound, and half of them by less."""
    assert len(actual.results) == len(expected.results)
    for number, (a, b) in enumerate(zip(actual.results, expected.results, strict=True)):
        assert a.shape == b.shape
        size = torch.linalg.vector_norm(b.double().flatten(1), dim=1)
        error = torch.linalg.vector_norm((a.double() - b.double()).flatten(1), dim=1)
        assert (error <= LARGEST[name] * size).all(), f"{what}: result {number}: {error / size}"
        typical = min(TYPICAL, LARGEST[name])
        assert (error <= typical * size).double().mean() >= 0.5, f"{what}: result {number}: {error / size}"
