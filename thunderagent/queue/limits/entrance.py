"""Where new tasks with a limit come in: those for which no slot is free go straight into the line.

A task that went through its queue first would be claimed, refused and put into the line: seven write units more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from thunderagent.jobs.job import Limit
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Row, Status, Task
from thunderagent.queue.limits.lines import candidate_of, is_line_open, keep_line_open, let_out
from thunderagent.queue.limits.slots import holders_of, number_of, rows_of
from thunderagent.stores.tasks import TaskStore


class Entrance:
    """Where new tasks with a limit come in: straight into their line while no slot is free."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    def place(self, tasks: Sequence[Task], *, number: int | None = None) -> list[Task]:
        """The tasks as they are to be put: those that are due, and for which no slot is free, in line.

        Args:
            tasks: with the keys of their limits.
            number: of the limit, for tasks that have none of their own; None: as the limit's row tells.

        Raises:
            StoreError: the store did not answer.
        """
        now = self._store.clock.now()
        due = [task for task in tasks if task.limit_key and task.status is Status.PENDING and task.created_at <= now]
        if not due:
            return list(tasks)
        rows = rows_of(self._store, {task.limit_key or "": None for task in due})
        taken = Counter({key: len(holders_of(row)) for key, row in rows.items()})
        placed, lines = [], dict[str, Limit]()
        waiting = {task.task_id for task in due}
        for task in tasks:
            if task.task_id in waiting and (limit := _limit(task, number, rows)) is not None:
                taken[limit.key] += 1
                if taken[limit.key] > limit.number:
                    lines[limit.key] = limit
                    task = replace(task, status=Status.BLOCKED, line=limit.key)
            placed.append(task)
        for key, limit in lines.items():
            keep_line_open(self._store, limit, rows.get(key))
        return placed

    def look_again(self, tasks: Iterable[Task], *, number: int | None = None) -> list[Task]:
        """The tasks, those let out of the line for which a slot has become free while they were put into it.

        Nobody else may look for them; whoever frees a slot later sees them in line. When the store does not answer they
        stay there, and the sweep looks after them.
        """
        known = list(tasks)
        left: dict[str, Task] = {}
        waiting: dict[str, list[Task]] = {}
        for task in known:
            if task.line is not None:
                waiting.setdefault(task.line, []).append(task)
        with suppress(StoreError):
            leaving: list[Task] = []
            rows = rows_of(self._store, waiting)
            for key, several in waiting.items():
                row = rows.get(key)
                limit = _limit(several[0], number, rows) or Limit(key, 1)
                if not is_line_open(row):  # closed, as nobody stood in it yet
                    keep_line_open(self._store, limit, row)
                leaving += several[: max(0, limit.number - len(holders_of(row)))]
            left = {task.task_id: task for task in let_out(self._store, map(candidate_of, leaving))}
        return [
            replace(task, status=Status.PENDING, line=None, created_at=left[task.task_id].created_at)
            if task.task_id in left
            else task
            for task in known
        ]


def _limit(task: Task, number: int | None, rows: Mapping[str, Row]) -> Limit | None:
    """The limit of a task, as far as it is known where its job's code may not be at hand."""
    key = task.limit_key or ""
    known = number_of(task.limit_max) or number or number_of((rows.get(key) or {}).get("limitMax"))
    return Limit(key, known) if known else None
