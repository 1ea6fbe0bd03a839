"""The way in: makes new tasks, puts them into the store, and parks those that wait for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from thunderagent import writes
from thunderagent.dependencies import OnParentFailure
from thunderagent.dependents import Dependents
from thunderagent.errors import ConfigurationError, ParentNotFound, PayloadError, PayloadInvalid
from thunderagent.job import Job
from thunderagent.jsondata import dump_json
from thunderagent.settings import Settings
from thunderagent.store import Enqueued, TaskStore
from thunderagent.task import DEFAULT_QUEUE, STREAM, Desired, Lane, Status, Task, new_task_id, timestamp

RESERVED: Final = ("agent:", "turn:", "lanes:", "journal:", "unique:", "limit:", "schedule:", "control:")
"""Rows of our own begin so."""

LATEST_DUE: Final = 10_000_000_000.0
"""The year 2286. A later due time is one in milliseconds, or an infinite delay."""


@dataclass(frozen=True, slots=True)
class NewTask:
    """What an enqueue asks for, beside the payload. See `Client.enqueue`."""

    job: Job[Any] | str
    task_id: str | None = None
    delay_s: float = 0.0
    run_at: float | None = None
    max_retry: int | None = None
    queue: str | None = None
    depends_on: tuple[str, ...] = ()
    on_parent_failure: str = OnParentFailure.FAIL


class Intake:
    """Puts new tasks into a store."""

    def __init__(self, store: TaskStore, settings: Settings, dependents: Dependents) -> None:
        self._store = store
        self._settings = settings
        self._dependents = dependents

    def make(self, new: NewTask, payload: Any) -> Task:
        """The task as it will be put; nothing is written.

        Raises:
            PayloadInvalid: the payload does not fit the job or is not JSON data, or the id cannot be one.
            ConfigurationError: one of the options cannot be what it is.
        """
        now = self._store.clock.now()
        task_id = new.task_id or new_task_id(now)
        _check_id(task_id)
        due = now + max(0.0, new.delay_s) if new.run_at is None else new.run_at
        _check_options(new, due)
        job, max_retry = new.job, new.max_retry
        if isinstance(job, str):
            name, queue, kind = job, DEFAULT_QUEUE, "batch"
            text = dump_json(payload, f"the payload of {job!r}", PayloadInvalid)
        else:
            name, queue, kind = job.name, job.queue, job.kind
            text = job.dump_payload(payload)
            if max_retry is None:
                max_retry = self._settings.max_retry if job.max_retry is None else job.max_retry
        return Task(
            task_id=task_id,
            status=Status.PENDING,
            lane=Lane.of(task_id, new.queue or queue, self._settings.shards),
            created_at=timestamp(due),
            submitted_at=timestamp(now),
            job=name,
            kind=kind,
            desired_state=Desired.STARTED if kind == STREAM else None,
            payload_text=text,
            max_retry=max_retry,
            depends_on=new.depends_on,
            on_parent_failure=new.on_parent_failure if new.depends_on else None,
        )

    def put(self, task: Task) -> Task:
        """Put one task; the answer is the task in the store.

        Raises:
            DuplicateTask: the id is taken by a task with another job or payload.
            ParentNotFound: a parent does not exist.
            StoreError: the store did not take it.
        """
        if task.depends_on:
            task = self._waiting(task)
        [answer] = self._store.enqueue([task])
        if answer.error:
            raise answer.error
        return self.introduce(answer.task) if answer.task.status is Status.BLOCKED else answer.task

    def put_many(self, new: NewTask, batch: Sequence[tuple[Any, str | None]], *, fresh: bool) -> list[Enqueued]:
        """Put tasks of one job, each with its payload and id; one outcome for each."""
        made: list[tuple[Task, PayloadError | None]] = []
        for payload, task_id in batch:
            try:
                made.append((self.make(replace(new, task_id=task_id), payload), None))
            except PayloadError as error:
                name = new.job if isinstance(new.job, str) else new.job.name
                made.append((self.make(replace(new, job=name, task_id=None), None), error))
        good = [task for task, error in made if error is None]
        answers = iter(self._store.enqueue(good, fresh=fresh) if good else ())
        return [next(answers) if error is None else Enqueued(task, created=False, error=error) for task, error in made]

    def introduce(self, child: Task) -> Task:
        """Make a BLOCKED task known to its parents, and act on those that have ended meanwhile.

        The child was put before: a parent that ends before it learns of the child is seen here, one that ends later
        tells the child. What a crash in between leaves undone is found by the sweep.
        """
        parents = self._store.peek(child.waiting_for)
        known = [parent for parent in parents.values() if not parent.status.is_terminal]
        told = self._store.apply([writes.register_dependent(parent, child.task_id) for parent in known])
        if ended := [parent.task_id for parent, after in zip(known, told, strict=True) if after is None]:
            parents |= self._store.peek(ended)
        statuses = {name: parents[name].status if name in parents else None for name in child.waiting_for}
        if all(status is not None and not status.is_terminal for status in statuses.values()):
            return child
        self._dependents.tell(self._dependents.judge([child], statuses))
        return self._store.get([child.task_id]).get(child.task_id, child)

    def _waiting(self, task: Task) -> Task:
        """The task as BLOCKED, unless all its parents have succeeded."""
        parents = self._store.peek(task.depends_on)
        if missing := [name for name in task.depends_on if name not in parents]:
            raise ParentNotFound(f"depends_on names tasks that do not exist: {', '.join(missing)}")
        waiting_for = frozenset(name for name, parent in parents.items() if parent.status is not Status.SUCCESS)
        return replace(task, status=Status.BLOCKED, waiting_for=waiting_for) if waiting_for else task


def _check_id(task_id: str) -> None:
    size = len(task_id.encode(errors="replace"))
    if not 1 <= size <= 512 or "#" in task_id or task_id.startswith(RESERVED) or not task_id.isprintable():
        raise PayloadInvalid(
            f"{task_id!r} cannot be a task_id: use 1 to 512 bytes of printable text, no '#', and none of "
            f"{', '.join(RESERVED)} at its start"
        )


def _check_options(new: NewTask, due: float) -> None:
    if new.on_parent_failure not in set(OnParentFailure):
        raise ConfigurationError(f"on_parent_failure is {new.on_parent_failure!r}; use 'fail', 'cancel' or 'run'")
    if not 0 <= due <= LATEST_DUE:
        raise ConfigurationError(f"the task would be due at {due} epoch seconds; give delay_s and run_at in seconds")
    if new.max_retry is not None and new.max_retry < 0:
        raise ConfigurationError(f"max_retry is {new.max_retry}; it must not be negative")
    if not new.job:
        raise ConfigurationError("the name of the job is empty")
