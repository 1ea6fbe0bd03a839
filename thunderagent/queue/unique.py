"""Unique keys: of the tasks with one key, at most one is open.

The row of a key names its holder, `heldBy`. The task holds the key only while it is open (or, `until_start`, not yet
started): the write that ends the task releases the key, and a crash behind it changes nothing. The row is deleted a
moment later; a row that a crash left is passed on to the next task.

A key is acquired before its task is put or brought to life again. A key whose holder is not open is acquired only after
that holder can no longer be opened:

* The holder does not exist: the new task is put under its id, where the first caller finds it. An id that a caller
  chose stays with its own task: the row of the key has all of that task, and it is put from there.
* The holder has ended and is about to be retried: it gets a new fence, which refuses the retry.

So a crash between any two writes holds nothing up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from thunderagent.model.arguments import check, choice_problem
from thunderagent.model.conditions import Write
from thunderagent.model.errors import (
    ConfigurationError,
    DuplicateTask,
    NotAllowed,
    StoreError,
    TaskUnreadable,
    ThunderAgentError,
)
from thunderagent.model.names import key_problem
from thunderagent.model.rows import ATTRIBUTES, Unreadable, is_number
from thunderagent.model.task import Lane, Row, Status, Task, UniqueScope, new_task_id, read_task, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes import unique as unique_writes
from thunderagent.model.writes.unique import KEY_DOUBT_S, KEY_SETTLES_S, key_id
from thunderagent.stores.large_texts import payload_of
from thunderagent.stores.tasks import Enqueued, TaskStore, ignore_rejection

TRIES: Final = 10
"""Attempts to acquire a key that changes hands meanwhile."""

OWED: Final = 1000
"""Rows of released keys that are kept to be deleted later; more stay until their key is wanted."""


def check_unique(unique_key: str | None, scope: str) -> None:
    """Check the options of an enqueue.

    Raises:
        ConfigurationError: the key or its scope cannot be one.
    """
    check(choice_problem("unique_scope", scope, UniqueScope))
    if unique_key is None and scope != UniqueScope.UNTIL_DONE:
        raise ConfigurationError(f"unique_scope is {str(scope)!r} and unique_key is missing: say of what")
    if unique_key is not None:
        check(key_problem("unique_key", unique_key))


def holds(task: Task) -> bool:
    """True while a task that acquired its unique key still has it."""
    if task.unique_scope == UniqueScope.UNTIL_START:
        return task.status in (Status.PENDING, Status.BLOCKED) and task.started_at is None
    return not task.status.is_terminal


def has_key(task: Task, wanted: Task) -> bool:
    """True when it holds the key of the other; a task of the same id may be of another job or without the key."""
    return (task.job, task.unique_key) == (wanted.job, wanted.unique_key) and holds(task)


@dataclass(frozen=True, slots=True)
class KeyRow:
    """The row of a key as it was read, and its holder as read after it."""

    row: Row
    holder: Task | None
    is_held: bool
    """True when the holder is open and has this key."""
    is_fresh: bool
    """True when the row is so young that a task which it promises may still be put."""

    @property
    def held_by(self) -> str:
        return str(self.row["heldBy"])

    @property
    def promised(self) -> Task | None:
        """The task under a caller's own id that is about to be put, if it does not exist yet.

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
        """True when a task may still be put under this id, which no caller chose."""
        return self.holder is None and "payload" not in self.row and "finishedAt" not in self.row

    @property
    def may_live_again(self) -> bool:
        """True when the holder is about to be brought to life from the end that it has."""
        return self.holder is not None and self.row.get("finishedAt") == _end_of(self.holder)


def look_at(store: TaskStore, row: Row, wanted: Task) -> KeyRow:
    """Read the holder that the row of a key names, for a task that wants the key.

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


class _Acquired(NamedTuple):
    """The task that has the key now, and the key's row as written for it."""

    task: Task
    row: Row


