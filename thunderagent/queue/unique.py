"""Unique keys: of the tasks with one key, at most one is open.

The row of a key names the task that has it, `heldBy`. Held it is only while that task is open (or, `until_start`, not
yet started): so every end frees it in the same write that ends the task, whoever does that and whatever crashes behind
it. The row itself is taken away a moment later; one that a crash left is passed on to the next task.

The key is taken before its task is put, or brought to life again. Whoever finds a key whose task is not open takes it
only after he has made sure that this task will not be opened behind his back:

* it does not exist: he puts his own under that id. The one who took the key, if he still lives, finds it there. An id
  that a caller chose stays with its own task: the row of the key has the whole of it, and he puts that.
* it has ended, and somebody is about to retry it by hand: it gets a new fence, and the retry is refused.

So a crash between any two writes holds nothing up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from thunderagent.model.arguments import check, choice_problem
from thunderagent.model.conditions import Write
from thunderagent.model.errors import ConfigurationError, DuplicateTask, NotAllowed, StoreError, ThunderAgentError
from thunderagent.model.names import key_problem
from thunderagent.model.pacing import KEY_DOUBT_S, KEY_SETTLES_S
from thunderagent.model.task import Lane, Row, Status, Task, UniqueScope, new_task_id, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes import unique as unique_writes
from thunderagent.model.writes.unique import key_id
from thunderagent.queue.key_rows import KeyRow, end_of, has_key, look_at, promise_of
from thunderagent.stores.large_texts import payload_of
from thunderagent.stores.tasks import Enqueued, TaskStore, passed_over

TRIES: Final = 10
"""How often a key is tried for that changes hands meanwhile."""

OWED: Final = 1000
"""Rows of keys that are to be taken away when the store answers again; more stay until their key is wanted."""


def check_unique(unique_key: str | None, scope: str) -> None:
    """Check what an enqueue asks for.

    Raises:
        ConfigurationError: the key or its scope cannot be one.
    """
    check(choice_problem("unique_scope", scope, UniqueScope))
    if unique_key is None and scope != UniqueScope.UNTIL_DONE:
        raise ConfigurationError(f"unique_scope is {str(scope)!r} and unique_key is missing: say of what")
    if unique_key is not None:
        check(key_problem("unique_key", unique_key))


class _Taken(NamedTuple):
    """The key is ours for this task, by its row as it is then."""

    task: Task
    row: Row


class Keys:
    """The unique keys of a store."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._owed: list[Write] = []

    def put(self, task: Task, put: Callable[[Task], Enqueued], *, own_id: bool, shards: int) -> Task:
        """Put a task with a unique key, unless an open one has the key: the answer is the task that has it.

        Args:
            task: the new task.
            put: puts it if its id is not taken.
            own_id: the caller chose its id, which then names one task for ever.
            shards: of its queue, as its lane depends on its id.

        Raises:
            DuplicateTask: the caller's own id is taken by another task, and that has not the key.
            PayloadTooLarge: its payload cannot be kept.
            NotAllowed: the task that has the key was asked to stop and has not ended, or the key changes hands all the
                time.
            StoreError: the store did not answer, and the same enqueue may be tried again; or the row of the key is
                broken.
        """
        self._store.large_texts.check(payload_of(task), task.payload_text)
        promise = self._promise(task) if own_id else None
        for _ in range(TRIES):
            began = self._store.monotonic()
            taken = self._take(task, put, promise, shards)
            if isinstance(taken, Task):
                return _not_stopping(taken, task, own_id=own_id)
            if taken is None:
                continue
            task, row = taken
            if self._store.monotonic() - began > KEY_DOUBT_S:  # others may have given us up: take it anew
                continue
            answer = put(task)
            if answer.error is not None and not isinstance(answer.error, DuplicateTask):
                raise answer.error  # nobody knows whether it was put: the key waits for it
            if answer.created:
                return answer.task
            if has_key(answer.task, task):
                return _not_stopping(answer.task, task, own_id=own_id)
            if own_id:
                self._try(unique_writes.drop_key(row))
                if answer.error is not None:
                    raise answer.error
                return answer.task
            task = _under(task, new_task_id(), shards)  # somebody put one under this id, and it has ended already
        raise NotAllowed(_restless(task))

    def retake(self, task: Task) -> None:
        """Take the key again for a task that has ended, right before it is brought to life as it was seen here.

        Raises:
            NotAllowed: another task has the key.
            StoreError: the store did not answer, or the row of the key is broken.
        """
        if task.unique_key is None:
            return
        ended_at = end_of(task)
        for _ in range(TRIES):
            ours, row = self._found(task, ended_at=ended_at)
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

    def free(self, tasks: Iterable[Task]) -> None:
        """Take the rows of keys away that these tasks do not hold any more: since they have ended, or have started.

        They are free already, by the state of their tasks: a store that does not answer leaves a row, not a held key.
        Such a row is taken away with the next call.
        """
        owed, self._owed = self._owed, []
        owed += (
            unique_writes.free_key(_row_id(task), task.task_id, over_at=task.finished_at or task.started_at)
            for task in tasks
            if task.unique_key is not None
        )
        if owed:
            try:
                self._store.write_rows(owed, rejected=passed_over)
            except StoreError:
                self._owed = (self._owed + owed)[-OWED:]

    def forget(self, tasks: Iterable[Task], *, now: float) -> None:
        """Take the rows of keys away that still name these tasks, which were deleted. Nothing is written for others.

        Args:
            tasks: those that were deleted.
            now: when they were there for sure, on the shared clock of leases.

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
            self._store.write_rows(batch, rejected=passed_over)

    # Inside

    def _take(
        self, task: Task, put: Callable[[Task], Enqueued], promise: str | None, shards: int
    ) -> _Taken | Task | None:
        """Take the key; the answer may be that another task has it, or that it must be tried again."""
        ours, row = self._found(task, promise=promise)
        if ours:
            return _Taken(task, row)
        seen = look_at(self._store, row, task)
        if seen.holder is not None and seen.is_held:
            return self._store.large_texts.inflate([seen.holder])[0]
        if (other := seen.promised) is not None:
            if not self._pass(seen, other, promise=seen.row["payload"]):
                return None
            answer = put(other)  # as it stands there: whoever promised it has kept its payload
            if answer.error is not None and not isinstance(answer.error, DuplicateTask):
                raise answer.error
            return self._store.large_texts.inflate([answer.task])[0] if has_key(answer.task, task) else None
        if seen.may_come and promise is None:
            return _Taken(_under(task, seen.held_by, shards), seen.row)
        passed = self._pass(seen, task, promise=promise) if self._keep_out(seen, task) else None
        return None if passed is None else _Taken(task, passed)

    def _found(self, task: Task, *, promise: str | None = None, ended_at: float | None = None) -> tuple[bool, Row]:
        now = self._store.clock.leases.now()
        row = unique_writes.key_row(_row_id(task), task.task_id, now=now, promise=promise, ended_at=ended_at)
        return self._store.insert_row(row)

    def _pass(
        self, seen: KeyRow, task: Task, *, promise: str | None = None, ended_at: float | None = None
    ) -> Row | None:
        """The row of the key that has gone to the task; None: it has changed since it was seen."""
        now = self._store.clock.leases.now()
        write = unique_writes.pass_key(seen.row, task.task_id, now=now, promise=promise, ended_at=ended_at)
        [(won, row)] = self._store.write_rows([write])
        return row if won else None

    def _keep_out(self, seen: KeyRow, heir: Task) -> bool:
        """See to it that the task which is not open stays so; False: it has changed, look again."""
        now = self._store.clock.now()
        if seen.holder is not None and seen.may_live_again:
            return self._store.write_tasks([writes.stay_ended(seen.holder, now=now)]) != [None]
        if not seen.may_come:
            return True
        in_its_place = replace(  # whoever took the key for it finds that it has gone
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
        stored = self._store.large_texts.put_payload(task)
        if isinstance(stored, ThunderAgentError):
            raise stored
        return promise_of(stored)

    def _try(self, *batch: Write) -> None:
        if batch:
            with suppress(StoreError):
                self._store.write_rows(batch)


def _not_stopping(holder: Task, wanted: Task, *, own_id: bool) -> Task:
    """The task that has the key, as the answer to an enqueue: unless it is about to end, when the new work would never
    run. With its own id again, the caller asks for that very task.

    Raises:
        NotAllowed: it was asked to stop and has not ended.
    """
    if not holder.is_stopping or (own_id and holder.task_id == wanted.task_id):
        return holder
    again = f", or start it again: client.start({holder.task_id!r})" if holder.is_stream else ""
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
