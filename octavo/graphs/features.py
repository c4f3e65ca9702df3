"""What newer versions of torch tell about captured graphs: used where a probe finds it, named in the dump where not.

Probed by presence, not by version: builds differ, and drivers too.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a torch may have."""

    name: str
    use: str
    """What it is for here."""
    found: bool


def input_liveness() -> Feature:
    """``capture_begin(check_input_liveness=True)``: a replay of freed inputs is an error. From torch 2.13."""
    parameters = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    return Feature(
        "check_input_liveness",
        "in modes compare and poison a replay whose inputs were freed is an error",
        "check_input_liveness" in parameters,
    )


def features() -> tuple[Feature, ...]:
    """All of them, as this torch has them."""
    return (input_liveness(),)
