"""Permits of limits: at most so many tasks with one `limit_key` run at once in the whole fleet.

The row of a limit has the leases that hold its permits, `holders`. An agent acquires the permit after the claim and
before the handler, and releases it when the handler has ended. A permit belongs to a lease and dies with it. A later
lease of the same task takes the place of the earlier. An agent that finds all permits taken looks once whether the
leases that hold them still live.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.jobs.job import Job, Limit, limit_problems
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError, StoreRejected
from thunderagent.model.rows import Unreadable, is_number
from thunderagent.model.task import Handoff, Lease, Row, Status, Task
from thunderagent.model.writes import limits as limit_writes
from thunderagent.model.writes.limits import WAITLIST_STATUS, holder, limit_id, limit_row
from thunderagent.stores.tasks import TaskStore, ignore_rejection

SEEN_S: Final = 1.0
"""Seconds in which a row that was read counts: an agent that it misleads reads again at once."""


TRIES: Final = 5
"""Attempts to replace holders that change meanwhile."""

NOTED: Final = 200
"""Rows of limits that are remembered for a moment, about."""

OWED: Final = 1000
"""Permits to release later, as the store does not answer; the agent that needs one finds the rest."""

IDLE_S: Final = 300.0
"""Seconds without use after which the row of a shared limit is set to expire: at most one write in that time."""


def limit_of(task: Task, job: Job[Any] | None) -> Limit | None:
    """The limit of a task: its own, else its job's. Without a number of its own it has that of its job today."""
    of_job = job_limit(job) if job else None
    key = task.limit_key if isinstance(task.limit_key, str) and task.limit_key else None  # of a row made by hand
    if key is None:
        return of_job
    number = number_of(task.limit_max) or (of_job.number if of_job else None)
    return Limit(key, number) if number else None


def job_limit(job: Job[Any]) -> Limit | None:
    return Limit(job.limit_key or job.name, job.limit) if job.limit is not None else None


def numbers_of(jobs: Iterable[Job[Any]]) -> dict[str, int]:
    """The numbers that jobs set, by the keys of their limits."""
    return dict(limit for job in jobs if (limit := job_limit(job)) is not None)


def conflicts(jobs: Iterable[Job[Any]]) -> list[str]:
    """The problems of jobs that share a key with different numbers."""
    known: dict[str, Job[Any]] = {}
    problems = []
    for job in jobs:
        if (limit := job_limit(job)) is None:
            continue
        other = known.setdefault(limit.key, job)
        if other.limit != limit.number:
            problems.append(
                f"{other.name!r} and {job.name!r} share the limit {limit.key!r} with {other.limit} and {limit.number} "
                "at once: give both the same number"
            )
    return problems


def number_of(value: object) -> int | None:
    """A number of tasks at once; None for what else a row made by hand may have."""
    number = int(value) if is_number(value) and value >= 1 else None
    return number if number is None or not limit_problems(number, None) else None


def holders_of(row: Row | None) -> frozenset[str]:
    """The leases that hold the permits of a limit."""
    members = (row or {}).get("holders")
    return frozenset(map(str, members)) if isinstance(members, (set, frozenset)) else frozenset()


def is_broken(row: Row | None) -> bool:
    """True for a row made by hand in which no permit can be acquired."""
    return row is not None and "holders" in row and not isinstance(row["holders"], (set, frozenset))


@dataclass(frozen=True, slots=True)
class Permit:
    """A permit that a lease of ours holds."""

    limit: Limit
    member: str
    is_alone: bool
    """True when no other permit of the limit is taken and no waitlist is open, as far as is known."""


