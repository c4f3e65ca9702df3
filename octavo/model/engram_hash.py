"""What the Engram n-gram hash multiplies, reduces and offsets by, derived from the config alone.

Each Engram layer owns one table. Its rows are divided into columns, one for each n-gram order and head, and the
size of a column is a prime that no other column of the model has. Source: spec/model.md 3.11.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.errors import OctavoError
from octavo.model.config import TextConfig

_SEED_PER_LAYER = 10007
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramHash:
    """The hash of one Engram layer (spec/model.md 3.11).

    With the classes ``c`` of a position and of its predecessors, the row of order ``n`` and head ``h`` is
    ``(c[0] * multipliers[0] ^ ... ^ c[n-1] * multipliers[n-1]) % primes[n-2][h] + offsets[(n-2) * heads + h]``.
    No product exceeds int64.
    """

    layer_id: int
    primes: tuple[tuple[int, ...], ...]
    """[orders][heads]: rows of each column, for the orders 2 to ``engram_max_ngram_size``."""
    offsets: tuple[int, ...]
    """[orders * heads]: first row of each column, order-major."""
    multipliers: tuple[int, ...]
    """[engram_max_ngram_size]: odd int64 values, the current token's first."""

    @property
    def rows(self) -> int:
        """Rows of the layer's table."""
        return self.offsets[-1] + self.primes[-1][-1]


def engram_hashes(text: TextConfig) -> tuple[EngramHash, ...]:
    """The hashes of all Engram layers, in the order of ``engram_layer_ids`` (spec/model.md 3.11).

    They are made together because the primes ascend without repetition over all layers, orders and heads.
    Raises :class:`OctavoError` where ``engram_num_embeddings`` differs from the rows that the primes give.
    """
    orders, heads = text.engram_max_ngram_size - 1, text.engram_n_heads
    primes = _primes_from(text.engram_vocab_size)
    hashes = []
    for index, layer_id in enumerate(text.engram_layer_ids):
        columns = tuple(tuple(itertools.islice(primes, heads)) for _ in range(orders))
        ends = tuple(itertools.accumulate(itertools.chain.from_iterable(columns)))
        entry = EngramHash(
            layer_id=layer_id,
            primes=columns,
            offsets=(0, *ends[:-1]),
            multipliers=_multipliers(layer_id, text.engram_max_ngram_size, text.engram_compressed_vocab_size),
        )
        if text.engram_num_embeddings[index] != entry.rows:
            raise OctavoError(
                f"text_config.engram_num_embeddings[{index}]: {text.engram_num_embeddings[index]}, but the primes of "
                f"layer {layer_id} ({orders} orders x {heads} heads from engram_vocab_size {text.engram_vocab_size}) "
                f"sum to {entry.rows}. Correct the key, or the keys that the primes follow from."
            )
        hashes.append(entry)
    return tuple(hashes)


def _primes_from(start: int) -> Iterator[int]:
    return (n for n in itertools.count(max(start, 2)) if all(n % d for d in range(2, math.isqrt(n) + 1)))


def _multipliers(layer_id: int, count: int, classes: int) -> tuple[int, ...]:
    """Odd numbers below INT64_MAX / classes, so that a class times a multiplier stays within int64."""
    generator = np.random.default_rng(_SEED_PER_LAYER * layer_id)
    halves = generator.integers(0, _INT64_MAX // classes // 2, size=count, dtype=np.int64)
    return tuple(2 * half + 1 for half in halves.tolist())
