"""Which attention kernels of PyTorch training uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """The attention kernels that take a mask; plain ones where they do not serve (CPU, F32)."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
