"""Writing some of the rows of a call to a pool, without the host learning which."""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(written: Tensor, address: tuple[Tensor, ...], *stores: tuple[Tensor, Tensor]) -> None:
    """For every (pool, values): pool[address] = values in the rows where ``written``; nothing else changes.

    written [T] bool with T > 0; address one [T] int64 for each leading dimension of the pools, valid in every row and
    distinct in the written ones; values [T, ...].

    A row that is not written repeats the first one that is: the same value at the same address, so that their order
    cannot matter. If none is written, all rows put back what stands at the address of row 0.
    """
    first = written.int().argmax()
    row = torch.where(written, torch.arange(written.shape[0], device=written.device), first)
    address = tuple(index[row] for index in address)
    for pool, values in stores:
        pool.index_put_(address, torch.where(written.any(), values[row], pool[address]))
