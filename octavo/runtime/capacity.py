"""What fits: how many requests and tokens the state has room for, decided before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.errors import OctavoError, UsageError
from octavo.kernels.paging import PAGE_TOKENS, pages_for
from octavo.model.config import TextConfig
from octavo.model.memory import available_memory
from octavo.runtime.config import EngineConfig
from octavo.runtime.pools import PoolSizes, Storage, pool_bytes

DEFAULT_TOKENS_ON_CPU = 65_536
DEFAULT_FRACTION_ON_CUDA = 0.85


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of the pools and what follows from them."""

    sizes: PoolSizes
    storage: Storage
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    request_bytes: int
    """Of a request, however long."""
    page_bytes: int

    @property
    def tokens(self) -> int:
        """Of all requests together."""
        return self.sizes.pages * PAGE_TOKENS

    @property
    def bytes(self) -> int:
        return self.sizes.slots * self.request_bytes + self.sizes.pages * self.page_bytes

    def describe(self) -> str:
        """One line, printed at start."""
        token_bytes = self.page_bytes / PAGE_TOKENS
        return (
            f"room for {self.tokens:,} tokens at {token_bytes:,.0f} bytes each ({self.storage.value}) "
            f"and {self.sizes.slots} requests at {self.request_bytes / 1e6:.2f} MB: {self.bytes / 1e9:.2f} GB; "
            f"longest request {self.max_model_len:,} tokens"
        )


def step_bytes(text: TextConfig, rows: int) -> int:
    """A generous estimate of what a step of ``rows`` rows needs beside weights and state: buffers and temporaries.

    The widest values of a row, queries and streams, exist as F64 products and as BF16 buffers at the same time.
    """
    widest = 2 * text.num_attention_heads * text.head_dim + 3 * text.hc_mult * text.hidden_size
    return rows * widest * (8 + 2)


def plan_capacity(
    config: EngineConfig, text: TextConfig, storage: Storage, device: torch.device, weight_bytes: int, step: int
) -> Capacity:
    """Sizes from ``kv_tokens``, or from ``memory_fraction`` of what is free beside ``weight_bytes`` that are still to
    be loaded and the ``step`` bytes that a step needs. The rest of the fraction is for the CUDA graphs themselves.

    Raises :class:`OctavoError` with the numbers if not even one page fits.
    """
    if config.max_model_len is not None and config.max_model_len > text.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {config.max_model_len}: the model has positions up to {text.max_position_embeddings}"
        )
    longest = config.max_model_len or text.max_position_embeddings
    slots = config.max_requests
    one = PoolSizes(slots=1, pages=1, max_pages=pages_for(longest))
    both = pool_bytes(text, one, storage)
    page_bytes = pool_bytes(text, PoolSizes(slots=1, pages=2, max_pages=one.max_pages), storage) - both
    request_bytes = both - page_bytes
    useful = slots * pages_for(longest)
    if config.kv_tokens is not None or (config.memory_fraction is None and device.type == "cpu"):
        tokens = config.kv_tokens if config.kv_tokens is not None else DEFAULT_TOKENS_ON_CPU
        pages = pages_for(tokens)
        longest = min(longest, tokens)
    else:
        fraction = config.memory_fraction if config.memory_fraction is not None else DEFAULT_FRACTION_ON_CUDA
        free = available_memory(device) - weight_bytes - step
        budget = int(free * fraction) - slots * request_bytes
        pages = budget // page_bytes
        if pages < 1:
            raise OctavoError(
                f"{device}: {free / 1e9:.2f} GB beside weights and the {step / 1e9:.2f} GB of a step are not enough "
                f"for {slots} requests ({slots * request_bytes / 1e9:.2f} GB) and a page. Lower --max-requests or "
                "--chunk, load fewer layers (--layers), or choose another device (--device)."
            )
    pages = min(pages, useful)
    longest = min(longest, pages * PAGE_TOKENS)
    if config.max_model_len is not None and longest < config.max_model_len:
        raise UsageError(
            f"--max-model-len {config.max_model_len}: there is room for {longest} tokens; raise --kv-tokens or "
            "--memory-fraction"
        )
    sizes = PoolSizes(slots=slots, pages=pages, max_pages=pages_for(longest))
    return Capacity(sizes, storage, longest, request_bytes, page_bytes)
