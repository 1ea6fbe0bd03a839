"""Looks for work in one queue: what to claim, and when to look again."""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final
from zlib import crc32

from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.pacing import PollPace
from thunderagent.model.task import BATCH, Candidate, Lane, Page
from thunderagent.stores.tasks import TaskStore, Wanted

AHEAD_S: Final = (0.5, 1.5)
"""Extra wait for a task of another agent's share that all agents saw in the index before it was due."""

Served = tuple[str, str]
"""A queue and the kind of its tasks."""

PAGES_A_LOOK: Final = 10
"""Pages that one look reads past jobs of other agents; the next look goes on from there."""

CONTENDED: Final = 0.1
"""Share of lost claims in one look from which the agents of a queue learn of each other at once."""

PAGE_ALONE: Final = 20
"""Entries of a page while no other agent serves the queue."""

LONGEST_PAGE: Final = 1000

REMEMBERED: Final = 2000
FORGET_S: Final = 5.0
"""How long a claimed entry is not tried again: the index shows it for a while."""


class SlotPool:
    """Slots of one poller, or of several that share them."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running = 0
        self.waiting: dict[QueuePoller, None] = {}
        """Pollers that wait for a free slot."""
        self._is_closed = False

    @property
    def free(self) -> int:
        """Number of slots that could take a task now."""
        return 0 if self._is_closed else self.slots - self.running

    def close(self) -> None:
        """Have no free slot until `open`."""
        self._is_closed = True

    def open(self) -> None:
        """Have free slots again; pollers that wait for one look at once."""
        self._is_closed = False
        self.wake()

    def wake(self) -> None:
        """Let the pollers that wait for a free slot look at once."""
        for poller in list(self.waiting):
            poller.slot_freed()


class LostClaims:
    """Tasks that one poller never wins, although they stay in the index.

    A lost claim alone means nothing: another agent was quicker, and the task leaves the index. If a task is still there
    minutes later, while this agent has free slots and wins nothing else, no agent can claim it. Written by the agent's
    loop; read by any thread.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, float]] = {}
        self._longest: tuple[Candidate, float, float] | None = None

    def over(self) -> None:
        """Forget: a task was won, or there is none to win."""
        self._longest = None

    def tried(self, candidates: Sequence[Candidate], now: float) -> None:
        """Note that none of these was won at this monotonic second."""
        longest: tuple[Candidate, float, float] | None = None
        for one in candidates:
            created_at, first = self._first.get(one.task_id, (0.0, now))
            if created_at != one.created_at:
                first = now
                self._first[one.task_id] = (one.created_at, now)
            if longest is None or first < longest[1]:
                longest = one, first, now
        while len(self._first) > REMEMBERED:
            del self._first[next(iter(self._first))]
        self._longest = longest

    def longest(self, since: float) -> tuple[Candidate, float] | None:
        """The task that was tried in vain for longest, and for how many seconds; None: there is none.

        Args:
            since: monotonic second; tasks without a try since then do not count.
        """
        longest = self._longest
        return None if longest is None or longest[2] < since else (longest[0], longest[2] - longest[1])


