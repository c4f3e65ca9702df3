"""What the scheduler plans, case by case; tests/runtime/test_state_machine.py tries everything else."""

from __future__ import annotations

import pytest

from octavo.errors import UsageError
from octavo.kernels.paging import PAGE_TOKENS
from octavo.runtime.scheduler import Scheduler, Sequence, Step

Plan = list[tuple[Sequence, int, int]]


def scheduler_of(*, slots: int = 8, pages: int = 64, row_budget: int = 64, max_length: int = 100_000) -> Scheduler:
    return Scheduler(slots=slots, pages=pages, row_budget=row_budget, max_length=max_length)


def add(scheduler: Scheduler, *lengths: int, deadline: float = float("inf")) -> list[Sequence]:
    """Sequences of these lengths, queued."""
    sequences = [Sequence(tokens=[7] * length, max_length=100_000, deadline=deadline) for length in lengths]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def plan_of(step: Step) -> Plan:
    return [(work.sequence, work.start, work.stop) for work in step.work]


def advance(scheduler: Scheduler, now: float = 0.0) -> Step:
    """One step: planned, computed, and a token for whoever samples."""
    step = scheduler.schedule(now)
    assert step.rows == sum(work.stop - work.start for work in step.work) <= scheduler.row_budget
    scheduler.computed(step)
    for work in step.work:
        assert work.samples == (work.stop == len(work.sequence.tokens))
        if work.samples:
            work.sequence.tokens.append(7)
    scheduler.check()
    return step


def test_prompt_of_16385_tokens_is_two_chunks_the_last_of_one_row() -> None:
    scheduler = scheduler_of(pages=300, row_budget=16_384)
    (sequence,) = add(scheduler, 16_385)
    first = scheduler.schedule(0.0)
    assert plan_of(first) == [(sequence, 0, 16_384)]
    assert not first.work[0].samples
    scheduler.computed(first)
    second = scheduler.schedule(0.0)
    assert plan_of(second) == [(sequence, 16_384, 16_385)]
    assert second.work[0].samples


def test_prompt_of_exactly_the_budget_is_one_chunk() -> None:
    scheduler = scheduler_of(row_budget=64)
    (sequence,) = add(scheduler, 64)
    assert plan_of(advance(scheduler)) == [(sequence, 0, 64)]
    assert plan_of(advance(scheduler)) == [(sequence, 64, 65)]


def test_nothing_to_do() -> None:
    step = scheduler_of().schedule(0.0)
    assert (step.work, step.new_pages, step.preempted, step.expired, step.rows) == ([], [], [], [], 0)


def test_decode_rows_before_prefill_chunks() -> None:
    """And each kind in order of arrival; whoever arrives gets the rows that are left."""
    scheduler = scheduler_of(row_budget=10)
    a, b = add(scheduler, 3, 4)
    advance(scheduler)
    c, d, e = add(scheduler, 12, 5, 9)
    assert plan_of(advance(scheduler)) == [(a, 3, 4), (b, 4, 5), (c, 0, 8)]
    assert plan_of(advance(scheduler)) == [(a, 4, 5), (b, 5, 6), (c, 8, 12), (d, 0, 4)]
    # One token left of a prompt is a decode row: d stands before the chunk of e, as c does.
    assert plan_of(advance(scheduler)) == [(a, 5, 6), (b, 6, 7), (c, 12, 13), (d, 4, 5), (e, 0, 6)]


def test_one_sample_a_prompt_with_its_last_chunk() -> None:
    scheduler = scheduler_of(row_budget=5)
    add(scheduler, 12)
    samples = []
    for _ in range(4):
        samples += [[work.samples for work in advance(scheduler).work]]
    assert samples == [[False], [False], [True], [True]]


def test_the_budget_is_spent_as_long_as_there_is_work() -> None:
    scheduler = scheduler_of(row_budget=7)
    add(scheduler, 20, 1, 1, 9)
    assert [advance(scheduler).rows for _ in range(5)] == [7, 7, 7, 7, 7]