class UniqueKeys:
    """The unique keys of a store."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._owed: list[Write] = []

    def put(self, task: Task, put: Callable[[Task], Enqueued], *, own_id: bool, shards: int) -> Task:
        """Put a task with a unique key, unless an open task has the key.

        Args:
            put: puts it if its id is free.
            own_id: True when the caller chose its id, which then names one task for ever.
            shards: of its queue, as its lane depends on its id.

        Returns:
            the task that has the key.

        Raises:
            DuplicateTask: the caller's own id is taken by a task that does not have the key.
            PayloadTooLarge: its payload cannot be kept.
            NotAllowed: the task that has the key was asked to stop and has not ended, or the key keeps changing hands.
            StoreError: the store did not answer, and the same enqueue may be repeated; or the row of the key is broken.
        """
        self._store.large_texts.check(payload_of(task), task.payload_text)
        promise = self._promise(task) if own_id else None
        for _ in range(TRIES):
            began = self._store.monotonic()
            acquired = self._acquire(task, put, promise, shards)
            if isinstance(acquired, Task):
                return _not_stopping(acquired, task, own_id=own_id)
            if acquired is None:
                continue
            task, row = acquired
            if self._store.monotonic() - began > KEY_DOUBT_S:  # others may have given us up: acquire it again
                continue
            answer = put(task)
            if answer.error is not None and not isinstance(answer.error, DuplicateTask):
                raise answer.error  # it may have been put: the key waits for it
            if answer.created:
                return answer.task
            if has_key(answer.task, task):
                return _not_stopping(answer.task, task, own_id=own_id)
            if own_id:
                with suppress(StoreError):
                    self._store.write_rows([unique_writes.drop_key(row)])
                if answer.error is not None:
                    raise answer.error
                return answer.task
            task = _under(task, new_task_id(), shards)  # a task under this id was put and has ended already
        raise NotAllowed(_restless(task))

    def retake(self, task: Task) -> None:
        """Acquire the key again for a task that has ended, right before it is brought to life as it was read here.

        Raises:
            NotAllowed: another task has the key.
            StoreError: the store did not answer, or the row of the key is broken.
        """
        if task.unique_key is None:
            return
        ended_at = _end_of(task)
        for _ in range(TRIES):
            ours, row = self._insert(task, ended_at=ended_at)
            if ours:
                return
            seen = look_at(self._store, row, task)
            if seen.held_by != task.task_id:
                if seen.is_held or seen.promised is not None:
                    raise NotAllowed(
                        f"the unique key {task.unique_key!r} of {task.task_id!r} is held by the task {seen.held_by!r}: "
                        "wait for its end, or cancel it"
                    )
                if not self._keep_out(seen, task):
                    continue
            if self._pass(seen, task, ended_at=ended_at):
                return
        raise NotAllowed(_restless(task))

    def release(self, tasks: Iterable[Task]) -> None:
        """Delete the rows of keys that these tasks hold no longer, since they have ended or started.

        The keys are free already by the state of their tasks. A row that the store did not delete goes with the next
        call.
        """
        owed, self._owed = self._owed, []
        owed += (
            unique_writes.release_key(_row_id(task), task.task_id, over_at=task.finished_at or task.started_at)
            for task in tasks
            if task.unique_key is not None
        )
        if owed:
            try:
                self._store.write_rows(owed, rejected=ignore_rejection)
            except StoreError:
                self._owed = (self._owed + owed)[-OWED:]

    def forget(self, tasks: Iterable[Task], *, now: float) -> None:
        """Delete the rows of keys that still name these tasks, which were deleted; no other row is written.

        Args:
            now: a moment at which they certainly existed, on the shared clock of leases.

        Raises:
            StoreError: the store did not answer.
        """
        gone = {(_row_id(task), task.task_id) for task in tasks if task.unique_key is not None}
        if not gone:
            return
        rows = self._store.engine.get(sorted({row_id for row_id, _ in gone}))
        left = [one for one in sorted(gone) if rows.get(one[0], {}).get("heldBy") == one[1]]
        if left:
            batch = [unique_writes.forget_key(row_id, task_id, now=now) for row_id, task_id in left]
            self._store.write_rows(batch, rejected=ignore_rejection)

    def _acquire(
        self, task: Task, put: Callable[[Task], Enqueued], promise: str | None, shards: int
    ) -> _Acquired | Task | None:
        """Acquire the key; the answer is another task that has it, or None: try again."""
        ours, row = self._insert(task, promise=promise)
        if ours:
            return _Acquired(task, row)
        seen = look_at(self._store, row, task)
        if seen.holder is not None and seen.is_held:
            return self._store.large_texts.inflate([seen.holder])[0]
        if (other := seen.promised) is not None:
            if not self._pass(seen, other, promise=seen.row["payload"]):
                return None
            answer = put(other)  # as it stands there: its payload is kept already
            if answer.error is not None and not isinstance(answer.error, DuplicateTask):
                raise answer.error
            return self._store.large_texts.inflate([answer.task])[0] if has_key(answer.task, task) else None
        if seen.may_come and promise is None:
            return _Acquired(_under(task, seen.held_by, shards), seen.row)
        passed = self._pass(seen, task, promise=promise) if self._keep_out(seen, task) else None
        return None if passed is None else _Acquired(task, passed)

    def _insert(self, task: Task, *, promise: str | None = None, ended_at: float | None = None) -> tuple[bool, Row]:
        now = self._store.clock.leases.now()
        row = unique_writes.key_row(_row_id(task), task.task_id, now=now, promise=promise, ended_at=ended_at)
        return self._store.insert_row(row)

    def _pass(
        self, seen: KeyRow, task: Task, *, promise: str | None = None, ended_at: float | None = None
    ) -> Row | None:
        """The row of the key after it went to the task; None: it has changed since it was read."""
        now = self._store.clock.leases.now()
        write = unique_writes.pass_key(seen.row, task.task_id, now=now, promise=promise, ended_at=ended_at)
        [(won, row)] = self._store.write_rows([write])
        return row if won else None

    def _keep_out(self, seen: KeyRow, heir: Task) -> bool:
        """Make sure that the holder, which is not open, stays so; False: it has changed, read again."""
        now = self._store.clock.now()
        if seen.holder is not None and seen.may_live_again:
            return self._store.write_tasks([writes.stay_ended(seen.holder, now=now)]) != [None]
        if not seen.may_come:
            return True
        in_its_place = replace(  # the caller that acquired the key for it finds that it has gone
            heir,
            task_id=seen.held_by,
            status=Status.DONE,
            depends_on=(),
            waiting_for=frozenset(),
            payload_text=json.dumps({"instead": heir.task_id}),
            finished_at=timestamp(now),
            expire_at=float(int(now + 2 * KEY_SETTLES_S)),
            done_reason=f"the unique key went to {heir.task_id}",
        )
        [answer] = self._store.enqueue([in_its_place])
        if isinstance(answer.error, StoreError):
            raise answer.error
        return answer.created

    def _promise(self, task: Task) -> str:
        """The task as text, so that any caller can put it."""
        stored = self._store.large_texts.put_payload(task)
        if isinstance(stored, ThunderAgentError):
            raise stored
        return json.dumps(stored.to_row(), default=sorted, separators=(",", ":"))


def _not_stopping(holder: Task, wanted: Task, *, own_id: bool) -> Task:
    """The task that has the key, as the answer to an enqueue; a caller that repeats its own id asks for that very task.

    Raises:
        NotAllowed: the holder was asked to stop and has not ended, so the new work would never run.
    """
    if not holder.is_stopping or (own_id and holder.task_id == wanted.task_id):
        return holder
    again = f", or start it again: client.streams.start({holder.task_id!r})" if holder.is_stream else ""
    raise NotAllowed(
        f"the unique key {wanted.unique_key!r} of {wanted.job!r} is held by the task {holder.task_id!r}, which was "
        f"asked to stop and is still {holder.status}: wait for its end, client.wait({holder.task_id!r}), and enqueue "
        f"then{again}"
    )


def _row_id(task: Task) -> str:
    return key_id(task.job, task.unique_key or "")


def _under(task: Task, task_id: str, shards: int) -> Task:
    """The same task under another id."""
    return replace(task, task_id=task_id, lane=Lane.of(task_id, task.queue, shards))


def _restless(task: Task) -> str:
    return f"the unique key {task.unique_key!r} of {task.job!r} changes hands all the time: try again"


def _broken(row: Row, problem: str) -> StoreError:
    return StoreError(
        f"the row {row['taskId']!r} is not one of a unique key: {problem}. Delete it: the key is free then"
    )


def _end_of(task: Task) -> float:
    return task.finished_at or 0.0
