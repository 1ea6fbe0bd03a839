"""The row of a unique key as it is read: whom it names, and what whoever wrote it is about to do."""

from __future__ import annotations

import json
from dataclasses import dataclass

from thunderagent.model.attributes import ATTRIBUTES
from thunderagent.model.errors import StoreError, TaskUnreadable
from thunderagent.model.pacing import KEY_SETTLES_S
from thunderagent.model.task import Row, Status, Task, UniqueScope, read_task
from thunderagent.model.unreadable import Unreadable, is_number
from thunderagent.stores.tasks import TaskStore


def holds(task: Task) -> bool:
    """True while a task that was given its unique key still has it."""
    if task.unique_scope == UniqueScope.UNTIL_START:
        return task.status in (Status.PENDING, Status.BLOCKED) and task.started_at is None
    return not task.status.is_terminal


def has_key(task: Task, wanted: Task) -> bool:
    """It holds the key of the other: an id may also name a task of another job, or one that was put without the key."""
    return (task.job, task.unique_key) == (wanted.job, wanted.unique_key) and holds(task)


def end_of(task: Task) -> float:
    """When it ended."""
    return task.finished_at or 0.0


def promise_of(task: Task) -> str:
    """A task as text, so that anybody can put it."""
    return json.dumps(task.to_row(), default=sorted, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class KeyRow:
    """The row of a key as somebody saw it, and the task that it names as it was after that."""

    row: Row
    holder: Task | None
    is_held: bool
    """That task is open, and has this key."""
    is_fresh: bool
    """The row was written so lately that a task which it promises may still be on its way."""

    @property
    def held_by(self) -> str:
        """Id of the task that it names."""
        return str(self.row["heldBy"])

    @property
    def fence(self) -> int:
        """Grows each time the key changes hands."""
        return int(self.row["fence"])

    @property
    def promised(self) -> Task | None:
        """The task of a caller's own id that is about to be put, if it is not there yet.

        Raises:
            StoreError: what the row promises is no task.
        """
        text = self.row.get("payload")
        if self.holder is not None or text is None or not self.is_fresh:
            return None
        try:
            values = json.loads(text)
            sets = {name: frozenset(values[name]) for name in values if ATTRIBUTES[name] == "SS"}
            return Task.from_row(values | sets)
        except (KeyError, TypeError, ValueError, TaskUnreadable) as error:
            raise _broken(self.row, f"its payload is no task ({error!r})") from error

    @property
    def may_come(self) -> bool:
        """Under an id that nobody chose, a task may still be put by the one who took the key."""
        return self.holder is None and "payload" not in self.row and "finishedAt" not in self.row

    @property
    def may_live_again(self) -> bool:
        """Somebody is about to bring the task to life, from the end that it has."""
        return self.holder is not None and self.row.get("finishedAt") == end_of(self.holder)


def look_at(store: TaskStore, row: Row, wanted: Task) -> KeyRow:
    """See whom the row of a key names, for a task that wants the key.

    Raises:
        StoreError: the store did not answer, or the row is not one of a unique key.
        TaskUnreadable: this version cannot read the task that holds it.
    """
    held_by, fence, at = row.get("heldBy"), row.get("fence"), row.get("updatedAt")
    if not isinstance(held_by, str) or not 1 <= len(held_by.encode()) <= 512 or "#" in held_by:
        raise _broken(row, f"heldBy is {held_by!r:.80}, which is no id of a task")
    if not is_number(fence):
        raise _broken(row, f"fence is {fence!r:.80}, which is no number")
    found = store.engine.get([held_by]).get(held_by)
    holder = read_task(found) if found is not None else None
    if isinstance(holder, Unreadable):
        if "job" not in (found or {}):
            raise _broken(row, f"heldBy is {held_by!r}, whose row is no task")
        raise TaskUnreadable(f"the unique key {wanted.unique_key!r} is held by {held_by!r}, and {holder}")
    is_fresh = is_number(at) and abs(store.clock.leases.now() - at) < KEY_SETTLES_S
    return KeyRow(row, holder, holder is not None and has_key(holder, wanted), is_fresh)


def _broken(row: Row, problem: str) -> StoreError:
    return StoreError(
        f"the row {row['taskId']!r} is not one of a unique key: {problem}. Delete it: the key is free then"
    )