def test_more_requests_than_rows_starve_nobody() -> None:
    """No more are admitted than can have a row in every step; the younger ones come when these have ended."""
    scheduler = scheduler_of(row_budget=3)
    sequences = add(scheduler, 1, 1, 1, 1, 1, 1, 1)
    ended = []
    for _ in range(100):
        advance(scheduler)
        assert len(scheduler.running) <= 3
        for sequence in sequences:
            if len(sequence.tokens) == 11 and not sequence.done:
                scheduler.finish(sequence)
                ended.append(sequence)
    assert ended == sequences


def test_first_come_first_served_with_a_big_head_of_the_queue() -> None:
    """What stands behind a request that waits for pages does not overtake it, though it would fit."""
    scheduler = scheduler_of(pages=4)
    (a,) = add(scheduler, 100)
    advance(scheduler)
    advance(scheduler)
    big, small = add(scheduler, 3 * PAGE_TOKENS, 1)
    assert plan_of(advance(scheduler)) == [(a, 100, 101)]
    scheduler.finish(a)
    assert plan_of(advance(scheduler)) == [(big, 0, 64)]
    scheduler.finish(big)
    assert plan_of(advance(scheduler)) == [(small, 0, 1)]


def test_a_long_prompt_holds_up_no_short_one() -> None:
    """Whoever fits whole into half of its rows is computed beside it, and decodes while it goes on."""
    scheduler = scheduler_of(row_budget=20)
    (long,) = add(scheduler, 100)
    assert plan_of(advance(scheduler)) == [(long, 0, 20)]
    a, b, half, c = add(scheduler, 4, 11, 5, 3)
    assert plan_of(advance(scheduler)) == [(long, 20, 31), (a, 0, 4), (half, 0, 5)]  # 11 is too long, 3 does not fit
    assert plan_of(advance(scheduler)) == [(a, 4, 5), (half, 5, 6), (long, 31, 46), (c, 0, 3)]
    assert scheduler.running == [long, a, half, c] and scheduler.waiting == [b]
    while long.computed + 17 < 100:
        advance(scheduler)
    *_, (last, _, stop), _ = plan_of(advance(scheduler))
    assert (last, stop) == (long, 100)
    assert scheduler.running == [long, a, b, half, c]


@pytest.mark.parametrize(
    ("slots", "pages", "overtaking"), [(2, 64, 0), (64, 4, 0), (3, 64, 1), (64, 5, 1), (64, 64, 2)]
)
def test_who_overtakes_leaves_slots_and_pages(slots: int, pages: int, overtaking: int) -> None:
    scheduler = scheduler_of(row_budget=20, slots=slots, pages=pages)
    (long,) = add(scheduler, 150)
    advance(scheduler)
    _, *short = add(scheduler, 60, 1, 1)  # the first is overtaken
    assert [work.sequence for work in advance(scheduler).work] == [long, *short[:overtaking]]


def test_who_has_overtaken_and_gives_way_returns_behind_whom_it_overtook() -> None:
    """It has grown into a page that was left for the other."""
    scheduler = scheduler_of(row_budget=20, pages=23)
    (long,) = add(scheduler, 20 * PAGE_TOKENS)
    advance(scheduler)
    overtaken, short = add(scheduler, 2 * PAGE_TOKENS, 10)
    while not short.preemptions:
        advance(scheduler)
    assert scheduler.running == [long] and scheduler.waiting == [overtaken, short]


def test_admission_needs_pages_for_the_whole_prompt() -> None:
    scheduler = scheduler_of(pages=3, row_budget=10)
    a, b = add(scheduler, PAGE_TOKENS, 2 * PAGE_TOKENS + 1)
    for _ in range(7):
        assert [work.sequence for work in advance(scheduler).work] == [a]
    scheduler.finish(a)
    step = advance(scheduler)
    assert plan_of(step) == [(b, 0, 10)]
    assert len(step.new_pages) == len(b.pages) == 3


def test_exhausted_slots() -> None:
    scheduler = scheduler_of(slots=2)
    a, b, c = add(scheduler, 2, 2, 2)
    assert plan_of(advance(scheduler)) == [(a, 0, 2), (b, 0, 2)]
    assert plan_of(advance(scheduler)) == [(a, 2, 3), (b, 2, 3)]
    slot = a.slot
    scheduler.finish(a)
    assert plan_of(advance(scheduler)) == [(b, 3, 4), (c, 0, 2)]
    assert c.slot == slot


