"""An answer does not depend on what else is in work: batched, preempted and chunked runs equal lone ones, bitwise.

Ids and log probabilities are compared, the latter as exact floats: they show a difference that the choice of a token
would hide. Lone runs use BF16 storage and one chunk, mixes packed storage, so that these agree too.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.model.initialise import init_checkpoint
from octavo.runtime.answer_text import AnswerText
from octavo.runtime.assemble import Assembly, assemble
from octavo.runtime.capacity import Capacity
from octavo.runtime.config import EngineConfig
from octavo.runtime.core import EngineCore
from octavo.runtime.pools import PoolSizes, Storage
from octavo.runtime.request import Answer, Delta, Request
from octavo.runtime.runner import Runner
from octavo.runtime.sampling import SamplingParams
from octavo.runtime.scheduler import Scheduler
from tests.conftest import ReportCount
from tests.model.mini_run import MINI

PARAMS = (
    SamplingParams(max_tokens=5, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=5, logprobs=2, temperature=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=6, logprobs=1, temperature=1.3, seed=4, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=4, logprobs=1, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=1, temperature=0.5, seed=9, n=2),
)
LENGTHS = (1, 61, 62, 63, 17, 62, 31, 63, 64, 126, 90, 61)
Outcome = tuple[list[int], object, object]


class Case:
    """A prompt, its parameters, and what comes of it alone."""

    def __init__(self, number: int, assembly: Assembly) -> None:
        draw = random.Random(number)
        vocabulary = assembly.config.text_config.vocab_size
        self.prompt = [draw.randrange(3, vocabulary) for _ in range(LENGTHS[number % len(LENGTHS)])]
        self.params = PARAMS[number % len(PARAMS)]
        self.index = number % self.params.n
        clients = run(assembly, [self], slots=1, pages=8, budget=1000, storage=Storage.BF16)
        self.alone = clients[0].outcome()


class Client:
    """Hears one request's deltas."""

    def __init__(self) -> None:
        self.prompt_logprobs: object = None
        self.answer: Answer | None = None

    def hear(self, delta: Delta) -> None:
        assert self.answer is None, "a delta after the answer"
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.answer = delta.answer

    def outcome(self) -> Outcome:
        assert self.answer is not None
        return self.answer.ids, self.answer.logprobs, self.prompt_logprobs


def core_of(
    assembly: Assembly, *, slots: int, pages: int, budget: int, storage: Storage, overlap: bool = False
) -> EngineCore:
    sizes = PoolSizes(slots=slots, pages=pages, max_pages=pages)
    capacity = Capacity(sizes, storage, pages * 64, 0, 0)
    scheduler = Scheduler(slots=slots, pages=pages, row_budget=budget, max_length=pages * 64)
    return EngineCore(scheduler, Runner(replace(assembly, capacity=capacity)), overlap=overlap)


def request_of(case: Case, assembly: Assembly, client: Client, room: int) -> Request:
    params = case.params
    return Request(
        tokens=list(case.prompt),
        max_length=room,
        params=params,
        text=AnswerText(assembly.tokenizer, params.stop),
        sink=client.hear,
        prompt=0,
        index=case.index,
        seed=params.seed or 0,
        ending=() if params.ignore_eos else (assembly.config.eos_token_id,),
        prompt_length=len(case.prompt),
        arrival=0.0,
    )


def run(
    assembly: Assembly,
    cases: list[Case],
    *,
    slots: int,
    pages: int,
    budget: int,
    storage: Storage,
    arrivals: list[int] | None = None,
    overlap: bool = False,
) -> list[Client]:
    """All cases through one core; case i arrives before step ``arrivals[i]``."""
    core = core_of(assembly, slots=slots, pages=pages, budget=budget, storage=storage, overlap=overlap)
    clients = [Client() for _ in cases]
    due = sorted(zip(arrivals or [0] * len(cases), range(len(cases)), strict=True))
    step = 0
    while due or core.busy:
        while due and due[0][0] <= step:
            i = due.pop(0)[1]
            core.add(request_of(cases[i], assembly, clients[i], pages * 64))
        core.step()
        step += 1
    core.scheduler.check()
    assert core.scheduler.pages.free == pages and core.scheduler.slots.free == slots
    assert bool(core.stats.overlapped_steps) == overlap
    return clients


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    return assemble(EngineConfig(model=MINI, device="cpu", max_requests=1, kv_tokens=64))


