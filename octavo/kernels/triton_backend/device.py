"""What the kernels ask of the device that they run on."""

from __future__ import annotations

import torch


def multiprocessors(device: torch.device) -> int:
    """Of a GPU: programs are spread over them."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    """Whether it has the instructions that newer GPUs have no more."""
    return torch.cuda.get_device_capability(device) == (9, 0)
