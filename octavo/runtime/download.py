"""From a device to the host while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor


class Download:
    """Values of a device on their way to the host.

    The copies take their place among what the device has been told to do, and whoever reads them waits for these alone,
    not for what the device has been told since: page-locked memory and an event make that possible.
    """

    def __init__(self, *values: Tensor) -> None:
        """All on one device; at least one."""
        self._values = values
        self._arrived: torch.cuda.Event | None = None
        if values[0].device.type == "cuda":
            pinned = [torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in values]
            self._values = tuple(
                there.copy_(value, non_blocking=True) for there, value in zip(pinned, values, strict=True)
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values[0].device))

    def read(self) -> tuple[Tensor, ...]:
        """Wait until they have arrived -> the values, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
