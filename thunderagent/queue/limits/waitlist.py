"""Waitlists of limits: tasks that wait for a permit, out of the way of all others.

A task without a free permit is BLOCKED under a status value with the key of its limit, `BLOCKED@key`. So a waitlist is
one partition of the index, ordered by due time, which hides no other task. The agent that releases a permit claims the
next task at once. A sweep lets out what no agent claims: a releasing agent died, lacks the job, or read a late index.
The sweep reads only limits with an open waitlist, which have an index entry of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from thunderagent.jobs.job import Limit
from thunderagent.model.errors import StoreError
from thunderagent.model.rows import is_number
from thunderagent.model.task import WAITLIST_MARK, Candidate, Lane, Row, Status, StatusValue, Task
from thunderagent.model.writes import limits as limit_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import WAITLIST_STATUS, limit_id, limit_row
from thunderagent.queue.limits.permits import Permits, holders_of, number_of, rows_of
from thunderagent.queue.sweeps import ENTRIES_A_SWEEP, Rounds, fleet_rounds
from thunderagent.stores.tasks import TaskStore, ignore_rejection

PAGE: Final = 100
"""Index entries of one page of a waitlist."""

PAGES: Final = 10
"""Pages of one lane of a waitlist that are read past tasks that cannot start now; the sweep lets these out."""

SPARE: Final = 10
"""Entries that are read beyond those needed, as other agents may have claimed the first of them."""

TRIES: Final = 5
"""Attempts to open a waitlist that is closed meanwhile."""

KEPT_S: Final = 60.0
"""Age at which the row of an open waitlist is written again when one more task joins."""

CLOSES_S: Final = 600.0
"""Age at which an empty waitlist is closed: ten times longer than any write takes."""

LONGEST_SWEEP_S: Final = 2.0
"""Longest time that one sweep of the waitlists holds up an agent's loop."""

AT_ONCE: Final = 100
"""Tasks of one waitlist that one sweep lets out."""

PLACES_KEPT: Final = 1000
"""Long waitlists whose last place an agent remembers; of others it reads the head and the part next to it."""


def waitlist_value(lane: Lane, key: str) -> str:
    """The status value of the tasks of a lane that wait for a permit of a limit."""
    return f"{lane.value(Status.BLOCKED)}{WAITLIST_MARK}{key}"


def waitlist_of(status_value: str) -> str | None:
    """Key of the limit on whose waitlist a task with this status value is."""
    return StatusValue.parse(status_value).waitlist


def open_waitlists(store: TaskStore) -> Iterator[str]:
    """Keys of the limits with an open waitlist."""
    after = None
    while True:
        page = store.engine.page(WAITLIST_STATUS, limit=PAGE, after=after)
        yield from _keys_of(page.entries)
        after = page.after
        if after is None:
            return


def is_waitlist_open(row: Row | None) -> bool:
    """True when the row of a limit says that its waitlist is open, and is in the index, so that sweeps find it."""
    return row is not None and row.get("status") == WAITLIST_STATUS and is_number(row.get("createdAt"))


def keep_waitlist_open(store: TaskStore, limit: Limit, row: Row | None) -> None:
    """Make sweeps look after the waitlist of a limit, before a task joins it.

    Raises:
        StoreError: the store did not answer.
    """
    key, number = limit
    for _ in range(TRIES):
        now = store.clock.now()
        if row is None:
            fresh = {**limit_row(key, number=number, now=now), "status": WAITLIST_STATUS, "createdAt": now}
            ours, row = store.insert_row(fresh)
            if ours:
                return
        if not is_waitlist_open(row):
            write = limit_writes.open_waitlist(key, number=number, now=now)
        elif now - _seconds(row.get("updatedAt")) < KEPT_S:
            return
        else:
            write = limit_writes.keep_waitlist(key, number=number, now=now)
        [(won, row)] = store.write_rows([write])
        if won:
            return


def waiting_tasks(store: TaskStore, key: str, lane: Lane, *, number: int = PAGE) -> Iterator[Candidate]:
    """The due tasks of one lane that wait for a permit of a limit, the longest wait first.

    Args:
        number: how many are likely to be needed: the first read has these and a few more.
    """
    after, until = None, store.clock.latest()
    limit = min(PAGE, number + SPARE)
    for _ in range(PAGES):
        page = store.engine.page(waitlist_value(lane, key), limit=limit, until=until, after=after)
        yield from filter(store.may_try, page.entries)
        limit, after = PAGE, page.after
        if after is None:
            return


