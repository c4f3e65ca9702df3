"""What the kernels ask of the device that they run on."""

from __future__ import annotations

import torch


def multiprocessors(device: torch.device) -> int:
    """Of a GPU: programs are spread over them."""
    return torch.cuda.get_device_properties(device).multi_processor_count
