"""Which rows the next step computes: decode rows first, then prefill chunks, in one flat batch under a row budget.

Requests are served first come, first served, one prompt after the other. While a prompt takes more rows than a step
has, short ones overtake it: whoever fits whole into half of its rows is computed beside it, so that a long prompt holds
up no short one. When pages run out the youngest request gives its pages back and is computed again later (preemption by
recomputation); chunked prefill equals whole prefill to the bit and noise is counter-based, so its answer does not
change. The oldest request can always finish: alone, every request fits. Lengths alone decide, so that a step can be
planned while the tokens of the one before are unknown (docs/structures.md, overlapping steps).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from octavo.errors import UsageError
from octavo.kernels.paging import PAGE_TOKENS, pages_for
from octavo.runtime.allocator import Allocator

_ORDER = attrgetter("order")


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's view of a request: its tokens, and how far they are computed."""

    tokens: list[int]
    """Prompt and sampled tokens. The engine appends what it samples, perhaps before it knows which token that is."""
    max_length: int
    """Its most tokens. The last of them is not computed: nothing is sampled after it."""
    deadline: float = float("inf")
    """Clock time after which it is taken out."""
    computed: int = 0
    slot: int = -1
    """-1 while it waits."""
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0
    retired: bool = False
    """It has given back slot and pages, and is not done: its last token is on its way."""
    done: bool = False
    order: int = -1
    """Its place in order of arrival, given by :meth:`Scheduler.add`."""

    @property
    def complete(self) -> bool:
        """It has its last token, known or not."""
        return len(self.tokens) >= self.max_length


class Work(NamedTuple):
    """Tokens ``start .. stop - 1`` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    """The step's last token is the sequence's last, so the next one is sampled."""


@dataclass(slots=True)
class Step:
    """What one step computes."""

    work: list[Work] = field(default_factory=list)
    """In the order of the flat batch."""
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, index in its page list, page), to be written to the page table before the step."""
    preempted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)
    """Past their deadline, already taken out."""
    rows: int = 0
    """Of all work together."""


