"""The backend ``torch`` of numerics ``fast``: plain PyTorch with BF16 products that accumulate in F32.

Quantisers and stored types are the reference's. Each module registers its operators when it is imported.
"""

from __future__ import annotations

from octavo.kernels.torch_backend import attend, experts, linear, mhc, publish, rope, select, window

__all__ = ["attend", "experts", "linear", "mhc", "publish", "rope", "select", "window"]