def test_new_pages_tell_all_that_a_sequence_holds_before_its_rows_are_computed() -> None:
    scheduler = scheduler_of(slots=3, pages=20, row_budget=50)
    table: dict[tuple[int, int], int] = {}
    sequences = add(scheduler, 130, 63, 1, 64, 70)
    for _ in range(300):
        step = scheduler.schedule(0.0)
        for slot, place, page in step.new_pages:
            table[slot, place] = page
        for sequence in scheduler.running:
            told = [table[sequence.slot, place] for place in range(len(sequence.pages))]
            assert told == sequence.pages
        for work in step.work:
            assert work.stop <= len(work.sequence.pages) * PAGE_TOKENS
        scheduler.computed(step)
        for work in step.work:
            if work.samples:
                work.sequence.tokens.append(7)
            if len(work.sequence.tokens) == 200:
                scheduler.finish(work.sequence)
        scheduler.check()
    assert all(sequence.done for sequence in sequences)


def test_a_page_is_added_when_the_last_one_is_full_and_not_before() -> None:
    scheduler = scheduler_of()
    (sequence,) = add(scheduler, PAGE_TOKENS - 1)
    advance(scheduler)
    assert not advance(scheduler).new_pages  # position 63, the last of the page
    assert advance(scheduler).new_pages == [(sequence.slot, 1, sequence.pages[1])]
    assert not advance(scheduler).new_pages


def preempted_world() -> tuple[Scheduler, list[Sequence], Step]:
    """Three sequences on four pages; the oldest needs a second page and so the youngest, with two, gives way."""
    scheduler = scheduler_of(pages=4, row_budget=200)
    sequences = add(scheduler, PAGE_TOKENS, 1, PAGE_TOKENS + 1)
    advance(scheduler)
    return scheduler, sequences, advance(scheduler)


def test_preemption_picks_the_youngest() -> None:
    scheduler, (a, b, c), step = preempted_world()
    assert step.preempted == [c]
    assert plan_of(step) == [(a, 64, 65), (b, 1, 2)]
    assert (c.preemptions, c.computed, c.pages, c.slot) == (1, 0, [], -1)
    assert a.preemptions == b.preemptions == 0
    assert scheduler.running == [a, b]


def test_preempted_returns_to_the_head_of_the_queue_and_starts_from_zero() -> None:
    scheduler, (a, b, c), _ = preempted_world()
    (d,) = add(scheduler, 1)
    assert list(scheduler.waiting) == [c, d]
    assert len(c.tokens) == 66  # the sampled one is kept
    scheduler.finish(b)
    assert plan_of(advance(scheduler)) == [(a, 65, 66), (c, 0, 66)]
    assert plan_of(advance(scheduler)) == [(a, 66, 67), (c, 66, 67)]  # no page for d
    scheduler.finish(a)
    assert plan_of(advance(scheduler)) == [(c, 67, 68), (d, 0, 1)]


def test_two_preempted_keep_their_order() -> None:
    scheduler = scheduler_of(pages=3, row_budget=200)
    a, b, c = add(scheduler, PAGE_TOKENS, PAGE_TOKENS, PAGE_TOKENS)
    advance(scheduler)
    step = advance(scheduler)
    assert step.preempted == [c, b]  # a takes the page of c; b finds none, and nobody younger
    assert plan_of(step) == [(a, 64, 65)]
    assert list(scheduler.waiting) == [b, c]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """Its pages would be missing in the very next step."""
    scheduler = scheduler_of(pages=5, row_budget=500)
    a, b = add(scheduler, PAGE_TOKENS, 4 * PAGE_TOKENS)
    advance(scheduler)
    (c,) = add(scheduler, 1)
    step = advance(scheduler)
    assert step.preempted == [b]
    assert plan_of(step) == [(a, 64, 65)]
    assert scheduler.pages.free == 3
    assert list(scheduler.waiting) == [b, c]


