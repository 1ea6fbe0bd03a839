"""Permits that one agent has released: it starts the next tasks of their waitlists itself, and at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Candidate, Lane, Row, Status, Task
from thunderagent.queue.limits.permits import holders_of, rows_of
from thunderagent.queue.limits.waitlist import (
    candidate_of,
    is_waitlist_open,
    keep_waitlist_open,
    let_out,
    waiting_tasks,
    waitlist_of,
)
from thunderagent.stores.tasks import TaskStore, Wanted

AGAIN_S: Final = (0.25, 1.0)
"""Waits before a waitlist that seemed empty is read again: the index may be late."""

TRIED_S: Final = 5.0
"""Seconds in which an entry that another agent has claimed is not tried again: the index shows it for a while."""

FREED_KEPT: Final = 1000
"""Limits with a free permit that an agent remembers; the sweep finds the others."""


@dataclass(slots=True)
class _Free:
    """Free permits of a limit, and when to read its waitlist."""

    limit: Limit
    free: int
    due: float
    looks: int = 0


class FreedPermits:
    """The permits that one agent has released, and the tasks that wait for them. Called in the agent's loop.

    Args:
        on_left: called with each task that was let out to its queue, for any agent.
    """

    def __init__(self, store: TaskStore, *, on_left: Callable[[Task], None] = lambda task: None) -> None:
        self._store = store
        self._on_left = on_left
        self.lanes: Sequence[Lane] = ()
        """Every lane that is known: a waitlist may have tasks of any."""
        self._free: dict[str, _Free] = {}
        self._looked: dict[str, _Free] = {}
        self._tried: dict[tuple[str, float], float] = {}
        self._behind: dict[str, Candidate] = {}

    @property
    def due(self) -> float:
        """Monotonic second at which a waitlist is to be read next; infinity: none."""
        return min((one.due for one in self._free.values()), default=math.inf)

    def note(self, limit: Limit, row: Row | None) -> None:
        """Note the row of a limit after a release: remembered if a permit is free and the waitlist is open."""
        free = limit.number - len(holders_of(row))
        if free <= 0 or not is_waitlist_open(row):
            self._free.pop(limit.key, None)
        elif len(self._free) < FREED_KEPT or limit.key in self._free:
            self._free[limit.key] = _Free(limit, free, self._store.monotonic())

    def joined(self, limit: Limit, task: Task, row: Row | None) -> None:
        """Note a task of ours that joined the waitlist, and the row of its limit after that.

        Raises:
            StoreError: the store did not answer; the sweep looks after the task.
        """
        if not is_waitlist_open(row):  # closed while it was empty
            keep_waitlist_open(self._store, limit, row)
            row = rows_of(self._store, [limit.key]).get(limit.key)
        self.note(limit, row)
        if limit.key in self._free:  # the index may not have it yet
            candidate = candidate_of(replace(task, status=Status.BLOCKED, waitlist=limit.key))
            self._behind[candidate.task_id] = candidate

    def postpone(self, seconds: float) -> None:
        """Read no waitlist before this time is over."""
        for one in self._free.values():
            one.due = max(one.due, self._store.monotonic() + seconds)

    def look(
        self,
        lease_for: Callable[[Candidate], float | None],
        cannot_start: Callable[[Candidate], bool] = lambda one: False,
    ) -> list[Wanted]:
        """Candidates for the free permits from their waitlists, the longest wait first.

        Args:
            lease_for: length of the lease that a candidate gets here; None lets it out to its queue, for any agent.
            cannot_start: True for a candidate that no agent can start now, so that the permit goes to the next.

        Raises:
            StoreError: the store did not answer; the waitlists are read again later.
        """
        now = self._store.monotonic()
        due = {key: one for key, one in self._free.items() if one.due <= now}
        if not due:
            return []
        edge = now - TRIED_S
        self._tried = {entry: at for entry, at in self._tried.items() if at > edge}
        wanted: list[Wanted] = []
        elsewhere: list[Candidate] = []
        try:
            self._refresh({key: one for key, one in due.items() if one.looks})
            for key, one in due.items():
                found = self._next(key, one.free, cannot_start) if one.free > 0 else []
                for candidate in found:
                    lease_s = lease_for(candidate)
                    if lease_s is None:
                        elsewhere.append(candidate)
                    else:
                        wanted.append(Wanted(candidate, lease_s))
                self._look_later(key, one, enough=len(found) >= one.free)
            for task in let_out(self._store, elsewhere):
                self._on_left(task)
        except StoreError:
            self._free = {**due, **self._free}
            self.postpone(AGAIN_S[-1])
            raise
        self._behind = {name: one for name, one in self._behind.items() if waitlist_of(one.status_value) not in due}
        return wanted

    def lost(self, candidate: Candidate) -> None:
        """Another agent has claimed a candidate of ours: the permit may be for the next."""
        key = waitlist_of(candidate.status_value)
        if key is None:
            return
        self._tried[candidate.task_id, candidate.created_at] = self._store.monotonic()
        one = self._free.get(key) or self._looked.get(key)
        if one is not None:
            one.due, one.looks = self._store.monotonic(), max(1, one.looks)
            self._free[key] = one

    def _next(self, key: str, number: int, cannot_start: Callable[[Candidate], bool]) -> list[Candidate]:
        """The due tasks that may start and wait longest for a permit."""
        found = {one.task_id: one for one in self._behind.values() if waitlist_of(one.status_value) == key}
        for lane in self.lanes:
            waiting = waiting_tasks(self._store, key, lane, number=number)
            new = (one for one in waiting if (one.task_id, one.created_at) not in self._tried)
            ready = (one for one in new if not cannot_start(one))
            found.update((one.task_id, one) for one in islice(ready, number))
        return sorted(found.values(), key=lambda one: one.created_at)[:number]

    def _refresh(self, again: Mapping[str, _Free]) -> None:
        """Read how many permits are free now, and which lanes there are."""
        if not again:
            return
        rows = rows_of(self._store, again)
        self.lanes = list(dict.fromkeys((*self.lanes, *self._store.engine.lanes())))
        for key, one in again.items():
            row = rows.get(key)
            one.free = one.limit.number - len(holders_of(row)) if is_waitlist_open(row) else 0

    def _look_later(self, key: str, one: _Free, *, enough: bool) -> None:
        """Read again, a few times, unless every permit has its candidate: the index may be late."""
        del self._free[key]
        self._looked.pop(key, None)
        self._looked[key] = one
        while len(self._looked) > FREED_KEPT:
            del self._looked[next(iter(self._looked))]
        if not enough and one.looks < len(AGAIN_S):
            one.due = self._store.monotonic() + AGAIN_S[one.looks]
            self._free[key] = one
        one.looks += 1
