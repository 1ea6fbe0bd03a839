"""What stands between a claim and the handler, and what follows its end: the slots of limits, and unique keys.

An agent asks here before it runs a handler, and tells here what has ended. The slots and keys of that are given back
together, after each exchange with the store. Whatever is not done for lack of a store is found by those who need the
slot or the key.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.jobs.outcome import Outcome, Raised, Refused, Undecided
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import StoreError, StoreRejected, StoreUnavailable, TextGone
from thunderagent.model.pacing import jittered
from thunderagent.model.task import Candidate, Lease, Row, Task, UniqueScope, read_task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import limit_id
from thunderagent.queue.limits.freed import TRIED_S, FreedPermits
from thunderagent.queue.limits.permits import Permits, holders_of, job_limit, limit_of, numbers_of, rows_of
from thunderagent.queue.limits.waitlist import WaitlistSweep, keep_waitlist_open
from thunderagent.queue.unique import UniqueKeys
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore, Wanted, passed_over

UNDECIDED_S: Final = 2.0
"""A task goes back to its queue for so long when the store could not say whether a slot of its limit is free."""

SLOT_REFUSED_S: Final = 15.0
"""A task goes back to its queue for so long when the store never takes the row of its limit with one more slot."""


def unread_delay(times: int, rng: random.Random) -> float:
    """Wait of a task whose payload could not be read for the `times`-th time: 2 s doubling to 300 s, jittered."""
    return jittered(min(300.0, 2.0 ** min(times, 10)), rng)


ARRIVES_TIMES: Final = 8
"""Attempts to read a payload that is missing in this region, some eight minutes: it may be on its way from another."""

REMEMBERED: Final = 2000
"""Tasks of which is remembered that they went to a waitlist, or have another limit than their job."""

UNREAD_KEPT: Final = 10_000
"""Tasks whose payloads could not be read of which an agent knows how often; the oldest are forgotten."""


class Admission:
    """The slots and keys of what one agent runs. Called in the agent's loop."""

    def __init__(
        self, store: TaskStore, jobs: Registry, settings: Settings, bus: EventBus, *, rng: random.Random
    ) -> None:
        self._store = store
        self._rng = rng
        self._unread: dict[str, int] = {}
        """How often the payload of a task could not be read here."""
        self._jobs = jobs
        self._settings = settings
        self._bus = bus
        self._permits = Permits(store, guard_s=settings.clock_guard_s, examine_s=settings.sweep_s)
        self._keys = UniqueKeys(store)
        self._limits = {name: limit for name, job in jobs.by_value.items() if (limit := job_limit(job)) is not None}
        self._passed: dict[tuple[str, float], float] = {}
        """Index entries of tasks that were put into a waitlist: the index shows them for a while."""
        self._others: dict[str, None] = {}
        """Tasks that have another limit than their job."""
        self.freed = FreedPermits(store, on_left=self._let_out)
        self._sweep = WaitlistSweep(store, self._permits, on_left=self._let_out)
        self._over: list[Lease] = []
        self._let_go: list[Task] = []
        self._stood_back: list[tuple[Limit, Task]] = []

    @property
    def due(self) -> float:
        """Monotonic second of the next look for tasks that wait for a slot which is free here; infinity: none."""
        return self.freed.due

    def refusals(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        """What becomes of the tasks that cannot be run: their payloads could not be read, or no slot of their limit is
        free. The others have one now."""
        unreadable = self._unreadable(leases)
        return unreadable | self._over_limit([lease for lease in leases if lease.task_id not in unreadable])

    def _unreadable(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        """A payload that may be read later costs its task nothing but time; any other is an error of that task.

        Tables and buckets are replicated item by item, so a row may come to a region before its payload.
        """
        outcomes: dict[str, Outcome] = {}
        for lease in leases:
            task_id, error = lease.task_id, lease.task.payload_error
            times = self._unread.pop(task_id, 0) + 1
            is_on_its_way = isinstance(error, TextGone) and self._settings.region_arbiter is not None
            if isinstance(error, StoreUnavailable) or (is_on_its_way and times <= ARRIVES_TIMES):
                self._unread[task_id] = times
                delay = unread_delay(times, self._rng)
                outcomes[task_id] = Undecided(delay)
                what = f"the payload of {task_id}: {error}"
                self._bus.emit(events.StoreFailed(during="reading a payload", error=what, next_try_s=delay))
            elif error is not None:
                outcomes[task_id] = Raised(f"the payload could not be read: {error}")
        while len(self._unread) > UNREAD_KEPT:
            del self._unread[next(iter(self._unread))]
        return outcomes

    def _over_limit(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        limited = [(lease, limit) for lease in leases if (limit := self.limit_of(lease.task)) is not None]
        if not limited:
            return {}
        refused, never = dict[Limit, list[str]](), dict[str, StoreRejected]()
        rows: dict[Limit, Row] = {}
        try:
            for (lease, limit), answer in zip(limited, self._permits.acquire(limited), strict=True):
                if isinstance(answer, StoreRejected):
                    never[lease.task_id] = answer
                elif answer is not None:
                    rows[limit] = answer
                    refused.setdefault(limit, []).append(lease.task_id)
            for limit, row in rows.items():
                try:
                    keep_waitlist_open(self._store, limit, row)
                except StoreRejected as error:
                    never |= dict.fromkeys(refused.pop(limit), error)
        except StoreError as error:  # nobody knows who has a slot: back to the queue, for a while
            self._bus.emit(events.StoreFailed(during="limits", error=str(error), next_try_s=UNDECIDED_S))
            return {lease.task_id: Undecided(UNDECIDED_S) for lease, _ in limited}
        for task_id, why in never.items():
            self._bus.emit(queue_events.WriteRejected(task_id=task_id, verb="take permit", error=str(why)))
        outcomes: dict[str, Outcome] = {task_id: Refused(limit) for limit, ids in refused.items() for task_id in ids}
        return outcomes | dict.fromkeys(never, Undecided(SLOT_REFUSED_S))

    def started(self, task: Task) -> None:
        """Its handler is about to run, or it ends without."""
        if task.unique_scope == UniqueScope.UNTIL_START and not task.retry_count:  # else it was started before
            self._let_go.append(task)

    def over(self, lease: Lease) -> None:
        """Its handler has ended, whatever became of the task."""
        self._over.append(lease)

    def ended(self, task: Task) -> None:
        """It is SUCCESS, FAILED or DONE."""
        if task.unique_scope == UniqueScope.UNTIL_DONE:
            self._let_go.append(task)

    def stood_back(self, limit: Limit, task: Task, created_at: float) -> None:
        """A task of ours came to stand in the line of this limit: a slot may have become free meanwhile."""
        self._stood_back.append((limit, replace(task, created_at=created_at)))

    def limit_of(self, task: Task) -> Limit | None:
        """The limit of a task, whether or not this agent has its job."""
        is_ours = task.job in self._jobs
        return limit_of(task, self._jobs[task.job] if is_ours else None)

    def release(self) -> None:
        """Give back the slots and keys of what has ended, and note for whom slots are free."""
        over, self._over = self._over, []
        rows: dict[Limit, Row] = {}
        for limit, row in self._permits.release(over):  # several of one limit are freed side by side: the last counts
            if limit not in rows or len(holders_of(row)) < len(holders_of(rows[limit])):
                rows[limit] = row
        for limit, row in rows.items():
            self.freed.note(limit, row)
        self._permits.let_expire()
        tasks, self._let_go = self._let_go, []
        self._keys.release(tasks)
        stood_back, self._stood_back = self._stood_back, []
        with suppress(StoreError):  # the sweep looks after them
            known = rows_of(self._store, {limit.key: None for limit, _ in stood_back})
            for limit, task in stood_back:
                with suppress(StoreRejected):
                    self.freed.joined(limit, task, known.get(limit.key))

    def claimable(self, found: Sequence[Wanted]) -> tuple[list[Wanted], bool]:
        """The candidates of one look to claim, and whether others wait for the next look.

        A task for which no slot of its limit is free goes to the waitlist by one write, where a claim, a refusal and
        a step back would take three. This needs certainty: only the limit of a job, of which this agent has all slots
        or has just seen them taken.

        Raises:
            StoreError: the store did not answer.
        """
        if not self._limits:
            return list(found), False
        edge = self._store.monotonic() - TRIED_S
        kept, waiting = list[Wanted](), list[tuple[Limit, Candidate]]()
        promised, left = Counter[str](), False
        for one in found:
            task_id, limit = one.candidate.task_id, self._limits.get(one.candidate.job)
            if limit is None or task_id in self._others:
                kept.append(one)
            elif self._passed.get((task_id, one.candidate.created_at), edge) > edge:
                continue  # the index shows it for a while
            elif self._permits.is_full(limit):
                waiting.append((limit, one.candidate))
            elif promised[limit.key] < limit.number:
                promised[limit.key] += 1
                kept.append(one)
            else:
                left = True  # whether there is a slot for it shows in a moment
        if waiting:
            self._to_waitlist(waiting)
        return kept, left or bool(waiting)

    def _to_waitlist(self, waiting: Sequence[tuple[Limit, Candidate]]) -> None:
        """Put tasks into the waitlists of their limits."""
        closed = set[Limit]()
        for limit in dict.fromkeys(limit for limit, _ in waiting):
            try:
                keep_waitlist_open(self._store, limit, self._permits.seen(limit.key))
            except StoreRejected as error:  # its tasks stay where they are, for a while
                closed.add(limit)
                self._bus.emit(
                    queue_events.WriteRejected(task_id=limit_id(limit.key), verb="open waitlist", error=str(error))
                )
        for limit, one in waiting:
            if limit in closed:
                self._pass_over(one)
        waiting = [(limit, one) for limit, one in waiting if limit not in closed]
        now = self._store.clock.now()
        batch = [writes.join_waitlist(one, limit_key=limit.key, now=now) for limit, one in waiting]
        for (limit, one), (won, row) in zip(waiting, self._store.write_rows(batch, rejected=passed_over), strict=True):
            if won and row is not None:
                task = read_task(row)
                if isinstance(task, Task):
                    self._stood_back.append((limit, task))
                    self._bus.emit(_limited(task, limit))
            if row is not None and row.get("limitKey", limit.key) != limit.key:
                self._others[one.task_id] = None
            else:
                self._pass_over(one)
        while len(self._passed) > REMEMBERED:
            del self._passed[next(iter(self._passed))]
        while len(self._others) > REMEMBERED:
            del self._others[next(iter(self._others))]

    def _pass_over(self, one: Candidate) -> None:
        """Skip the index entry for a while."""
        self._passed.pop((one.task_id, one.created_at), None)
        self._passed[one.task_id, one.created_at] = self._store.monotonic()

    def look(
        self, room: Callable[[Candidate], float | None], has_nobody: Callable[[Candidate], bool] = lambda one: False
    ) -> list[Wanted]:
        """Candidates for permits that were released here; see `FreedPermits.look`."""
        return self.freed.look(room, has_nobody) if self.due < inf else []

    def leave(self) -> None:
        """This agent stops: whoever waits for a slot that became free here goes to the queue, for another agent."""
        with suppress(StoreError):  # the sweep looks after them
            self.look(lambda one: None)
        self._permits.let_expire(is_leaving=True)

    def postpone(self, seconds: float) -> None:
        """The store does not answer: do not look before this time is over."""
        self.freed.postpone(seconds)

    def sweep(self, owner: str) -> int:
        """Look after all lines; one agent of the fleet does so in each `sweep_s`. How many tasks were let out.

        Raises:
            StoreError: the store did not answer.
        """
        numbers, turn_s = numbers_of(self._jobs.values()), self._settings.sweep_s * 0.9
        return self._sweep.run(self.freed.lanes, numbers, owner=owner, turn_s=turn_s)

    def _let_out(self, task: Task) -> None:
        self._bus.emit(events.TaskLetOut(task_id=task.task_id, queue=task.queue))


def _limited(task: Task, limit: Limit) -> events.TaskLimited:
    return events.TaskLimited(
        task_id=task.task_id,
        job=task.job,
        queue=task.queue,
        fence=task.fence,
        attempt=task.attempt,
        limit_key=limit.key,
        limit=limit.number,
    )
