"""Who waits for the slots that become free here: an agent starts the next of the line itself, and at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Candidate, Lane, Row, Status, Task
from thunderagent.queue.limits.lines import candidate_of, entries, is_line_open, keep_line_open, let_out, line_of
from thunderagent.queue.limits.slots import holders_of, rows_of
from thunderagent.stores.tasks import TaskStore, Wanted

LINE_AGAIN_S: Final = (0.25, 1.0)
"""Waits before a line is looked at again that seemed to have nobody for a free slot: the index may be late."""

LINE_TRIED_S: Final = 5.0
"""How long an entry of a line that somebody else has claimed is not tried again: the index shows it for a while."""


FREED_KEPT: Final = 1000
"""Limits with a free slot that an agent remembers to look at; the sweep finds the others."""


@dataclass(slots=True)
class _Free:
    """Slots that became free here, and when to look who waits for them."""

    limit: Limit
    free: int
    due: float
    looks: int = 0


class FreeSlots:
    """The slots that became free in one agent, and the lines in which somebody may wait for them. Called in the agent's
    loop."""

    def __init__(self, store: TaskStore, *, told: Callable[[Task], None] = lambda task: None) -> None:
        """Make one.

        Args:
            store: where the lines are.
            told: told of tasks that were let out of their line into their queue, for any agent.
        """
        self._store = store
        self._told = told
        self.lanes: Sequence[Lane] = ()
        """Every lane that is known: a line may have tasks of any."""
        self._free: dict[str, _Free] = {}
        self._looked: dict[str, _Free] = {}
        self._tried: dict[tuple[str, float], float] = {}
        self._behind: dict[str, Candidate] = {}

    @property
    def due(self) -> float:
        """Monotonic second of the next look for somebody who waits for a slot that is free here; infinity: none."""
        return min((one.due for one in self._free.values()), default=math.inf)

    def freed(self, limit: Limit, row: Row | None) -> None:
        """The row of a limit as it is after a slot was freed; remembered if one is free and its line is open."""
        free = limit.number - len(holders_of(row))
        if free <= 0 or not is_line_open(row):
            self._free.pop(limit.key, None)
        elif len(self._free) < FREED_KEPT or limit.key in self._free:
            self._free[limit.key] = _Free(limit, free, self._store.monotonic())

    def stood_back(self, limit: Limit, task: Task, row: Row | None) -> None:
        """A task of ours came to stand in the line, whose row is as it is since then.

        Raises:
            StoreError: the store did not answer; the sweep looks after the task.
        """
        if not is_line_open(row):  # closed, as nobody stood in it yet
            keep_line_open(self._store, limit, row)
            row = rows_of(self._store, [limit.key]).get(limit.key)
        self.freed(limit, row)
        if limit.key in self._free:  # the index may not have it yet
            candidate = candidate_of(replace(task, status=Status.BLOCKED, line=limit.key))
            self._behind[candidate.task_id] = candidate

    def postpone(self, seconds: float) -> None:
        """Do not look before this time is over."""
        for one in self._free.values():
            one.due = max(one.due, self._store.monotonic() + seconds)

    def look(
        self,
        room: Callable[[Candidate], float | None],
        has_nobody: Callable[[Candidate], bool] = lambda one: False,
    ) -> list[Wanted]:
        """Candidates for the slots that became free here, out of their lines, those that wait longest first.

        Args:
            room: the length of the lease a candidate gets here; None lets it go to its queue, for any agent.
            has_nobody: says of a candidate that it cannot start anywhere now, so that the slot is for the next.

        Raises:
            StoreError: the store did not answer; it is looked again later.
        """
        now = self._store.monotonic()
        due = {key: one for key, one in self._free.items() if one.due <= now}
        if not due:
            return []
        edge = now - LINE_TRIED_S
        self._tried = {entry: at for entry, at in self._tried.items() if at > edge}
        wanted: list[Wanted] = []
        elsewhere: list[Candidate] = []
        try:
            self._refresh({key: one for key, one in due.items() if one.looks})
            for key, one in due.items():
                found = self._next(key, one.free, has_nobody) if one.free > 0 else []
                for candidate in found:
                    lease_s = room(candidate)
                    if lease_s is None:
                        elsewhere.append(candidate)
                    else:
                        wanted.append(Wanted(candidate, lease_s))
                self._look_later(key, one, enough=len(found) >= one.free)
            for task in let_out(self._store, elsewhere):
                self._told(task)
        except StoreError:
            self._free = {**due, **self._free}
            self.postpone(LINE_AGAIN_S[-1])
            raise
        self._behind = {name: one for name, one in self._behind.items() if line_of(one.status_value) not in due}
        return wanted

    def lost(self, candidate: Candidate) -> None:
        """Somebody else has claimed what we found in a line: the slot may be for the next."""
        key = line_of(candidate.status_value)
        if key is None:
            return
        self._tried[candidate.task_id, candidate.created_at] = self._store.monotonic()
        one = self._free.get(key) or self._looked.get(key)
        if one is not None:
            one.due, one.looks = self._store.monotonic(), max(1, one.looks)
            self._free[key] = one

    def _next(self, key: str, number: int, has_nobody: Callable[[Candidate], bool]) -> list[Candidate]:
        """The tasks that are due, may start, and wait longest for a slot."""
        found = {one.task_id: one for one in self._behind.values() if line_of(one.status_value) == key}
        for lane in self.lanes:
            line = entries(self._store, key, lane, number=number)
            new = (one for one in line if (one.task_id, one.created_at) not in self._tried)
            ready = (one for one in new if not has_nobody(one))
            found.update((one.task_id, one) for one in islice(ready, number))
        return sorted(found.values(), key=lambda one: one.created_at)[:number]

    def _refresh(self, again: Mapping[str, _Free]) -> None:
        """Look how many slots are free since the first look, and whether there are new lanes."""
        if not again:
            return
        rows = rows_of(self._store, again)
        self.lanes = list(dict.fromkeys((*self.lanes, *self._store.engine.lanes())))
        for key, one in again.items():
            row = rows.get(key)
            one.free = one.limit.number - len(holders_of(row)) if is_line_open(row) else 0

    def _look_later(self, key: str, one: _Free, *, enough: bool) -> None:
        """The index may show later who came before: look again, a few times, unless everything is given away."""
        del self._free[key]
        self._looked.pop(key, None)
        self._looked[key] = one
        while len(self._looked) > FREED_KEPT:
            del self._looked[next(iter(self._looked))]
        if not enough and one.looks < len(LINE_AGAIN_S):
            one.due = self._store.monotonic() + LINE_AGAIN_S[one.looks]
            self._free[key] = one
        one.looks += 1
