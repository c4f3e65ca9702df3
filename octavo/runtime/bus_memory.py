"""Memory of the host as a GPU's kernels see it: they read it over the bus, and nobody waits for the host."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from octavo.errors import OctavoError

_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: for all contexts of the process, and with an address on the device."""


class _Locked:
    """Page-locked memory in the form that PyTorch takes from others; unlocked when nothing holds it any more."""

    def __init__(self, memory: Tensor) -> None:
        address, size = memory.data_ptr(), memory.numel()
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, size, _PORTABLE | _MAPPED))
        if status:
            with contextlib.suppress(torch.AcceleratorError):  # CUDA tells whoever asks next once more; that is nobody
                torch.zeros(1, device="cuda")
            raise OctavoError(
                f"{size / 2**30:.2f} GiB of host memory cannot be locked for the GPU (CUDA error {status}), which "
                "--engram host needs (auto means that on CUDA). Use --engram mmap, which locks nothing, or --engram "
                "device."
            )
        self._memory = memory
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


def seen_from(device: torch.device, memory: Tensor) -> Tensor:
    """[n] uint8 of the host, contiguous and writable -> the same memory as a tensor of a CUDA device.

    Locked as long as the result lives. Raises :class:`OctavoError` if the system does not lock so much.
    """
    with torch.cuda.device(device):
        return torch.as_tensor(_Locked(memory), device=device)