class Scheduler:
    """Owns slots and pages; decides, never computes."""

    def __init__(self, *, slots: int, pages: int, row_budget: int, max_length: int) -> None:
        """``row_budget`` rows a step; ``max_length`` tokens a request at most."""
        self.slots = Allocator("slots", slots)
        self.pages = Allocator("pages", pages)
        self.row_budget = row_budget
        self.max_length = min(max_length, pages * PAGE_TOKENS)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both in order of arrival."""
        self._arrivals = 0
        self._earliest = float("inf")
        """No deadline is before this."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises :class:`UsageError` if it can never be computed here."""
        self.check_room(sequence)
        sequence.max_length = min(sequence.max_length, self.max_length)
        sequence.order = self._arrivals
        self._arrivals += 1
        self._earliest = min(self._earliest, sequence.deadline)
        self.waiting.append(sequence)

    def check_room(self, sequence: Sequence) -> None:
        """Raises :class:`UsageError` if a sequence can never be computed here. May be called from any thread."""
        assert sequence.tokens, "a sequence has at least one token"
        if len(sequence.tokens) >= self.max_length:
            raise UsageError(
                f"The prompt has {len(sequence.tokens)} tokens; prompt and answer together have room for "
                f"{self.max_length}. Shorten it, or raise --kv-tokens or --max-model-len."
            )

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state; its slot and pages are free at once."""
        if sequence.done:
            return
        sequence.done = True
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        elif not sequence.retired:
            self.waiting.remove(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Its last token has been drawn: nothing more is computed for it, so others may have its slot and pages. The
        device runs steps in order. :meth:`finish` is still to come."""
        sequence.retired = True
        self.running.remove(sequence)
        self._release(sequence)

    def schedule(self, now: float) -> Step:
        """Plan the next step; empty when nothing waits. Follow it with :meth:`computed`."""
        step = Step()
        if self.is_overdue(now):
            self._expire(step, now)
        self._decode_rows(step)
        self._prefill_rows(step)
        self._admit(step)
        return step

    def is_short_of_pages(self) -> bool:
        """Whether the next step's decode rows need more pages than are free, so that somebody would give way."""
        free = self.pages.free
        return free < len(self.running) and free < sum(len(s.tokens) > len(s.pages) * PAGE_TOKENS for s in self.running)

    def is_overdue(self, now: float) -> bool:
        """Whether :meth:`schedule` would look for sequences that are past their deadline."""
        return now >= self._earliest

    def computed(self, step: Step) -> None:
        """The step's rows are in the state now."""
        for work in step.work:
            work.sequence.computed = work.stop

    def check(self) -> None:
        """Between two steps: slots and pages are where the sequences say, nothing is lost, one prompt is in part."""
        self.slots.check()
        self.pages.check()
        held = [page for sequence in self.running for page in sequence.pages]
        assert len(set(held)) == len(held) == self.pages.count - self.pages.free
        assert len(self.running) == self.slots.count - self.slots.free
        assert len(self.running) <= self.row_budget
        assert all(s.slot < 0 and not s.pages and not s.computed and not s.done for s in self.waiting)
        assert all(s.computed <= len(s.pages) * PAGE_TOKENS for s in self.running)
        assert sum(s.computed + 1 < len(s.tokens) for s in self.running) <= 1, "two prompts are computed in part"
        for sequences in (self.running, self.waiting):
            assert all(a.order < b.order for a, b in pairwise(sequences))

    def _expire(self, step: Step, now: float) -> None:
        """Take out what is past its deadline."""
        step.expired = [s for s in (*self.running, *self.waiting) if s.deadline <= now]
        for sequence in step.expired:
            self.finish(sequence)
        self._earliest = min((s.deadline for s in (*self.running, *self.waiting)), default=float("inf"))

    def _decode_rows(self, step: Step) -> None:
        """One row for every sequence that has one token left to compute."""
        for sequence in self.running:  # preemption takes from its end: whoever has its row keeps it
            length = len(sequence.tokens)
            if sequence.computed + 1 != length:
                continue
            if length <= len(sequence.pages) * PAGE_TOKENS or self._reserve(step, sequence, length):
                step.work.append(Work(sequence, length - 1, length, True))
                step.rows += 1

    def _prefill_rows(self, step: Step) -> None:
        """Go on with the prompt that is computed in part, which has had its pages since its admission.

        If it takes more rows than there are, prompts that fit whole into half of them come beside it.
        """
        part = next((s for s in self.running if s.computed + 1 < len(s.tokens)), None)
        if part is None:
            return
        rows = self.row_budget - step.rows
        long = len(part.tokens) - part.computed > rows
        beside = self._overtaking(rows // 2) if long and not step.preempted else []
        self._chunk(step, part, rows - sum(len(sequence.tokens) for sequence in beside))
        for sequence in beside:
            self._begin(step, sequence)

    def _overtaking(self, rows: int) -> list[Sequence]:
        """Waiting prompts that fit whole into so many rows; for those that they overtake, slots and pages are left."""
        slots, pages = self.slots.free, self.pages.free
        chosen = []
        for sequence in self.waiting:
            slots -= 1
            pages -= pages_for(len(sequence.tokens))
            if not rows or slots < 0 or pages < 0:
                break
            if len(sequence.tokens) <= rows:
                chosen.append(sequence)
                rows -= len(sequence.tokens)
        return chosen

    def _admit(self, step: Step) -> None:
        """Give waiting sequences a slot, in order, while there are rows, slots, and pages for all their tokens.

        Hence nobody runs without a row in every step. After a preemption nobody comes in: fewer pages are free than
        were needed.
        """
        while self.waiting and step.rows < self.row_budget and self.slots.free and not step.preempted:
            sequence = self.waiting[0]
            if pages_for(len(sequence.tokens)) > self.pages.free:
                return
            self._begin(step, sequence)

    def _begin(self, step: Step, sequence: Sequence) -> None:
        """Give a waiting sequence a slot, pages for all its tokens, and rows."""
        self.waiting.remove(sequence)
        (sequence.slot,) = self.slots.allocate(1)
        insort(self.running, sequence, key=_ORDER)
        self._grow(step, sequence, len(sequence.tokens))
        self._chunk(step, sequence, self.row_budget - step.rows)

    def _chunk(self, step: Step, sequence: Sequence, rows: int) -> None:
        """As many of its tokens as there are ``rows``."""
        start, length = sequence.computed, len(sequence.tokens)
        stop = min(length, start + rows)
        step.work.append(Work(sequence, start, stop, stop == length))
        step.rows += stop - start

    def _reserve(self, step: Step, sequence: Sequence, length: int) -> bool:
        """Pages for ``length`` tokens, taken from younger sequences if need be; False if it gave way itself."""
        missing = pages_for(length) - len(sequence.pages)
        while missing > self.pages.free:
            youngest = self.running[-1]
            self._preempt(step, youngest)
            if youngest is sequence:
                return False
        self._grow(step, sequence, length)
        return True

    def _grow(self, step: Step, sequence: Sequence, length: int) -> None:
        missing = pages_for(length) - len(sequence.pages)
        if missing > 0:
            for page in self.pages.allocate(missing):
                step.new_pages.append((sequence.slot, len(sequence.pages), page))
                sequence.pages.append(page)

    def _preempt(self, step: Step, sequence: Sequence) -> None:
        """Back to its place in the queue: the head, unless it had overtaken others."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        step.preempted.append(sequence)
        insort(self.waiting, sequence, key=_ORDER)

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        self.slots.release([sequence.slot])
        sequence.pages = []
        sequence.slot = -1
