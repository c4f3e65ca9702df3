"""What rank 0 tells the others: the next step, rows that it wants to see, or that all is over.

A message is a flat list of integers, so that it costs one small broadcast and no pickling.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from octavo.runtime.runner import Chunk

_SHORT = 1024
"""Integers of a first broadcast; what is longer follows in a second one."""


class Kind(enum.IntEnum):
    STOP = 0
    STEP = 1
    PICK = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what enters the page table, then the chunks that are computed."""

    pages: tuple[tuple[int, int, int], ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Pick:
    """Rows of the last step, in global order, whose hidden values rank 0 needs."""

    rows: tuple[int, ...]


Message = StepPlan | Pick | None
"""None: the end."""


def encode(message: Message) -> list[int]:
    """The message as integers, its kind first."""
    if message is None:
        return [Kind.STOP]
    if isinstance(message, Pick):
        return [Kind.PICK, *message.rows]
    numbers = [int(Kind.STEP), len(message.pages), len(message.chunks)]
    for page in message.pages:
        numbers += page
    for chunk in message.chunks:
        numbers += (chunk.slot, chunk.start, len(chunk.ids))
    for chunk in message.chunks:
        numbers += chunk.ids
    return numbers


def decode(numbers: Sequence[int]) -> Message:
    """The inverse of :func:`encode`."""
    kind, rest = Kind(numbers[0]), numbers[1:]
    if kind is Kind.STOP:
        return None
    if kind is Kind.PICK:
        return Pick(tuple(rest))
    pages, chunks, values = rest[0], rest[1], rest[2:]
    entries = tuple((values[3 * i], values[3 * i + 1], values[3 * i + 2]) for i in range(pages))
    values = values[3 * pages :]
    heads = [(values[3 * i], values[3 * i + 1], values[3 * i + 2]) for i in range(chunks)]
    values, found, low = values[3 * chunks :], [], 0
    for slot, start, count in heads:
        found.append(Chunk(slot, start, list(values[low : low + count])))
        low += count
    assert low == len(values), "a plan of another length than it says"
    return StepPlan(entries, tuple(found))


def send(message: Message, group: dist.ProcessGroup) -> None:
    """From rank 0 to all others."""
    numbers = encode(message)
    first = torch.zeros(_SHORT + 1, dtype=torch.int64)
    first[0] = len(numbers)
    head = torch.tensor(numbers[:_SHORT])
    first[1 : 1 + len(head)] = head
    dist.broadcast(first, 0, group=group)
    if len(numbers) > _SHORT:
        dist.broadcast(torch.tensor(numbers[_SHORT:]), 0, group=group)


def receive(group: dist.ProcessGroup) -> Message:
    """What rank 0 sends; waits for it."""
    first = torch.empty(_SHORT + 1, dtype=torch.int64)
    dist.broadcast(first, 0, group=group)
    count = int(first[0])
    numbers = first[1 : 1 + min(count, _SHORT)].tolist()
    if count > _SHORT:
        rest = torch.empty(count - _SHORT, dtype=torch.int64)
        dist.broadcast(rest, 0, group=group)
        numbers += rest.tolist()
    return decode(numbers)
