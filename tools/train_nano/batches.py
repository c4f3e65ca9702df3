"""Batches for training: conversations of several kinds side by side, and what the losses need to know of them.

Everything is a function of (seed, step), made on the CPU by worker processes ahead of time.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import OctavoError

_AHEAD = 2
"""Steps that a worker prepares beyond the one it is asked for."""
_TIMEOUT = 120.0
_HEARTBEAT = 5.0
"""Seconds after which an idle worker looks whether the trainer still lives: one that was killed closes nothing."""
_WANTED_SHARE = 0.6
"""Of the tokens of a batch, at most so many predictions are learned, so that all batches of a mix have one shape."""


class Source(Protocol):
    """What fills rows (``tools.train_nano.corpus.Corpus``)."""

    def batch(
        self, kind: str, rows: int, length: int, step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Conversations of one kind in a batch, and their share of the loss."""

    kind: str
    rows: int
    share: float


@dataclass(frozen=True, slots=True)
class Mix:
    """One forward pass: parts of one length."""

    length: int
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return self.length * sum(part.rows for part in self.parts)


@dataclass
class Batch:
    """Row r of the batch is conversation r; ``wanted`` counts through the flattened ids."""

    ids: Tensor
    """[B, T] int64."""
    wanted: Tensor
    """[n] int64: rows that predict something; the last ones may be padding, with weight 0 and kind -1."""
    targets: Tensor
    """[n] int64."""
    weights: Tensor
    """[n] F32: of each prediction in the loss, shares included."""
    kinds: Tensor
    """[n] int64: which part the prediction belongs to, -1 of padding."""
    answers: Tensor
    """[n] int64: which answer; an answer is a run of predictions."""
    samples: Tensor
    """[B, m] int64: positions on which the indexer is taught."""

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        moved = [getattr(self, f.name).pin_memory().to(device, non_blocking=True) for f in fields(self)]
        return Batch(*moved)


def make_batch(source: Source, mix: Mix, step: int, samples: int) -> Batch:
    """``samples``: positions for the indexer in the whole batch, about."""
    filled = [source.batch(part.kind, part.rows, mix.length, step) for part in mix.parts]
    ids, weights = (np.concatenate([pair[i] for pair in filled]) for i in (0, 1))
    part_of_row = np.repeat(np.arange(len(mix.parts)), [part.rows for part in mix.parts])
    row, place = np.nonzero(weights)
    kinds = part_of_row[row]
    raw = weights[row, place]
    totals = np.bincount(kinds, raw, len(mix.parts))
    shares = np.array([part.share for part in mix.parts]) / np.maximum(totals, 1e-6)
    first = np.ones(len(row), dtype=bool)
    first[1:] = (row[1:] != row[:-1]) | (place[1:] != place[:-1] + 1)
    room = round(mix.tokens * _WANTED_SHARE)

    def padded(values: npt.NDArray[Any], empty: int) -> Tensor:
        values = values[:room]
        return torch.from_numpy(np.pad(values, (0, room - len(values)), constant_values=empty))

    return Batch(
        ids=torch.from_numpy(ids),
        wanted=padded(row * mix.length + place - 1, 0),
        targets=padded(ids[row, place], 0),
        weights=padded((raw * shares[kinds]).astype(np.float32), 0),
        kinds=padded(kinds, -1),
        answers=padded(np.cumsum(first) - 1, 0),
        samples=torch.from_numpy(_samples(weights, max(2, samples // len(ids)), step)),
    )


def _samples(weights: npt.NDArray[np.float32], count: int, step: int) -> npt.NDArray[np.int64]:
    """Positions [B, count]: three of four predict something where a conversation has that many, the others anything."""
    rng = np.random.default_rng(step)
    noise = rng.random(weights.shape)
    noise[:, :-1] -= (weights[:, 1:] > 0) & (rng.random(weights[:, 1:].shape) < 0.75)
    return np.argsort(noise, axis=1)[:, :count].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Order:
    """What a step needs: its forward passes."""

    step: int
    mixes: tuple[Mix, ...]
    samples: int


def fill(source: Source, order: Order) -> list[Batch]:
    return [make_batch(source, mix, order.step, order.samples) for mix in order.mixes]


class Supply:
    """Batches of consecutive steps. Workers get orders some steps ahead; a change of plan arrives that much later."""

    def __init__(self, make_source: Callable[[], Source], workers: int) -> None:
        """``make_source`` must be picklable if there are ``workers``; without any, batches are made when asked for."""
        self._plans: dict[int, tuple[Mix, ...]] = {}
        self._source = make_source() if not workers else None
        context = multiprocessing.get_context("spawn")
        self._requests = [context.Queue() for _ in range(workers)]
        self._results: list[Any] = [context.Queue() for _ in range(workers)]
        self._processes = [
            context.Process(target=_serve, args=(make_source, asked, made), daemon=True)
            for asked, made in zip(self._requests, self._results, strict=True)
        ]
        for process in self._processes:
            process.start()
        self._ordered: int | None = None

    def get(self, step: int, plan: Callable[[int], tuple[Mix, ...]], samples: int) -> list[tuple[Mix, Batch]]:
        """The batches of ``step``; steps must be asked for in order. ``plan`` is asked once for every step, ahead."""
        if self._source is not None:
            mixes = plan(step)
            return list(zip(mixes, fill(self._source, Order(step, mixes, samples)), strict=True))
        count = len(self._processes)
        begin = step if self._ordered is None else self._ordered
        self._ordered = step + count * _AHEAD
        for ahead in range(begin, self._ordered):
            self._plans[ahead] = plan(ahead)
            self._requests[ahead % count].put(Order(ahead, self._plans[ahead], samples))
        try:
            made = self._results[step % count].get(timeout=_TIMEOUT)
        except queue.Empty as error:
            raise OctavoError(f"A data worker gave nothing for {_TIMEOUT:.0f} s; see its message above.") from error
        if isinstance(made, BaseException):
            raise made
        batches = [Batch(*(torch.from_numpy(array) for array in arrays)) for arrays in made]
        return list(zip(self._plans.pop(step), batches, strict=True))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _serve(make_source: Callable[[], Source], requests: Any, results: Any) -> None:
    """A worker's life: orders in, arrays out, in order, as long as the trainer lives."""
    torch.set_num_threads(1)
    trainer = multiprocessing.parent_process()
    try:
        source = make_source()
        while trainer is not None and trainer.is_alive():
            try:
                order = requests.get(timeout=_HEARTBEAT)
            except queue.Empty:
                continue
            results.put([[getattr(b, f.name).numpy() for f in fields(b)] for b in fill(source, order)])
    except Exception as error:
        results.put(error)