class Permits:
    """The permits that one agent holds for its leases. Called in the agent's loop.

    Args:
        guard_s: added to a lease before it counts as over.
        examine_s: shortest time between two looks at the holders of one limit.
    """

    def __init__(self, store: TaskStore, *, guard_s: float, examine_s: float) -> None:
        self._store = store
        self._guard_s = guard_s
        self._examine_s = examine_s
        self._examined: dict[str, float] = {}
        self._taken: dict[tuple[str, int], Permit] = {}
        self._owed: list[Permit] = []
        self._idle: dict[str, float] = {}
        self._seen: dict[str, tuple[float, Row]] = {}

    def is_full(self, limit: Limit) -> bool:
        """True when no permit is free as far as is known: all are ours, or all were taken a moment ago."""
        ours = sum(one.limit.key == limit.key for one in self._taken.values())
        return max(ours, len(holders_of(self.seen(limit.key)))) >= limit.number

    def seen(self, key: str) -> Row | None:
        """The row of a limit as it was read a moment ago, if it was."""
        at, row = self._seen.get(key, (-math.inf, None))
        return row if at > self._store.monotonic() - SEEN_S else None

    def acquire(self, wanted: Sequence[tuple[Lease, Limit]]) -> list[Row | StoreRejected | None]:
        """Acquire a permit for each lease.

        Returns:
            None for a lease that has one; else the row of its limit, which has none left, or the error for which the
            store refuses that row with one more holder.

        Raises:
            StoreError: the store did not answer. Permits acquired all the same are released with the leases.
        """
        now = self._store.clock.now()
        batch = []
        for lease, limit in wanted:
            member = holder(lease.task_id, lease.fence)
            self._taken[lease.task_id, lease.fence] = Permit(limit, member, False)  # before: the reply may be lost
            self._idle.pop(limit.key, None)
            batch.append(limit_writes.take_permit(limit.key, member, number=limit.number, now=now))
        refused: list[Row | StoreRejected | None] = []
        never = list[tuple[Write, StoreRejected]]()
        answers = self._store.write_rows(batch, rejected=lambda write, error: never.append((write, error)))
        for (lease, limit), write, (won, row) in zip(wanted, batch, answers, strict=True):
            member = holder(lease.task_id, lease.fence)
            left: Row | StoreRejected | None = next((error for one, error in never if one is write), None)
            if left is None and not won:
                try:
                    left = self._insist(lease, limit, member, row)
                except StoreRejected as error:
                    left = error
            if left is not None:
                del self._taken[lease.task_id, lease.fence]
            else:
                is_only = limit.number == 1 or row is None or (won and holders_of(row) == {member})
                is_alone = is_only and (row or {}).get("status") != WAITLIST_STATUS
                self._taken[lease.task_id, lease.fence] = Permit(limit, member, is_alone)
                if won:
                    self._end_former(lease, limit, row)
            known = (row if won else None) if left is None or isinstance(left, StoreRejected) else left
            if known is not None and len(holders_of(known)) >= len(holders_of(self.seen(limit.key))):
                self._note(limit.key, known)  # of several side by side the last counts
            refused.append(left)
        return refused

    def release(self, leases: Iterable[Lease]) -> list[tuple[Limit, Row]]:
        """Release the permits of leases whose handlers have ended; the answer is the rows of their limits after that.

        What the store did not take is released with the next call. What is lost with this agent is a permit of a lease
        that is over, which the next agent that needs one finds.
        """
        self._owed += [one for lease in leases if (one := self._taken.pop((lease.task_id, lease.fence), None))]
        if not self._owed:
            return []
        try:
            freed = _release(self._store, self._owed)
        except StoreError:
            del self._owed[:-OWED]
            return []
        self._owed = []
        for limit, row in freed:
            self._note(limit.key, row)
            if _is_idle(row):
                self._idle[limit.key] = self._store.monotonic() + IDLE_S
        while len(self._idle) > OWED:
            del self._idle[next(iter(self._idle))]
        return freed

    def let_expire(self, *, is_leaving: bool = False) -> None:
        """Let the rows of shared limits expire that are unused for a while; all of them at the end."""
        begun, now = self._store.monotonic(), self._store.clock.now()
        due = {key: at for key, at in self._idle.items() if is_leaving or at <= begun}
        if not due:
            return
        self._idle = {key: at for key, at in self._idle.items() if key not in due}
        try:
            self._store.write_rows(
                [limit_writes.let_limit_expire(key, now=now) for key in due], rejected=ignore_rejection
            )
        except StoreError:
            self._idle |= {} if is_leaving else dict.fromkeys(due, begun + IDLE_S)

    def living(self, rows: Iterable[Row]) -> frozenset[str]:
        """The holders of some limits whose lease is not over."""
        holders = frozenset[str]().union(*map(holders_of, rows))
        names = sorted({member.rpartition("#")[0] for member in holders} - {""})  # of a row made by hand
        tasks = self._store.read(names) if names else {}
        return frozenset(member for member in holders if self._lives(member, tasks))

    def mend(self, rows: Iterable[Row]) -> None:
        """Repair rows made by hand with something else in the place of their holders.

        Raises:
            StoreError: the store did not answer.
        """
        now = self._store.clock.now()
        if batch := [limit_writes.mend_limit(row["taskId"], now=now) for row in rows if is_broken(row)]:
            self._store.write_rows(batch, rejected=ignore_rejection)

    def _insist(self, lease: Lease, limit: Limit, member: str, row: Row | None) -> Row | None:
        """Acquire the permit of an earlier lease of the same task or of one that is over; else the row that refuses."""
        for _ in range(TRIES):
            now = self._store.clock.now()
            if row is None:
                fresh = limit_row(limit.key, number=limit.number, now=now, holders=[member])
                ours, row = self._store.insert_row(fresh)
                if ours:
                    return None
            if is_broken(row):
                self.mend([row])
            seen = holders_of(row)
            if member in seen:
                return None
            left = frozenset(one for one in seen if one.rpartition("#")[0] != lease.task_id)
            if len(left) >= limit.number and self._may_examine(limit.key):
                left &= self.living([row])
            if len(left) >= limit.number:
                return row
            if seen:
                write = limit_writes.replace_holders(limit.key, seen, left | {member}, now=now)
            else:
                write = limit_writes.take_permit(limit.key, member, number=limit.number, now=now)
            [(won, row)] = self._store.write_rows([write])
            if won:
                return None
        return row or limit_row(limit.key, number=limit.number, now=self._store.clock.now())

    def _end_former(self, lease: Lease, limit: Limit, row: Row | None) -> None:
        """A task that was taken over keeps one permit; one that is handed over has two until its former agent stops."""
        if lease.task.handoff_state in (Handoff.OFFERED, Handoff.READY):
            return
        former = [one for one in holders_of(row) if one.rpartition("#")[0] == lease.task_id and one != _member(lease)]
        if former:
            with suppress(StoreError):  # they are over: the next agent that needs a permit finds them
                self._store.write_rows([limit_writes.release_permit(limit.key, one) for one in former])

    def _note(self, key: str, row: Row) -> None:
        now = self._store.monotonic()
        if len(self._seen) > NOTED:
            self._seen = {name: one for name, one in self._seen.items() if one[0] > now - SEEN_S}
        self._seen[key] = now, row

    def _may_examine(self, key: str) -> bool:
        now = self._store.monotonic()
        if now - self._examined.get(key, -self._examine_s) < self._examine_s:
            return False
        self._examined = {name: at for name, at in self._examined.items() if now - at < self._examine_s}
        self._examined[key] = now
        return True

    def _lives(self, member: str, tasks: Mapping[str, Task | Unreadable]) -> bool:
        task_id, _, fence = member.rpartition("#")
        task = tasks.get(task_id)
        if not isinstance(task, Task):
            return task is not None  # of a row that cannot be read it is not known that it is over
        clock = self._store.clock.leases
        if (
            task.handoff_state in (Handoff.OFFERED, Handoff.READY)
            and not task.status.is_terminal
            and (task.handoff_until or 0.0) + self._guard_s > clock.earliest()
        ):
            return True  # the agent that offered it may still handle it, though another has claimed it
        if str(task.fence) != fence or task.status is not Status.RUNNING:
            return False
        is_over = clock.is_usable and (task.lock_time or 0.0) + self._guard_s < clock.earliest()
        return not is_over


