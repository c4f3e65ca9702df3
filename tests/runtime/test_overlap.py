"""Steps that are launched before the one before is read: order, ends, counters, and what masks and clients see.

tests/runtime/test_state_machine.py and tests/runtime/test_batching.py compare the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from octavo import Engine, EngineConfig, UsageError
from octavo.runtime.core import EngineCore
from octavo.runtime.request import Delta
from octavo.runtime.runner import Chunk
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from tests.model.mini_run import MINI
from tests.runtime.engine_world import Client, Sizes, World
from tests.runtime.loop_world import TOKENIZER
from tests.runtime.stub_model import VOCABULARY, Ask, FailingMask, StubRunner

CONFIG: dict[str, Any] = {
    **{"model": MINI, "layers": 3, "device": "cpu", "kv_tokens": 512, "max_requests": 4},
    **{"chunk": 16, "buckets": "16", "graphs": "poison"},
}
OVERLAPS: tuple[Literal["on", "off"], ...] = ("off", "on")
ROOMY = Sizes(slots=4, pages=40, row_budget=64, max_length=600)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, **fields)


class Recording(StubRunner):
    """Writes down what is launched."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.events: list[str] = []

    def run(self, chunks: Sequence[Chunk], drawn: Tensor | None = None) -> Tensor:
        self.events.append("run")
        return super().run(chunks, drawn)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        self.events.append("draw")
        return super().logits(hidden, rows)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (False, "run draw token run draw token run draw token"),
        (True, "run draw run token draw run token draw token"),
    ],
)
def test_a_step_is_launched_before_the_one_before_is_read(overlap: bool, expected: str) -> None:
    """And what it draws is drawn when the tokens before are known."""
    scheduler = Scheduler(slots=1, pages=2, row_budget=64, max_length=100)
    runner = Recording(scheduler)
    world = World(ROOMY)
    (client,) = world.submit(Ask([5, 6], params(max_tokens=3)))
    client.request.sink = lambda delta: runner.events.append("token")
    core = EngineCore(scheduler, runner, overlap=overlap)
    core.add(client.request)
    while core.busy:
        core.step()
    assert " ".join(runner.events) == expected
    assert core.stats.steps == 3, "no row beyond the end"
    assert core.stats.overlapped_steps == (2 if overlap else 0)
    assert core.stats.rows_in_vain == 0


def lone(ask: Ask) -> Client:
    """A client who has heard the whole answer."""
    world = World(ROOMY)
    (client,) = world.submit(ask)
    world.end()
    return client


def test_an_end_that_nobody_foresaw_costs_a_row() -> None:
    """A stop token, a stop string and a mask that fails; an end by length costs none."""
    prompt = [7, 8, 9]
    ids = lone(Ask(prompt, params(max_tokens=20))).ids
    assert ids.index(ids[6]) == 6, "no earlier stop"
    ends: list[tuple[SamplingParams, int, int, int]] = [
        (params(max_tokens=7), 7, 9, 0),
        (params(max_tokens=20, stop_token_ids=(ids[6],)), 7, 10, 1),
        (params(max_tokens=20, stop=(TOKENIZER.decode([ids[6]]),)), 7, 10, 1),
        (params(max_tokens=20, token_mask=FailingMask(7)), 7, 11, 1),
    ]
    for each, length, rows, in_vain in ends:
        world = World(ROOMY, overlap=True)
        (client,) = world.submit(Ask(prompt, each))
        world.end()
        assert client.ids == ids[:length]
        assert (world.core.stats.rows, world.core.stats.rows_in_vain) == (rows, in_vain), each


def test_an_aborted_answer_holds_what_has_been_read() -> None:
    """Its slot and pages are free at once, though its row is under way; others may use them in the next step."""
    world = World(Sizes(slots=1, pages=3, row_budget=64, max_length=100), overlap=True)
    (first,) = world.submit(Ask([5] * 60, params(max_tokens=30)))
    (second,) = world.submit(Ask([6] * 60, params(max_tokens=30)))
    for _ in range(4):
        world.step()
    world.abort(first)
    assert first.answer is not None and len(first.answer.ids) == 3
    assert world.scheduler.slots.free == 1 and world.scheduler.pages.free == 3
    world.step()
    assert second.request.slot == 0 and world.core.stats.rows_in_vain == 1
    world.end()
    assert second.answer is not None and len(second.answer.ids) == 30


@pytest.mark.parametrize("foreseen", (True, False))
def test_nobody_gives_way_to_an_answer_that_ends(foreseen: bool) -> None:
    """When pages are short, what is in flight is read first: the older answer ends with it, at a stop token, and leaves
    its pages. One that ends by its length has left them when its last token was drawn."""
    prompt = next(p for p in range(5, 50) if ends_once(lone(Ask([p] * 40, params(max_tokens=25))).ids))
    stop = lone(Ask([prompt] * 40, params(max_tokens=25))).ids[-1]
    world = World(Sizes(slots=2, pages=2, row_budget=128, max_length=128), overlap=True)
    old_params = params(max_tokens=25) if foreseen else params(max_tokens=60, stop_token_ids=(stop,))
    (old,) = world.submit(Ask([prompt] * 40, old_params))
    (young,) = world.submit(Ask([6] * 40, params(max_tokens=60)))
    world.end()
    assert len(old.ids) == 25 and len(young.ids) == 60
    assert (old.request.preemptions, young.request.preemptions) == (0, 0)
    assert world.core.stats.early_reads == (not foreseen)