class QueuePoller:
    """Looks for tasks of one kind in one queue, at its own pace.

    `jobs` has the length of the lease for each job whose tasks it looks for; `known` are jobs of other pollers.
    `running` counts the tasks that take its slots. `due` is the monotonic second of the next look: infinity while no
    slot is free.
    """

    reads_on_s = 0.0
    """Longest pause before the next look behind pages of other agents' jobs."""

    def __init__(
        self,
        queue: str,
        pool: SlotPool,
        store: TaskStore,
        *,
        kind: str = BATCH,
        jobs: Mapping[str, float],
        known: Container[str] = (),
        page: int,
        pace: PollPace,
        bus: EventBus,
        rng: random.Random,
    ) -> None:
        self.queue = queue
        self.kind = kind
        self.pool = pool
        self.running = 0
        self.due = 0.0
        self.lanes: Sequence[Lane] = (Lane(queue),)
        self.paused_jobs: Container[str] = ()
        """Jobs whose tasks are passed over, as if this agent did not have them."""
        self._store = store
        self._jobs = jobs
        self._known = known
        self._page = page
        self._pace = pace
        self._bus = bus
        self._rng = rng
        self._monotonic = store.monotonic
        self.share = (0, 1)
        """Rank of this agent among those that serve the queue, and their number; see `_pick`."""
        self.is_contended = False
        """True when claims were lost to other agents since the last look at who they are."""
        self.looked_at = self._monotonic()
        """Monotonic second at which the index was last read, or a pause or a full pool excused it."""
        self.lost_claims = LostClaims()
        self._woken = False
        self._more = False
        self._seen = 0
        self._runnable = False
        self._after: dict[Lane, Any] = {}
        self._unknown: tuple[str, ...] = ()
        self._recent: dict[str, tuple[float, float]] = {}
        self._ahead_due = math.inf
        self._resumed_due = math.inf

    @property
    def slots(self) -> int:
        return self.pool.slots

    @property
    def free(self) -> int:
        return self.pool.free

    def look(self) -> list[Wanted]:
        """Read the index for as many candidates as there are free slots, from a shuffled page of each lane.

        Raises:
            StoreError: the index could not be read.
        """
        if self.free <= 0:
            self._wait_for_slot()
            return []
        self.looked_at = self._monotonic()
        self._more, self._seen, self._runnable, unknown = False, 0, False, set[str]()
        self._woken = False
        self._ahead_due = math.inf
        found: list[Candidate] = []
        lanes = list(self.lanes)
        start = self._rng.randrange(len(lanes))
        for lane in lanes[start:] + lanes[:start]:
            found += self._read(lane, self._wanted() - len(found), unknown)
            if len(found) >= self._wanted():
                break
        self._report_unknown(unknown)
        found = list({one.task_id: one for one in found}.values())  # a task may come back while the pages are read
        found = self._eligible(found)
        picked = self._pick(found)
        self._more = self._more or len(found) > len(picked)
        return [Wanted(one, self._jobs[one.job]) for one in picked]

    def took(self, won: Sequence[str], lost: Sequence[Candidate], wanted: Sequence[Wanted]) -> None:
        """Take the result of the last look's claims, and decide when to look again."""
        now = self._monotonic()
        decided = {*won, *(one.task_id for one in lost)}
        tried = [one.candidate for one in wanted if one.candidate.task_id in decided]
        self._recent.update((one.task_id, (one.created_at, now)) for one in tried)
        self.is_contended = self.is_contended or len(tried) - len(won) > len(tried) * CONTENDED
        if won or not self._runnable:
            self.lost_claims.over()
        elif wanted:
            self.lost_claims.tried([one.candidate for one in wanted], now)
        while len(self._recent) > REMEMBERED:
            del self._recent[next(iter(self._recent))]
        self._bus.emit(events.Polled(queue=self.queue, seen=self._seen, tried=len(wanted), won=len(won)))
        if self.free <= 0:
            self._wait_for_slot()
            return
        delay = self._pace.after(len(wanted), more=self._more, rng=self._rng)
        if self._after:
            delay = min(delay, self.reads_on_s)
        self.due = now if self._woken else min(now + delay, self._ahead_due, self._resumed_due)

    def read_past(self, jobs: Container[str], *, woken_due: float, longest_s: float) -> None:
        """Pass over the tasks of these paused jobs in the next look; for the times see `pass_by`."""
        self.paused_jobs = jobs
        due = self._monotonic() + longest_s
        self._resumed_due = min(due, woken_due) if self._woken else due

    def pass_by(self, *, woken_due: float, longest_s: float) -> None:
        """Do not look, as the queue is paused: come again at the usual pace.

        Args:
            woken_due: the latest next look if this poller was woken: the queue may have been resumed.
            longest_s: the longest pause in any case.
        """
        due = self._monotonic() + min(self._pace.after(0, more=False, rng=self._rng), longest_s)
        self.due = min(due, woken_due) if self._woken else due
        self._woken = False
        self.looked_at = self._monotonic()
        self.lost_claims.over()

    def began(self) -> None:
        """Take a slot for a task."""
        self.lost_claims.over()
        self.reserve()

    def reserve(self) -> None:
        """Take a slot, for a task or for a claim in doubt."""
        self.running += 1
        self.pool.running += 1
        if self.free <= 0:
            self._wait_for_slot()

    def freed(self) -> None:
        """Release a slot; pollers that wait for one look at once."""
        self.running -= 1
        self.pool.running -= 1
        self.pool.wake()

    def slot_freed(self) -> None:
        """Look at once, as a slot is free again."""
        self.looked_at = self._monotonic()
        self.wake()

    def wake(self) -> None:
        """Look at once."""
        self.pool.waiting.pop(self, None)
        self._woken, self.due = True, self._monotonic()

    def postpone(self, seconds: float) -> None:
        """Do not look for so many seconds."""
        self.looked_at = self._monotonic()
        self.due = self._monotonic() + seconds

    def look_within(self, seconds: float) -> None:
        """Look within so many seconds."""
        self.due = min(self.due, self._monotonic() + seconds)

    def stretch(self, seconds: float) -> None:
        """Pause for up to so many seconds while the queue is empty, and look so far ahead; 0: the usual pace."""
        if seconds != self._pace.stretched_s:
            self._pace.stretched_s = seconds
            if not seconds:  # spread: the doorbell of a whole fleet fails at once
                self.look_within(self._pace.max_s * self._rng.random())

    def _wait_for_slot(self) -> None:
        self.due = math.inf
        self.pool.waiting[self] = None

    def _wanted(self) -> int:
        """Number of candidates that one look is to find."""
        return self.free

    def _eligible(self, found: list[Candidate]) -> list[Candidate]:
        """The candidates that this agent may try now."""
        return found

    def _read(self, lane: Lane, room: int, unknown: set[str]) -> list[Candidate]:
        found: list[Candidate] = []
        after = self._after.pop(lane, None)
        limit = self._entries()
        ahead_s, until = self._pace.stretched_s * 1.25, self._store.clock.latest()
        for _ in range(PAGES_A_LOOK):
            page = self._store.ready(lane, limit=limit, after=after, ahead_s=ahead_s)
            after = page.after
            if ahead_s and page.entries and page.entries[-1].created_at > until:
                page, after = self._due_of(page, until), None
            self._seen += len(page.entries)
            jobs, recent, edge = self._jobs, self._recent, self._monotonic() - FORGET_S
            for entry in page.entries:
                if entry.job not in jobs or entry.job in self.paused_jobs:
                    if entry.job not in self._known:
                        unknown.add(entry.job)
                elif not self._store.may_try(entry):
                    continue
                elif (known := recent.get(entry.task_id)) is None or known[0] != entry.created_at or known[1] <= edge:
                    found.append(entry if entry.kind == self.kind else entry._replace(kind=self.kind))
                else:
                    self._runnable = True
            if after is None or len(found) >= room:
                break
        self._more = self._more or after is not None
        self._runnable = self._runnable or bool(found)
        if after is not None and not found:
            self._after[lane] = after
        return found

    def _due_of(self, page: Page, until: float) -> Page:
        """The entries that are due. The next look comes in time for the first that is not; agents whose share it is not
        come later."""
        due = [entry for entry in page.entries if entry.created_at <= until]
        rank, agents = self.share
        for entry in page.entries[len(due) :]:
            if entry.job in self._jobs and entry.job not in self.paused_jobs:
                delay = entry.created_at - until
                if crc32(entry.task_id.encode()) % agents != rank:
                    delay += self._rng.uniform(*AHEAD_S)
                self._ahead_due = min(self._ahead_due, self._monotonic() + delay)
        return Page(tuple(due))

    def _entries(self) -> int:
        """Length of a page: this agent's share of it fills the free slots."""
        agents = self.share[1]
        if agents == 1:
            return max(2 * self.free, min(self._page, PAGE_ALONE))
        return max(self._page, min(4 * self.free * agents, LONGEST_PAGE))

    def _pick(self, found: list[Candidate]) -> list[Candidate]:
        """Candidates for the free slots, at random, those of this agent's share of the ids first.

        Agents that see the same page would claim the same tasks: four that take 10 of 50 lose a third of their claims,
        each one billed. While there is more than a page, an agent keeps to its share. The others take the tasks of a
        busy agent as soon as their own shares run out.
        """
        rank, agents = self.share
        if agents > 1:
            ours = [one for one in found if crc32(one.task_id.encode()) % agents == rank]
            if ours and (self._more or len(ours) >= self.free):
                found = ours
            elif ours:
                rest = [one for one in found if crc32(one.task_id.encode()) % agents != rank]
                return ours + self._rng.sample(rest, min(self.free - len(ours), len(rest)))
        return self._rng.sample(found, min(self.free, len(found)))

    def _report_unknown(self, unknown: set[str]) -> None:
        names = tuple(sorted(map(str, unknown)))
        if names and names != self._unknown:
            self._bus.emit(events.UnknownJobsSeen(queue=self.queue, jobs=names))
        self._unknown = names
