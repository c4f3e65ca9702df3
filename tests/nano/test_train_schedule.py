"""Phases end when their aims are reached or their time is over; batches say what they hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo.model.config import ModelConfig
from octavo.model.packaged import nano_path
from tools.train_nano.attention import QUERY_BLOCK
from tools.train_nano.batches import Mix, Part, make_batch
from tools.train_nano.loop import answers_right
from tools.train_nano.schedule import Phase, Schedule, full_schedule

MIX = Mix(8, (Part("a", 2, 0.75), Part("b", 1, 0.25)))
SCHEDULE = Schedule(
    phases=(
        Phase("short", 0.5, ((MIX,),), False, False, {"a": 0.9, "index": 0.8}),
        Phase("long", 0.8, ((MIX,),), True, False, {"b": 0.9}),
        Phase("last", 1.0, ((MIX,),), True, True),
    ),
    warm_up_steps=10,
    decay_from=0.5,
    last_scale=0.1,
)


class Counting:
    """Ids count up; the second half of a row is learned, in two answers."""

    def batch(
        self, kind: str, rows: int, length: int, step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        ids = np.arange(rows * length, dtype=np.int64).reshape(rows, length)
        weights = np.zeros((rows, length), dtype=np.float32)
        weights[:, [3, 4, 6]] = 1.0
        return ids, weights


def test_phases() -> None:
    assert SCHEDULE.advance(0, 0.1, {}) == 0
    assert SCHEDULE.advance(0, 0.1, {"a": 0.95}) == 0, "one aim of two"
    assert SCHEDULE.advance(0, 0.1, {"a": 0.95, "index": 0.9}) == 1
    assert SCHEDULE.advance(0, 0.6, {}) == 1, "out of time"
    assert SCHEDULE.advance(0, 0.9, {}) == 2
    assert SCHEDULE.advance(2, 1.0, {"a": 1.0, "b": 1.0, "index": 1.0}) == 2, "the last one has no end"


def test_learning_rate() -> None:
    assert SCHEDULE.scale(0, 0.0) == 0.1
    assert SCHEDULE.scale(100, 0.5) == 1.0
    assert abs(SCHEDULE.scale(100, 0.75) - 0.55) < 1e-9
    assert abs(SCHEDULE.scale(100, 1.0) - 0.1) < 1e-9


def test_a_batch() -> None:
    batch = make_batch(Counting(), MIX, step=0, samples=6)
    count = 9
    assert batch.ids.shape == (3, 8) and len(batch.wanted) == round(0.6 * 24)
    flat = batch.ids.flatten()
    assert torch.equal(flat[batch.wanted[:count] + 1], batch.targets[:count])
    assert batch.kinds.tolist() == [0] * 6 + [1] * 3 + [-1] * (len(batch.wanted) - count)
    assert batch.answers[:count].tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert torch.allclose(batch.weights[:6].sum(), torch.tensor(0.75))
    assert torch.allclose(batch.weights[6:].sum(), torch.tensor(0.25))
    assert batch.samples.shape == (3, 2)
    right = torch.tensor([True, True, False, True, False, True, True, True, True])
    assert answers_right(right, batch.answers[:count]).tolist() == [True, False, False, True, True, True]


def test_the_full_schedule_fits_the_model() -> None:
    """All lengths are ones that attention takes and that the model was made for; later phases are not easier."""
    config = ModelConfig.from_path(nano_path())
    lengths = [max(mix.length for turn in phase.steps for mix in turn) for phase in full_schedule().phases]
    assert lengths == sorted(lengths) and lengths[-1] == 4096
    assert all(length <= QUERY_BLOCK or length % QUERY_BLOCK == 0 for length in lengths)
    assert lengths[-1] <= config.text_config.max_position_embeddings
    assert [phase.until for phase in full_schedule().phases] == sorted(phase.until for phase in full_schedule().phases)