def ends_once(ids: list[int]) -> bool:
    """The last token does not stand before."""
    return ids.index(ids[-1]) == len(ids) - 1


@pytest.mark.parametrize("most", (1, 4))
def test_short_answers_take_as_many_steps_as_without(most: int) -> None:
    """Whose last token has been drawn leaves its slot at once: forty short ones queue beside a long one."""
    steps = []
    for overlap in (False, True):
        world = World(Sizes(slots=4, pages=40, row_budget=64, max_length=600), overlap=overlap)
        world.submit(Ask([5], params(max_tokens=200)))
        for number in range(40):
            world.submit(Ask([6 + number], params(max_tokens=most)))
        while world.core.stats.finished["length"] < 40:
            world.step()
        steps.append(world.core.stats.steps)
        world.end()
    assert steps[1] <= steps[0] + 1, "with overlap the last step is read one later"


def test_a_token_that_was_drawn_in_time_belongs_to_its_answer() -> None:
    """The deadline passes when it has been drawn and is still to be read."""
    for most, reason, length in ((1, "length", 1), (3, "length", 3), (5, "timeout", 3)):
        world = World(ROOMY, overlap=True)
        (client,) = world.submit(Ask([5, 6], params(max_tokens=most, timeout=5.0)))
        for _ in range(3):
            world.step()
        world.wait(6.0)
        world.end()
        assert client.answer is not None
        assert (client.answer.finish_reason, len(client.answer.ids)) == (reason, length), most


def test_masks_see_every_token_before_theirs() -> None:
    seen: list[list[int]] = []

    def mask(answer: Sequence[int]) -> Tensor:
        seen.append(list(answer))
        return torch.ones(VOCABULARY, dtype=torch.bool)

    world = World(ROOMY, overlap=True)
    (client,) = world.submit(Ask([5, 6, 7], params(max_tokens=6, token_mask=mask)))
    world.end()
    assert seen == [client.ids[:length] for length in range(6)]
    assert world.core.stats.overlapped_steps == 5


class NotFinite(StubRunner):
    """Gives no number for the row of one slot, from its third draw on."""

    draws = 0

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        self.draws += 1
        logits = super().logits(hidden, rows)
        if self.draws > 2:
            logits[0] = torch.nan
        return logits


@pytest.mark.parametrize("overlap", (False, True))
def test_a_row_without_a_token_ends_its_answer_alone(overlap: bool) -> None:
    """The row that was launched after it is dropped. The other's token is the lone one whatever was put in there."""
    world = World(ROOMY, runner=NotFinite, overlap=overlap)
    (bad,) = world.submit(Ask([5], params(max_tokens=5)))
    (good,) = world.submit(Ask([6], params(max_tokens=3)))
    heard: list[Delta] = []
    bad.request.sink = heard.append
    world.drain()
    answer = heard[-1].answer
    assert answer is not None and answer.error is not None and "NaN or infinite" in answer.error
    assert (answer.finish_reason, len(answer.ids)) == ("error", 2)
    assert good.answer is not None and good.answer.finish_reason == "length"
    assert world.core.stats.rows_in_vain == overlap


def test_an_engine_gives_the_same_answers() -> None:
    """Log probabilities of prompt and answer, penalties, stops, several answers. Buffers are poisoned before each step:
    nothing of the step before is read from them."""
    prompts = ["one", "a longer prompt than the others", "two", "three"]
    each = [
        SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1, temperature=0.8, seed=3, n=2),
        SamplingParams(max_tokens=8, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(max_tokens=8, min_tokens=3, stop_token_ids=(7,), logit_bias={7: 100.0}),
        SamplingParams(max_tokens=1, logprobs=0),
    ]
    outcomes = []
    for overlap in OVERLAPS:
        with Engine(EngineConfig(**CONFIG, overlap=overlap)) as engine:
            results = engine.generate(prompts, each)
            stats = engine.stats()
        assert (stats["overlapped_steps"] > 0) == (overlap == "on")
        answers = [(result.prompt_logprobs, answer) for result in results for answer in result.answers]
        outcomes.append([(p, a.ids, a.text, a.finish_reason, a.stop, a.logprobs) for p, a in answers])
    assert outcomes[0] == outcomes[1]
    assert {outcome[3] for outcome in outcomes[0]} == {"stop", "length"}


def test_several_ranks_do_not_overlap() -> None:
    with pytest.raises(UsageError, match="--overlap on with --ranks 2: only rank 0 knows"):
        EngineConfig(ranks=2, overlap="on")
