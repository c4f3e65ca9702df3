"""Every test of this directory starts with the device's memory free."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """An engine that is gone holds its memory until its reference cycles are collected."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
