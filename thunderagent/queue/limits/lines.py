"""The lines of limits: tasks that wait for a slot, out of the way of everybody else.

A task for which no slot is free is BLOCKED under a status value that has the key of its limit, so the line is one
partition of the index, ordered by due time: it hides nobody, and nobody looks at it in vain. Who frees a slot claims
the next of the line at once. What falls between two chairs (the agent died, has no such job, or the index was late) is
found by a sweep, which looks only at limits whose line is open: those have an index entry of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.model.rows import is_number
from thunderagent.model.task import LINE_MARK, Candidate, Lane, Row, Status, StatusValue, Task
from thunderagent.model.writes import limits as limit_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import LINE_STATUS, limit_id, limit_row
from thunderagent.stores.tasks import TaskStore, passed_over

LINE_KEPT_S: Final = 60.0
"""A line that was spoken for within this time need not be spoken for again when one more task comes to stand in it."""


PAGE: Final = 100
"""Index entries of one page of a line."""

PAGES: Final = 10
"""Pages of one lane of a line that are read past tasks that cannot start now; the sweep lets these out."""

SPARE: Final = 10
"""Entries that are read beyond those needed, as others may have claimed the first of them."""

TRIES: Final = 5
"""How often a line is opened that is closed meanwhile."""


def line_value(lane: Lane, key: str) -> str:
    """The status value under which the index has the tasks of a lane that wait for a slot of a limit."""
    return f"{lane.value(Status.BLOCKED)}{LINE_MARK}{key}"


def line_of(status_value: str) -> str | None:
    """Key of the limit in whose line a task with this status value stands."""
    return StatusValue.parse(status_value).line


def open_lines(store: TaskStore) -> Iterator[str]:
    """Keys of the limits with an open line."""
    after = None
    while True:
        page = store.engine.page(LINE_STATUS, limit=PAGE, after=after)
        yield from keys_of(page.entries)
        after = page.after
        if after is None:
            return


def keys_of(entries: Iterable[Candidate]) -> list[str]:
    """Keys of the limits that entries with the status of open lines name."""
    prefix = limit_id("")
    return [one.task_id.removeprefix(prefix) for one in entries if one.task_id.startswith(prefix)]


def is_line_open(row: Row | None) -> bool:
    """Whether the row of a limit says that its line is open, and the index has it, so that sweeps find it."""
    return row is not None and row.get("status") == LINE_STATUS and is_number(row.get("createdAt"))


def keep_line_open(store: TaskStore, limit: Limit, row: Row | None) -> None:
    """See to it that sweeps look after the line of a limit, before a task comes to stand in it.

    Raises:
        StoreError: the store did not answer.
    """
    key, number = limit
    for _ in range(TRIES):
        now = store.clock.now()
        if row is None:
            fresh = {**limit_row(key, number=number, now=now), "status": LINE_STATUS, "createdAt": now}
            ours, row = store.insert_row(fresh)
            if ours:
                return
        if not is_line_open(row):
            write = limit_writes.open_line(key, number=number, now=now)
        elif now - seconds_of(row.get("updatedAt")) < LINE_KEPT_S:
            return
        else:
            write = limit_writes.keep_line(key, number=number, now=now)
        [(won, row)] = store.write_rows([write])
        if won:
            return


def entries(store: TaskStore, key: str, lane: Lane, *, number: int = PAGE) -> Iterator[Candidate]:
    """The tasks that are due and stand in the line of a limit, in one lane; those that wait longest first.

    Args:
        store: where the line is.
        key: of the limit.
        lane: where to look.
        number: how many are likely to be needed: no more are read at first than that and a few.
    """
    after, until = None, store.clock.latest()
    limit = min(PAGE, number + SPARE)
    for _ in range(PAGES):
        page = store.engine.page(line_value(lane, key), limit=limit, until=until, after=after)
        yield from filter(store.may_try, page.entries)
        limit, after = PAGE, page.after
        if after is None:
            return


def candidate_of(task: Task) -> Candidate:
    """The index entry of a task."""
    return Candidate(task.task_id, task.status_value, task.created_at, task.job_value, task.kind)


def let_out(store: TaskStore, several: Iterable[Candidate]) -> list[Task]:
    """Let tasks out of their lines into their queues; those that stood in line still.

    Raises:
        StoreError: the store did not answer.
    """
    now = store.clock.now()
    batch = [writes.leave_line(one, now=now) for one in several]
    return [task for task in store.write_tasks(batch, rejected=passed_over) if task is not None] if batch else []


def seconds_of(value: object) -> float:
    """A moment, unless a row made by hand has something else in its place."""
    return value if is_number(value) else -math.inf