def candidate_of(task: Task) -> Candidate:
    return Candidate(task.task_id, task.status_value, task.created_at, task.job_value, task.kind)


def let_out(store: TaskStore, several: Iterable[Candidate]) -> list[Task]:
    """Move tasks from their waitlists to their queues; the answer is those that were still waiting.

    Raises:
        StoreError: the store did not answer.
    """
    now = store.clock.now()
    batch = [writes.leave_waitlist(one, now=now) for one in several]
    return [task for task in store.write_tasks(batch, rejected=ignore_rejection) if task is not None] if batch else []


# New tasks


def put_on_waitlist(store: TaskStore, tasks: Sequence[Task], *, number: int | None = None) -> list[Task]:
    """The tasks as they are to be put: due ones without a free permit are on their waitlist.

    A task that went through its queue first would be claimed, refused and moved: seven write units more.

    Args:
        tasks: with the keys of their limits.
        number: of the limit, for tasks without one of their own; None: that of the limit's row.

    Raises:
        StoreError: the store did not answer.
    """
    now = store.clock.now()
    due = [task for task in tasks if task.limit_key and task.status is Status.PENDING and task.created_at <= now]
    if not due:
        return list(tasks)
    rows = rows_of(store, {task.limit_key or "": None for task in due})
    taken = Counter({key: len(holders_of(row)) for key, row in rows.items()})
    placed, limits = [], dict[str, Limit]()
    waiting = {task.task_id for task in due}
    for task in tasks:
        if task.task_id in waiting and (limit := _limit(task, number, rows)) is not None:
            taken[limit.key] += 1
            if taken[limit.key] > limit.number:
                limits[limit.key] = limit
                task = replace(task, status=Status.BLOCKED, waitlist=limit.key)
        placed.append(task)
    for key, limit in limits.items():
        keep_waitlist_open(store, limit, rows.get(key))
    return placed


def let_out_new(store: TaskStore, tasks: Iterable[Task], *, number: int | None = None) -> list[Task]:
    """The tasks that were put; those whose permit was released meanwhile are let out of their waitlist.

    The agent that releases a permit later sees them there. Without an answer of the store they stay, and the sweep
    looks after them.
    """
    known = list(tasks)
    left: dict[str, Task] = {}
    waiting: dict[str, list[Task]] = {}
    for task in known:
        if task.waitlist is not None:
            waiting.setdefault(task.waitlist, []).append(task)
    with suppress(StoreError):
        leaving: list[Task] = []
        rows = rows_of(store, waiting)
        for key, several in waiting.items():
            row = rows.get(key)
            limit = _limit(several[0], number, rows) or Limit(key, 1)
            if not is_waitlist_open(row):  # closed while it was empty
                keep_waitlist_open(store, limit, row)
            leaving += several[: max(0, limit.number - len(holders_of(row)))]
        left = {task.task_id: task for task in let_out(store, map(candidate_of, leaving))}
    return [
        replace(task, status=Status.PENDING, waitlist=None, created_at=left[task.task_id].created_at)
        if task.task_id in left
        else task
        for task in known
    ]