@pytest.fixture(scope="module")
def cases(assembly: Assembly, long_form: bool) -> list[Case]:
    return [Case(number, assembly) for number in range(60 if long_form else 15)]


def assert_as_alone(cases: list[Case], clients: list[Client], note: object) -> None:
    for case, client in zip(cases, clients, strict=True):
        assert client.outcome() == case.alone, (len(case.prompt), case.params, note)


def test_random_mixes(assembly: Assembly, cases: list[Case], report_count: ReportCount, long_form: bool) -> None:
    """Random subsets, arrivals, slots, row budgets and page counts, many of them too few for all at once; in every
    second one steps overlap."""
    draw = random.Random(1)
    mixes, preemptions, answers = 300 if long_form else 8, 0, 0
    for mix in range(mixes):
        chosen = draw.sample(cases, draw.randint(2, 6))
        shape = {
            "slots": draw.randint(1, 6),
            "pages": draw.choice((3, 3, 4, 20)),
            "budget": draw.choice((1, 3, 7, 16, 40, 200)),
        }
        if shape["budget"] == 1:
            chosen = [case for case in chosen if len(case.prompt) < 40] or cases[:1]
        arrivals = [draw.randint(0, 5) for _ in chosen]
        overlap = mix % 2 == 1
        clients = run(assembly, chosen, **shape, storage=Storage.PACKED, arrivals=arrivals, overlap=overlap)
        assert_as_alone(chosen, clients, (mix, shape, arrivals))
        preemptions += sum(client.answer.preemptions for client in clients if client.answer)
        answers += len(chosen)
    report_count("answers in random mixes equal to lone ones", answers, f"{mixes} mixes")
    report_count("preemptions in these mixes", preemptions)


def test_preempted_equals_uninterrupted(assembly: Assembly) -> None:
    """Two requests grow beyond the pages there are: the younger is put back in the middle of its answer."""
    params = SamplingParams(max_tokens=12, logprobs=2, temperature=0.8, seed=5, ignore_eos=True)
    pair = [Case(3, assembly), Case(10, assembly)]
    for case, length in zip(pair, (60, 58), strict=True):
        case.prompt, case.params, case.index = ([3, 4, 5, 6, 7] * 12)[:length], params, 0
        case.alone = run(assembly, [case], slots=1, pages=4, budget=100, storage=Storage.BF16)[0].outcome()
    for overlap in (False, True):
        clients = run(assembly, pair, slots=2, pages=3, budget=100, storage=Storage.PACKED, overlap=overlap)
        assert clients[1].answer is not None and clients[1].answer.preemptions > 0
        assert_as_alone(pair, clients, ("preempted", overlap))


def test_real_vocabulary(tmp_path: Path, report_count: ReportCount) -> None:
    """The same on the tiny preset: 129,280 ids, the published tokenizer."""
    init_checkpoint("tiny", tmp_path / "tiny", seed=0)
    assembly = assemble(EngineConfig(model=tmp_path / "tiny", device="cpu", max_requests=1, kv_tokens=64))
    cases = [Case(number, assembly) for number in range(5)]
    clients = run(assembly, cases, slots=4, pages=5, budget=20, storage=Storage.PACKED, arrivals=[0, 0, 1, 1, 3])
    assert_as_alone(cases, clients, "tiny")
    report_count("answers in random mixes equal to lone ones", len(cases), "tiny preset")


def test_the_comparison_can_fail(assembly: Assembly, cases: list[Case]) -> None:
    """One token more in the prompt shows in the log probabilities, even where the ids are the same."""
    other = Case(5, assembly)
    other.prompt = [*other.prompt, 9]
    (client,) = run(assembly, [other], slots=1, pages=8, budget=1000, storage=Storage.BF16)
    assert client.outcome()[1] != other.alone[1]
