"""Calls of the backend ``torch``: any case on packed or plain pools, with dead rows soiled, or scored exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quantise import round_q4mx
from octavo.kernels.storage import packed_entry_bytes, packed_key_bytes, store_entries, store_keys
from tests.kernels.batches import Batch
from tests.kernels.calls import Outcome, mutated, row_arguments
from tests.kernels.cases import Arguments, Case
from tests.kernels.draw import MINI, Size

_STORES = {"entries": (store_entries, packed_entry_bytes), "keys": (store_keys, packed_key_bytes)}


def arguments_of(case: Case, batch: Batch, size: Size = MINI, packed: bool = False, seed: int = 0) -> Arguments:
    """The case's arguments in BF16; with ``packed``, the pools hold the same entries and keys, quantised."""
    given = case.arguments(batch, size, torch.bfloat16, seed)
    for name, (store, packed_bytes) in _STORES.items():
        pool = given.get(name)
        if packed and pool is not None:
            pages, places, channels = pool.shape
            given[name] = pool.new_zeros(pages, places, packed_bytes(channels), dtype=torch.uint8)
            address = torch.arange(pages).repeat_interleave(places), torch.arange(places).repeat(pages)
            store(given[name], *address, pool.flatten(0, 1))
    return given


def call_torch(case: Case, arguments: Arguments) -> Outcome:
    """As :func:`tests.kernels.calls.call`, of the backend ``torch``."""
    state = {name: arguments[name].clone() for name in mutated(case.operator) if arguments[name] is not None}
    given = case.operator.backends["torch"].overload(**{**arguments, **state})
    results = given if isinstance(given, tuple) else () if given is None else (given,)
    return Outcome(results, state)


def poisoned(case: Case, arguments: Arguments, slot: int) -> Arguments:
    """Dead rows hold NaN, ``slot`` and other numbers; their positions still say that they are dead."""
    changed = dict(arguments)
    dead = arguments["write_positions" if "write_positions" in arguments else "positions"] < 0
    for name in row_arguments(case.operator, arguments):
        if "positions" not in name:
            value = changed[name] = arguments[name].clone()
            value[dead] = torch.nan if value.is_floating_point() else slot if "slots" in name else 3
    return changed


def exactly_scored(arguments: Arguments) -> Arguments:
    """Arguments of the indexer whose products and sums F32 holds exactly, in any order: scores have one answer.

    Queries and keys are E2M1 codes, times scales of a half or one; weights are powers of two. Many scores are equal.
    """
    weights = arguments["weights"].float()
    powers = torch.exp2(torch.log2(weights.abs().clamp(0.5, 4.0)).round()) * weights.sign()
    keys = arguments["keys"]
    return arguments | {
        "query": round_q4mx(arguments["query"]),
        "keys": keys if keys.dtype == torch.uint8 else round_q4mx(keys),
        "weights": powers.to(torch.bfloat16),
        "scale": 2.0**-4,
    }


def on_device(arguments: Arguments, device: str) -> Arguments:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
