"""What the ranks compare before the first step, so that they cannot differ unnoticed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist

from octavo.errors import OctavoError


def exchange(facts: Mapping[str, object], group: dist.ProcessGroup) -> list[dict[str, object]]:
    """Everybody's facts, by rank; they are small and fit JSON."""
    mine = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    everybody = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(everybody, padded, group=group)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(everybody, lengths, strict=True)]


def agree(facts: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Raise :class:`OctavoError` on every rank if one of them has another value of something than rank 0."""
    first, *others = exchange(facts, group)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise OctavoError(
                    f"rank {rank} differs from rank 0 in {name}: {other.get(name)} instead of {value}. All ranks need "
                    "the same octavo, torch, checkpoint and settings."
                )
