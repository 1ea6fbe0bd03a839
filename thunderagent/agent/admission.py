"""What stands between a claim and its handler: permits of limits, unique keys, payloads that cannot be read.

Permits and keys of tasks that have ended are released together, after each exchange with the store. What the store did
not take then is found by the agent that next needs the permit or the key.
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
from thunderagent.stores.tasks import TaskStore, Wanted, ignore_rejection

UNDECIDED_S: Final = 2.0
"""Delay of a task when the store did not say whether a permit of its limit is free."""

SLOT_REFUSED_S: Final = 15.0
"""Delay of a task when the store never takes the row of its limit with one more permit."""


def unread_delay(times: int, rng: random.Random) -> float:
    """Delay of a task whose payload could not be read `times` times: 2 s doubling to 300 s, jittered."""
    return jittered(min(300.0, 2.0 ** min(times, 10)), rng)


ARRIVES_TIMES: Final = 8
"""Attempts to read a payload that may be on its way from another region: about eight minutes."""

REMEMBERED: Final = 2000
"""Most tasks that are remembered as sent to a waitlist, or as having another limit than their job."""

UNREAD_KEPT: Final = 10_000
"""Most tasks whose failed reads of a payload are counted; the oldest are forgotten."""


class Admission:
    """Admits the tasks of one agent to their handlers. Called in the agent's loop."""

    def __init__(
        self, store: TaskStore, jobs: Registry, settings: Settings, bus: EventBus, *, rng: random.Random
    ) -> None:
        self._store = store
        self._rng = rng
        self._unread: dict[str, int] = {}
        """Failed reads of the payload, by task."""
        self._jobs = jobs
        self._settings = settings
        self._bus = bus
        self._permits = Permits(store, guard_s=settings.clock_guard_s, examine_s=settings.sweep_s)
        self._keys = UniqueKeys(store)
        self._limits = {name: limit for name, job in jobs.by_value.items() if (limit := job_limit(job)) is not None}
        self._passed: dict[tuple[str, float], float] = {}
        """Index entries of tasks that went to a waitlist, with the time: the index shows them for a while."""
        self._others: dict[str, None] = {}
        """Tasks that have another limit than their job."""
        self.freed = FreedPermits(store, on_left=self._on_left)
        self._sweep = WaitlistSweep(store, self._permits, on_left=self._on_left)
        self._over: list[Lease] = []
        self._keys_left: list[Task] = []
        self._waitlisted: list[tuple[Limit, Task]] = []

    @property
    def due(self) -> float:
        """Monotonic second of the next look for tasks that wait for a permit released here; infinity: none."""
        return self.freed.due

    def refusals(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        """Outcomes of the tasks that cannot run, as a payload could not be read or no permit is free; the others have a
        permit now."""
        unreadable = self._unreadable(leases)
        return unreadable | self._over_limit([lease for lease in leases if lease.task_id not in unreadable])

    def _unreadable(self, leases: Sequence[Lease]) -> dict[str, Outcome]:
        """A payload that may be read later only delays its task; any other is an error of the task.

        Tables and buckets are replicated item by item, so a row may reach a region before its payload.
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
        except StoreError as error:  # unknown whether they have permits
            self._bus.emit(events.StoreFailed(during="limits", error=str(error), next_try_s=UNDECIDED_S))
            return {lease.task_id: Undecided(UNDECIDED_S) for lease, _ in limited}
        for task_id, why in never.items():
            self._bus.emit(queue_events.WriteRejected(task_id=task_id, verb="take permit", error=str(why)))
        outcomes: dict[str, Outcome] = {task_id: Refused(limit) for limit, ids in refused.items() for task_id in ids}
        return outcomes | dict.fromkeys(never, Undecided(SLOT_REFUSED_S))

    def started(self, task: Task) -> None:
        """Note that the handler of a task is about to run, or that the task ends without."""
        if task.unique_scope == UniqueScope.UNTIL_START and not task.retry_count:  # else it was started before
            self._keys_left.append(task)

    def over(self, lease: Lease) -> None:
        """Note that the handler has ended, whatever the outcome."""
        self._over.append(lease)

    def ended(self, task: Task) -> None:
        """Note that a task is SUCCESS, FAILED or DONE."""
        if task.unique_scope == UniqueScope.UNTIL_DONE:
            self._keys_left.append(task)

    def waitlisted(self, limit: Limit, task: Task, created_at: float) -> None:
        """Note that a task went to the waitlist of this limit: a permit may have been released meanwhile."""
        self._waitlisted.append((limit, replace(task, created_at=created_at)))

    def limit_of(self, task: Task) -> Limit | None:
        """The limit of a task, whether or not this agent has its job."""
        is_ours = task.job in self._jobs
        return limit_of(task, self._jobs[task.job] if is_ours else None)

    def release(self) -> None:
        """Release the permits and keys of what has ended, and note which limits have free permits."""
        over, self._over = self._over, []
        rows: dict[Limit, Row] = {}
        for limit, row in self._permits.release(over):  # of several for one limit the last counts
            if limit not in rows or len(holders_of(row)) < len(holders_of(rows[limit])):
                rows[limit] = row
        for limit, row in rows.items():
            self.freed.note(limit, row)
        self._permits.let_expire()
        tasks, self._keys_left = self._keys_left, []
        self._keys.release(tasks)
        waitlisted, self._waitlisted = self._waitlisted, []
        with suppress(StoreError):  # the sweep looks after them
            known = rows_of(self._store, {limit.key: None for limit, _ in waitlisted})
            for limit, task in waitlisted:
                with suppress(StoreRejected):
                    self.freed.joined(limit, task, known.get(limit.key))

    def claimable(self, found: Sequence[Wanted]) -> tuple[list[Wanted], bool]:
        """The candidates of one look to claim, and whether others wait for the next look.

        A task without a free permit goes to the waitlist by one write; a claim, a refusal and a step back would take
        three. Only a limit of a job counts, if this agent holds all its permits or has just seen them taken.

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
                left = True  # whether a permit is free for it shows soon
        if waiting:
            self._to_waitlist(waiting)
        return kept, left or bool(waiting)

    def _to_waitlist(self, waiting: Sequence[tuple[Limit, Candidate]]) -> None:
        closed = set[Limit]()
        for limit in dict.fromkeys(limit for limit, _ in waiting):
            try:
                keep_waitlist_open(self._store, limit, self._permits.seen(limit.key))
            except StoreRejected as error:  # its tasks stay in their queue, for a while
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
        for (limit, one), (won, row) in zip(
            waiting, self._store.write_rows(batch, rejected=ignore_rejection), strict=True
        ):
            if won and row is not None:
                task = read_task(row)
                if isinstance(task, Task):
                    self._waitlisted.append((limit, task))
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
        """Send tasks that wait for permits released here to their queue, as this agent stops."""
        with suppress(StoreError):  # the sweep looks after them
            self.look(lambda one: None)
        self._permits.let_expire(is_leaving=True)

    def postpone(self, seconds: float) -> None:
        """Do not look for so many seconds, as the store does not answer."""
        self.freed.postpone(seconds)

    def sweep(self, owner: str) -> int:
        """Sweep all waitlists, once in `sweep_s` in the whole fleet.

        Returns:
            number of tasks that left a waitlist for their queue.

        Raises:
            StoreError: the store did not answer.
        """
        numbers, turn_s = numbers_of(self._jobs.values()), self._settings.sweep_s * 0.9
        return self._sweep.run(self.freed.lanes, numbers, owner=owner, turn_s=turn_s)

    def _on_left(self, task: Task) -> None:
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