def test_prefilling_sequence_is_preempted_like_any_other() -> None:
    scheduler = scheduler_of(pages=3, row_budget=70)
    a, b = add(scheduler, PAGE_TOKENS, 2 * PAGE_TOKENS)
    advance(scheduler)
    assert (b.computed, len(b.pages)) == (6, 2)
    step = advance(scheduler)
    assert step.preempted == [b]
    assert plan_of(step) == [(a, 64, 65)]
    assert b.computed == 0


def test_the_oldest_always_ends() -> None:
    """Two sequences that each need all pages in the end."""
    scheduler = scheduler_of(pages=3)
    sequences = add(scheduler, 10, 20)
    for _ in range(600):
        advance(scheduler)
        for sequence in sequences:
            if len(sequence.tokens) == scheduler.max_length:
                scheduler.finish(sequence)
    assert all(sequence.done for sequence in sequences)
    assert [sequence.preemptions > 0 for sequence in sequences] == [False, True]


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "prefilling", "decoding"])
def test_abort_gives_everything_back_at_once(steps: int) -> None:
    scheduler = scheduler_of(row_budget=50, pages=10)
    (sequence,) = add(scheduler, 120)
    for _ in range(steps):
        advance(scheduler)
    assert sequence.computed == min(50 * steps, 120)
    (other,) = add(scheduler, 10)
    scheduler.finish(sequence)
    assert (scheduler.pages.free, scheduler.slots.free) == (10, 8)
    scheduler.check()
    assert plan_of(advance(scheduler)) == [(other, 0, 10)]


def test_abort_while_preempted() -> None:
    scheduler, (a, b, c), _ = preempted_world()
    scheduler.finish(c)
    assert not scheduler.waiting
    assert plan_of(advance(scheduler)) == [(a, 65, 66), (b, 2, 3)]


def test_ending_twice_is_nothing() -> None:
    scheduler = scheduler_of()
    a, b = add(scheduler, 5, 5)
    advance(scheduler)
    scheduler.finish(a)
    scheduler.finish(a)
    scheduler.check()
    assert scheduler.running == [b]


def test_deadlines() -> None:
    """At the deadline it is over, running or waiting; others go on."""
    scheduler = scheduler_of(slots=2)
    (a,) = add(scheduler, 4, deadline=10.0)
    (b,) = add(scheduler, 4)
    (c,) = add(scheduler, 4, deadline=5.0)
    (d,) = add(scheduler, 4, deadline=20.0)
    assert not advance(scheduler, now=4.9).expired
    step = advance(scheduler, now=5.0)
    assert step.expired == [c]
    assert c.done
    step = advance(scheduler, now=15.0)
    assert step.expired == [a]
    assert plan_of(step) == [(b, 5, 6), (d, 0, 4)]
    assert advance(scheduler, now=1e9).expired == [d]
    assert scheduler.running == [b]


def test_deadlines_of_what_has_ended_do_not_matter() -> None:
    scheduler = scheduler_of()
    (a,) = add(scheduler, 4, deadline=10.0)
    (b,) = add(scheduler, 4, deadline=30.0)
    scheduler.finish(a)
    assert not advance(scheduler, now=20.0).expired
    assert advance(scheduler, now=30.0).expired == [b]


def test_an_expired_head_lets_others_in_at_once() -> None:
    scheduler = scheduler_of(pages=2)
    (a,) = add(scheduler, 64, deadline=10.0)
    (b,) = add(scheduler, 100)
    assert plan_of(advance(scheduler, now=1.0)) == [(a, 0, 64)]
    assert plan_of(advance(scheduler, now=10.0)) == [(b, 0, 64)]


@pytest.mark.parametrize(("pages", "max_length", "room"), [(2, 1000, 128), (100, 50, 50)])
def test_what_never_fits_is_refused(pages: int, max_length: int, room: int) -> None:
    """A prompt needs room for a token of the answer."""
    scheduler = scheduler_of(pages=pages, max_length=max_length)
    (last,) = add(scheduler, room - 1)
    with pytest.raises(UsageError, match=f"has {room} tokens; prompt and answer together have room for {room}"):
        add(scheduler, room)
    assert list(scheduler.waiting) == [last]
    assert last.max_length == room
    advance(scheduler)


def test_a_sequence_has_tokens() -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        add(scheduler_of(), 0)
