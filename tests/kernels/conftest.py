"""Fixtures of the operators' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """For tests that choose how many threads torch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
