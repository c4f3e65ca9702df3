"""From the host to a device without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device. The copy takes its place among what the device has been told to do.

    Page-locked memory in between is what makes that possible: from other memory a copy waits for the device.
    """
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