def release_permits(store: TaskStore, taken: Sequence[Permit]) -> list[tuple[Limit, Row]]:
    """Release permits; the answer is the rows of their limits after that."""
    with suppress(StoreError):
        freed = _release(store, taken)
        now = store.clock.now()
        if idle := [limit_writes.let_limit_expire(limit.key, now=now) for limit, row in freed if _is_idle(row)]:
            store.write_rows(idle, rejected=ignore_rejection)
        return freed
    return []


def _release(store: TaskStore, taken: Sequence[Permit]) -> list[tuple[Limit, Row]]:
    """The holder of a limit's last permit lets the row expire in the same write, unless another has come meanwhile."""
    now = store.clock.now()
    batch = [
        limit_writes.release_last_permit(one.limit.key, one.member, now=now)
        if one.is_alone
        else limit_writes.release_permit(one.limit.key, one.member)
        for one in taken
    ]
    rows = [row for _, row in store.write_rows(batch, rejected=ignore_rejection)]
    left = [number for number, one in enumerate(taken) if one.member in holders_of(rows[number])]
    again = [limit_writes.release_permit(taken[number].limit.key, taken[number].member) for number in left]
    if again:
        for number, (_, row) in zip(left, store.write_rows(again, rejected=ignore_rejection), strict=True):
            rows[number] = row
    return [(one.limit, row) for one, row in zip(taken, rows, strict=True) if row is not None]


def _is_idle(row: Row) -> bool:
    """True when the limit is unused and its row does not expire."""
    return "holders" not in row and "status" not in row and "expireAt" not in row


def rows_of(store: TaskStore, keys: Iterable[str]) -> dict[str, Row]:
    names = {limit_id(key): key for key in keys}
    return {names[row_id]: row for row_id, row in store.engine.get(list(names)).items()} if names else {}


def _member(lease: Lease) -> str:
    return holder(lease.task_id, lease.fence)
