"""The operators that the model is made of; importing this package registers them.

Those that move rows between ranks (``collectives``) are inserted by the compiler and registered with it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from octavo.kernels import torch_backend
from octavo.kernels.attend import attend, commit_window
from octavo.kernels.embed import embed_tokens
from octavo.kernels.engram import engram_gate, engram_hash, engram_lookup, token_classes
from octavo.kernels.experts import combine, experts, shared_expert
from octavo.kernels.linear import grouped_linear, linear, linear_f8, linear_f8_pair, linear_f32
from octavo.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix, mhc_site, stream_mean
from octavo.kernels.norm import rms_norm
from octavo.kernels.operator import OPERATORS
from octavo.kernels.publish import publish
from octavo.kernels.rope import index_query, window_latent
from octavo.kernels.select import select, select_candidates

__all__ = [
    "OPERATORS",
    "attend",
    "combine",
    "commit_window",
    "embed_tokens",
    "engram_gate",
    "engram_hash",
    "engram_lookup",
    "experts",
    "grouped_linear",
    "index_query",
    "linear",
    "linear_f8",
    "linear_f8_pair",
    "linear_f32",
    "mhc_collapse",
    "mhc_expand",
    "mhc_mix",
    "mhc_site",
    "publish",
    "rms_norm",
    "select",
    "select_candidates",
    "shared_expert",
    "stream_mean",
    "token_classes",
    "torch_backend",
    "window_latent",
]

if find_spec("triton") is not None and torch.cuda.is_available():
    from octavo.kernels import triton_backend as triton_backend
