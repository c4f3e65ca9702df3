"""``octavo bench kernels``: each operator's time on its own, against its floor and other implementations.

``case.py`` says what a case is, ``measure.py`` times it, ``report.py`` writes it down. Every other file holds the cases
of an operator or of a few that are alike, as functions that yield them, and is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.runtime.bench_kernels.attend import attend_cases
from octavo.runtime.bench_kernels.case import KernelCase
from octavo.runtime.bench_kernels.experts import experts_cases
from octavo.runtime.bench_kernels.linear import (
    grouped_linear_cases,
    linear_cases,
    linear_pair_cases,
    shared_expert_cases,
)
from octavo.runtime.bench_kernels.mhc import collapse_cases, expand_cases, linear_f32_cases, mix_cases, site_cases
from octavo.runtime.bench_kernels.prelude import (
    classes_cases,
    embed_cases,
    hash_cases,
    latent_cases,
    lookup_cases,
)
from octavo.runtime.bench_kernels.publish import publish_cases
from octavo.runtime.bench_kernels.select import select_cases
from octavo.runtime.bench_kernels.window import window_cases

OPERATOR_CASES: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "attend": attend_cases,
    "experts": experts_cases,
    "linear_f8": linear_cases,
    "linear_f8_pair": linear_pair_cases,
    "grouped_linear": grouped_linear_cases,
    "shared_expert": shared_expert_cases,
    "linear_f32": linear_f32_cases,
    "mhc_site": site_cases,
    "mhc_mix": mix_cases,
    "mhc_collapse": collapse_cases,
    "mhc_expand": expand_cases,
    "select": select_cases,
    "publish": publish_cases,
    "commit_window": window_cases,
    "window_latent": latent_cases,
    "token_classes": classes_cases,
    "engram_hash": hash_cases,
    "engram_lookup": lookup_cases,
    "embed_tokens": embed_cases,
}
"""Cases by operator, in the order of the report."""