class WaitlistSweep:
    """Looks after all open waitlists; one agent of the fleet does so in each `sweep_s`. Called in the agent's loop.

    Args:
        permits: finds leases that are over.
        on_left: called with each task that was let out to its queue.
        most: tasks in one lane of a waitlist that are read at its head, and again behind that.
        most_waitlists: open waitlists that one sweep looks after.
    """

    def __init__(
        self,
        store: TaskStore,
        permits: Permits,
        *,
        on_left: Callable[[Task], None] = lambda task: None,
        most: int = PAGE * PAGES,
        most_waitlists: int = ENTRIES_A_SWEEP,
    ) -> None:
        self._store = store
        self._permits = permits
        self._on_left = on_left
        self._most = most
        self._most_waitlists = most_waitlists
        self._places: dict[str, Any] = {}

    def run(self, lanes: Sequence[Lane], numbers: Mapping[str, int], *, owner: str, turn_s: float) -> int:
        """Release permits of leases that are over, let out tasks for free permits, and close waitlists that are long
        empty. Bounded in time: the next sweep goes on where this one stops.

        Args:
            numbers: of the limits of this agent's jobs; those of others are in their rows.
            owner: the agent, which takes the turn if a waitlist is open at all.

        Returns:
            how many tasks were let out.

        Raises:
            StoreError: the store did not answer.
        """
        number, until = 0, self._store.monotonic() + LONGEST_SWEEP_S
        if not self._store.engine.page(WAITLIST_STATUS, limit=1).entries:
            return 0
        turn = fleet_rounds(self._store, "lines", owner=owner, lasts_s=turn_s, most=self._most_waitlists)
        with turn as rounds:
            for found in rounds.pages(WAITLIST_STATUS) if rounds is not None else ():
                number += self._sweep(_keys_of(found), lanes, numbers)
                if self._store.monotonic() >= until:
                    break
        return number

    def _sweep(self, keys: Sequence[str], lanes: Sequence[Lane], numbers: Mapping[str, int]) -> int:
        left = 0
        rows = rows_of(self._store, keys)
        self._permits.mend(rows.values())
        living = self._permits.living(rows.values())
        now = self._store.clock.now()
        over = [
            limit_writes.replace_holders(key, held, held & living, now=now)
            for key, row in rows.items()
            if not (held := holders_of(row)) <= living
        ]
        if over:
            self._store.write_rows(
                over, rejected=ignore_rejection
            )  # refused where a permit was taken or released meanwhile
        for key, row in rows.items():
            number = numbers.get(key) or number_of(row.get("limitMax")) or 1
            free = number - len(holders_of(row) & living)
            if free <= 0:
                continue
            waiting = list(self._waiting(key, lanes, free))
            for task in let_out(self._store, waiting):
                self._on_left(task)
                left += 1
            if not waiting:
                self._close(key, lanes, row, number)
        return left

    def _waiting(self, key: str, lanes: Sequence[Lane], free: int) -> Iterator[Candidate]:
        """The tasks to let out: of each job in each lane as many as permits are free, so that a job whose tasks cannot
        start (it is paused, or no agent has it) holds up no other."""
        number, seen = 0, Counter[tuple[Lane, str]]()
        for lane in lanes:
            for one in self._entries(waitlist_value(lane, key)):
                seen[lane, one.job] += 1
                if seen[lane, one.job] <= free:
                    yield one
                    number += 1
                if number >= AT_ONCE:
                    return

    def _entries(self, value: str) -> Iterator[Candidate]:
        """The due tasks at the head of a waitlist, and another part of those far behind in each sweep."""
        until = self._store.clock.latest()
        head = Rounds(self._store, most=self._most)
        yield from chain.from_iterable(head.pages(value, until=until))
        behind = self._places.pop(value, head.places.get(value))
        if behind is None or not head.places:
            return
        part = Rounds(self._store, most=self._most, places={value: behind})
        yield from chain.from_iterable(part.pages(value, until=until))
        self._places |= part.places
        while len(self._places) > PLACES_KEPT:
            del self._places[next(iter(self._places))]

    def _close(self, key: str, lanes: Sequence[Lane], row: Row, number: int) -> None:
        seen_at = row.get("updatedAt")
        if not is_number(seen_at):  # a row made by hand: from now on it counts
            keep = limit_writes.keep_waitlist(key, number=number, now=self._store.clock.now())
            self._store.write_rows([keep], rejected=ignore_rejection)
        elif self._store.clock.now() - seen_at >= CLOSES_S and not self._has_tasks(key, lanes):
            is_used, now = bool(holders_of(row)), self._store.clock.now()
            close = limit_writes.close_waitlist(key, seen_at=seen_at, is_used=is_used, now=now)
            self._store.write_rows([close], rejected=ignore_rejection)

    def _has_tasks(self, key: str, lanes: Sequence[Lane]) -> bool:
        return any(self._store.engine.page(waitlist_value(lane, key), limit=1).entries for lane in lanes)


def _limit(task: Task, number: int | None, rows: Mapping[str, Row]) -> Limit | None:
    """The limit of a task, as far as it is known without the code of its job."""
    key = task.limit_key or ""
    known = number_of(task.limit_max) or number or number_of((rows.get(key) or {}).get("limitMax"))
    return Limit(key, known) if known else None


def _keys_of(entries: Iterable[Candidate]) -> list[str]:
    """Keys of the limits that index entries of open waitlists name."""
    prefix = limit_id("")
    return [one.task_id.removeprefix(prefix) for one in entries if one.task_id.startswith(prefix)]


def _seconds(value: object) -> float:
    """A moment; of a row made by hand it may be something else."""
    return value if is_number(value) else -math.inf
