"""The backend ``triton`` of numerics ``fast``: kernels for Hopper, imported where there are Triton and a CUDA device.

Everything that is shaped by requests is read from device memory and grids depend on static sizes alone, so all of it
may stand in a captured graph. Nothing is tuned while an engine runs: how a kernel is cut stands in reviewed tables.
Each module registers its operators when it is imported.
"""

from __future__ import annotations

from octavo.kernels.triton_backend import (
    attend,
    engram_hash,
    experts,
    latent,
    linear,
    lookups,
    mhc,
    mhc_site,
    publish,
    select,
    shared_expert,
    window,
)

__all__ = [
    "attend",
    "engram_hash",
    "experts",
    "latent",
    "linear",
    "lookups",
    "mhc",
    "mhc_site",
    "publish",
    "select",
    "shared_expert",
    "window",
]
