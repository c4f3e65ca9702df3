"""Schedulers with one planted error each: a test that is worth something tells every one of them from the true one."""

from __future__ import annotations

from octavo.kernels.paging import PAGE_TOKENS
from octavo.runtime.scheduler import Scheduler, Sequence, Step


class LastComeFirstServed(Scheduler):
    """Serves whoever came last."""

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.waiting.insert(0, self.waiting.pop())


class OvertakesByMore(Scheduler):
    """Lets prompts overtake that take more than half of the rows."""

    def _overtaking(self, rows: int) -> list[Sequence]:
        return super()._overtaking(2 * rows - 1)


class ReversedBatch(Scheduler):
    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        step.work.reverse()
        return step


class OneRowTooMany(Scheduler):
    def schedule(self, now: float) -> Step:
        self.row_budget += 1
        step = super().schedule(now)
        self.row_budget -= 1
        return step


class IdleRows(Scheduler):
    """Leaves the last of several requests out, now and then."""

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        if len(step.work) > 3 and not step.new_pages:
            step.rows -= step.work[-1].stop - step.work[-1].start
            step.work.pop()
        return step


class ForgottenPage(Scheduler):
    """Does not tell the page table of pages that come with a decode row."""

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        step.new_pages = [entry for entry in step.new_pages if entry[1] == 0 or now < 101.0]
        return step


class SharedPage(Scheduler):
    """Lets the youngest write where the oldest does."""

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        if len(self.running) > 1:
            oldest, youngest = self.running[0], self.running[-1]
            step.new_pages.append((youngest.slot, 0, oldest.pages[0]))
        return step


class ResumedAfterPreemption(Scheduler):
    def schedule(self, now: float) -> Step:
        before = {sequence: sequence.computed for sequence in self.running}
        step = super().schedule(now)
        for sequence in step.preempted:
            sequence.computed = before[sequence]
        return step


class LostRows(Scheduler):
    """Takes a chunk that does not end its prompt for one row longer than it is."""

    def computed(self, step: Step) -> None:
        super().computed(step)
        for work in step.work:
            work.sequence.computed += not work.samples


class IgnoredDeadlines(Scheduler):
    def schedule(self, now: float) -> Step:
        return super().schedule(0.0)


class EarlyDeadlines(Scheduler):
    def schedule(self, now: float) -> Step:
        return super().schedule(now + 0.2)


class LeakedPage(Scheduler):
    def finish(self, sequence: Sequence) -> None:
        if len(sequence.pages) > 1:
            sequence.pages.pop()
        super().finish(sequence)


class KeptSlot(Scheduler):
    """Ends what waits, and leaves what runs where it is."""

    def finish(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            sequence.done = True
        super().finish(sequence)


class OldestGivesWay(Scheduler):
    """When pages run out it is the oldest that gives way."""

    def schedule(self, now: float) -> Step:
        full = [s for s in self.running if len(s.tokens) > len(s.pages) * PAGE_TOKENS]
        if full and not self.pages.free and len(self.running) > 1:
            victim = self.running.pop(0)
            self.running.append(victim)
        return super().schedule(now)


BROKEN = (
    LastComeFirstServed,
    OvertakesByMore,
    ReversedBatch,
    OneRowTooMany,
    IdleRows,
    ForgottenPage,
    SharedPage,
    ResumedAfterPreemption,
    LostRows,
    IgnoredDeadlines,
    EarlyDeadlines,
    LeakedPage,
    KeptSlot,
    OldestGivesWay,
)
