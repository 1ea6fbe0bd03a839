"""Makes new tasks, puts them into the store, and blocks those that wait for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack

from thunderagent.jobs.job import Job, Limit, limit_problems
from thunderagent.model.arguments import (
    LONGEST_S,
    MOST_RETRIES,
    check,
    choice_problem,
    is_storable,
    iterated,
    seconds_problem,
    shown,
    whole_problem,
)
from thunderagent.model.dependencies import LONGEST_ID, MOST_LINKED, OnParentFailure, linked_bytes, most_dependents
from thunderagent.model.errors import (
    ConfigurationError,
    NotAllowed,
    ParentNotFound,
    PayloadError,
    PayloadInvalid,
    StoreError,
    TextGone,
    TooManyDependents,
)
from thunderagent.model.jsondata import dump_json
from thunderagent.model.names import job_name_problem, meant, wanted_job
from thunderagent.model.rows import Unreadable
from thunderagent.model.task import (
    DEFAULT_QUEUE,
    RESERVED,
    STREAM,
    Desired,
    Lane,
    Status,
    Task,
    UniqueScope,
    new_task_id,
    timestamp,
)
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents, statuses_of
from thunderagent.queue.limits.permits import job_limit
from thunderagent.queue.limits.waitlist import let_out_new, put_on_waitlist
from thunderagent.queue.unique import UniqueKeys, check_unique
from thunderagent.settings import Settings
from thunderagent.stores.large_texts import LEFT_S
from thunderagent.stores.tasks import Enqueued, TaskStore
from thunderagent.telemetry.traces import trace_of_new

Parent = TypeVar("Parent")

LATEST_DUE: Final = 10_000_000_000.0
"""The year 2286: a later due time was given in milliseconds, or is infinite."""


class BulkOptions(TypedDict, Generic[Parent], total=False):
    """Options of `Client.enqueue_many`; `Client.enqueue` explains them."""

    depends_on: Sequence[Parent]
    on_parent_failure: str
    delay_s: float
    run_at: float | None
    max_retry: int | None
    queue: str | None
    limit_key: str | None
    limit: int | None


class EnqueueOptions(BulkOptions[Parent], Generic[Parent], total=False):
    """Options of `Client.enqueue`, which explains them."""

    task_id: str | None
    unique_key: str | None
    unique_scope: str


DEFAULTS: Final[EnqueueOptions[Task | str]] = {
    "task_id": None,
    "depends_on": (),
    "on_parent_failure": OnParentFailure.FAIL,
    "delay_s": 0.0,
    "run_at": None,
    "max_retry": None,
    "queue": None,
    "unique_key": None,
    "unique_scope": UniqueScope.UNTIL_DONE,
    "limit_key": None,
    "limit": None,
}


def check_names(of: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Check that there are such options.

    Raises:
        ConfigurationError: there is none of this name; the error says which may be meant.
    """
    for name in options:
        if name not in known:
            raise ConfigurationError(f"{of} has no option {name!r}{meant(name, known)}")


@dataclass(frozen=True, slots=True)
class NewTask:
    """What an enqueue asks for, beside the payload: every option, and the ids of the parents."""

    job: Job[Any] | str
    options: EnqueueOptions[Task | str]
    parents: tuple[str, ...]

    @classmethod
    def of(cls, job: Job[Any] | str, **given: Unpack[EnqueueOptions[Task | str]]) -> NewTask:
        if not isinstance(job, Job):
            check(job_name_problem(wanted_job(job)[0] if isinstance(job, str) else job))
        options = DEFAULTS | given
        return cls(job, options, _ids(options["depends_on"]))

    @property
    def name_and_version(self) -> tuple[str, int]:
        """Name and version of the job; a name alone is version 1.

        Raises:
            ConfigurationError: the name ends like a version and has none.
        """
        return wanted_job(self.job) if isinstance(self.job, str) else (self.job.name, self.job.version)

    @property
    def name(self) -> str:
        return self.job if isinstance(self.job, str) else self.job.name

    @property
    def number(self) -> int | None:
        """The limit of the job; no row keeps it, as a later version of the job may change it."""
        return None if isinstance(self.job, str) else self.job.limit


class Enqueuer:
    """Puts new tasks into a store."""

    def __init__(self, store: TaskStore, settings: Settings, dependents: Dependents) -> None:
        self._store = store
        self._settings = settings
        self._dependents = dependents
        self._keys = UniqueKeys(store)

    def put(self, new: NewTask, payload: Any) -> Task:
        """Put one task and return the task in the store; errors are those of `Client.enqueue`."""
        _check_options(new)
        task_id = new.options["task_id"]
        task = self._made(new, task_id, payload)
        if task.depends_on:
            [task] = self._waiting([task], task.depends_on)
        if task.unique_key is not None:
            put = partial(self._put, number=new.number)
            task = self._keys.put(task, put, own_id=task_id is not None, shards=self._settings.shards)
        else:
            answer = self._put(task, number=new.number)
            if answer.error:
                raise answer.error
            task = answer.task
        return self.introduce([task])[0] if _is_waiting(task) else task

    def put_many(self, new: NewTask, batch: Sequence[tuple[Any, str | None]], *, fresh: bool) -> list[Enqueued]:
        """Put tasks of one job, each with its payload and id, and return one outcome for each."""
        _check_options(new)
        made: list[tuple[Task, PayloadError | ParentNotFound | TooManyDependents | None]] = []
        for payload, task_id in batch:
            try:
                made.append((self._made(new, task_id, payload), None))
            except PayloadError as error:
                name = new.job if isinstance(new.job, str) else new.job.job_value
                made.append((self._made(replace(new, job=name), None, None), error))
        fit = [task for task, error in made if error is None]
        if new.parents:
            try:
                fit = self._waiting(fit, new.parents)
            except (ParentNotFound, TooManyDependents) as missing:
                fit, made = [], [(task, error or missing) for task, error in made]
        good = put_on_waitlist(self._store, fit, number=new.number)
        enqueued = self._store.enqueue(good, fresh=fresh) if good else []
        created = [answer.task for answer in enqueued if answer.created]
        now = {task.task_id: task for task in let_out_new(self._store, created, number=new.number)}
        whole = [replace(one, task=now.get(one.task.task_id, one.task)) for one in enqueued]
        answers = iter(self._introduced(whole) if new.parents else whole)
        return [next(answers) if error is None else Enqueued(task, created=False, error=error) for task, error in made]

    def introduce(self, children: Sequence[Task]) -> list[Task]:
        """Register BLOCKED tasks with their parents, and follow parents that have ended meanwhile.

        The children are in the store already. A parent that has ended is seen here, and one that ends later notifies
        them. The sweep repairs what a crash in between leaves. Each parent takes one write.

        Returns:
            the tasks after that.

        Raises:
            StoreError: the store did not answer.
        """
        names = frozenset[str]().union(*(child.waiting_for for child in children))
        parents = self._store.read(sorted(names))
        known = [one for one in parents.values() if isinstance(one, Task) and not one.status.is_terminal]
        waiting = {
            parent.task_id: [child.task_id for child in children if parent.task_id in child.waiting_for]
            for parent in known
        }
        known = [
            parent for parent in known if most_dependents(parent, waiting[parent.task_id])
        ]  # of the others the sweep follows the end
        registered = self._store.write_tasks([writes.register_dependent(one, *waiting[one.task_id]) for one in known])
        if ended := [parent.task_id for parent, after in zip(known, registered, strict=True) if after is None]:
            parents = {name: one for name, one in parents.items() if name not in ended} | self._store.read(ended)
        statuses = statuses_of(names, parents)
        over = {name: status for name, status in statuses.items() if status is None or status.is_terminal}
        concerned = [child for child in children if not over.keys().isdisjoint(child.waiting_for)]
        if not concerned:
            return list(children)
        self._dependents.tell(self._dependents.judge(concerned, over))
        now = self._store.get(child.task_id for child in concerned)
        return [now.get(child.task_id, child) for child in children]

    def revive(self, task: Task) -> Task | None:
        """Put a FAILED or DONE task back into its queue with fresh retries; None if it has changed meanwhile.

        Raises:
            NotAllowed: its payload is gone, a parent has not succeeded, or another task has its unique key.
            StoreError: the store did not answer.
        """
        if isinstance(task.payload_error, TextGone):
            raise NotAllowed(f"the task {task.task_id!r} cannot be retried now: {task.payload_error}")
        waiting_for = self._open_parents(task)
        now = self._store.clock.now()
        self._store.large_texts.outlive(task, now + LEFT_S, now=now)
        self._keys.retake(task)
        [after] = self._store.write_tasks([writes.revive(task, now=self._store.clock.now(), waiting_for=waiting_for)])
        return self.introduce([after])[0] if after is not None and after.status is Status.BLOCKED else after

    def _made(self, new: NewTask, task_id: str | None, payload: Any) -> Task:
        """The task to put; its options are checked before, once for a batch."""
        options, now = new.options, self._store.clock.now()
        task_id = new_task_id(now) if task_id is None else task_id
        _check_id(task_id)
        due = now + max(0.0, options["delay_s"]) if options["run_at"] is None else options["run_at"]
        job, max_retry = new.job, options["max_retry"]
        if isinstance(job, str):
            queue, kind = DEFAULT_QUEUE, "batch"
            text = dump_json(payload, f"the payload of {job!r}", PayloadInvalid)
        else:
            queue, kind = job.queue, job.kind
            text = job.dump_payload(payload)
            if max_retry is None:
                max_retry = self._settings.max_retry if job.max_retry is None else job.max_retry
        if options["queue"] is not None:
            queue = options["queue"]
        (name, version), limit = new.name_and_version, _limit(new)
        return Task(
            task_id=task_id,
            status=Status.PENDING,
            lane=Lane.of(task_id, queue, self._settings.shards),
            created_at=timestamp(due),
            submitted_at=timestamp(now),
            job=name,
            version=version,
            kind=kind,
            desired_state=Desired.STARTED if kind == STREAM else None,
            payload_text=text,
            max_retry=max_retry,
            depends_on=new.parents,
            on_parent_failure=options["on_parent_failure"] if new.parents else None,
            unique_key=options["unique_key"],
            unique_scope=options["unique_scope"] if options["unique_key"] is not None else None,
            limit_key=limit.key if limit else None,
            limit_max=options["limit"],
            traceparent=trace_of_new(),
        )

    def _introduced(self, enqueued: Sequence[Enqueued]) -> list[Enqueued]:
        """The outcomes after the children are registered; without an answer of the store the sweep does it."""
        children = [one.task for one in enqueued if one.error is None and _is_waiting(one.task)]
        try:
            now = {task.task_id: task for task in self.introduce(children)} if children else {}
        except StoreError as error:
            names = {child.task_id for child in children}
            return [replace(one, error=error) if one.task.task_id in names else one for one in enqueued]
        return [replace(one, task=now.get(one.task.task_id, one.task)) for one in enqueued]

    def _put(self, task: Task, *, number: int | None = None) -> Enqueued:
        [placed] = put_on_waitlist(self._store, [task], number=number)
        [answer] = self._store.enqueue([placed])
        if not answer.created:
            return answer
        [now] = let_out_new(self._store, [answer.task], number=number)
        return replace(answer, task=now)

    def _open_parents(self, task: Task) -> frozenset[str]:
        if not task.depends_on:
            return frozenset()
        parents = self._store.read(task.depends_on)
        statuses = statuses_of(task.depends_on, parents)
        for name in task.depends_on if task.on_parent_failure != OnParentFailure.RUN else ():
            status = statuses.get(name, Status.BLOCKED)  # one that cannot be read is waited for
            if status is None or status in (Status.FAILED, Status.DONE):
                what = f"is {status}" if status else "no longer exists"
                raise NotAllowed(f"the task {task.task_id!r} depends on {name!r}, which {what}: retry that first")
        return frozenset(
            name for name, one in parents.items() if isinstance(one, Unreadable) or not one.status.is_terminal
        )

    def _waiting(self, tasks: Sequence[Task], depends_on: Sequence[str]) -> list[Task]:
        """The tasks, BLOCKED unless all their parents have succeeded."""
        parents = self._store.read(depends_on)
        if missing := [name for name in depends_on if name not in parents]:
            raise ParentNotFound(f"depends_on names tasks that do not exist: {', '.join(missing)}")
        has_succeeded = {
            name for name, one in parents.items() if isinstance(one, Task) and one.status is Status.SUCCESS
        }
        waiting_for = frozenset(parents.keys() - has_succeeded)
        if linked_bytes(depends_on) + linked_bytes(waiting_for) > MOST_LINKED:
            raise TooManyDependents(
                f"depends_on names {len(depends_on):,} tasks, more than a row has room for ({MOST_LINKED:,} bytes of "
                "ids): let a task in between wait for each part of them"
            )
        if not waiting_for:
            return list(tasks)
        children = [task.task_id for task in tasks]
        for parent in (parents[name] for name in sorted(waiting_for)):
            if isinstance(parent, Task) and not (parent.status.is_terminal or most_dependents(parent, children)):
                raise TooManyDependents(
                    f"{len(parent.dependents):,} tasks wait for {parent.task_id!r}, and its row has no room for "
                    f"{len(children):,} more ({MOST_LINKED:,} bytes of ids): let them wait for tasks in between that "
                    "wait for it, or enqueue them when it has ended"
                )
        return [replace(task, status=Status.BLOCKED, waiting_for=waiting_for) for task in tasks]


def _is_waiting(task: Task) -> bool:
    """Whether the task waits for parents, which must know it."""
    return bool(task.waiting_for) and task.status is Status.BLOCKED


def _check_id(task_id: str) -> None:
    size = len(task_id.encode(errors="replace")) if isinstance(task_id, str) else 0
    if not 1 <= size <= LONGEST_ID or "#" in task_id or task_id.startswith(RESERVED) or not task_id.isprintable():
        raise PayloadInvalid(
            f"{shown(task_id)} cannot be a task_id: use 1 to 512 bytes of printable text, no '#', and none of "
            f"{', '.join(RESERVED)} at its start"
        )


def _limit(new: NewTask) -> Limit | None:
    """The limit of the enqueue, else of the job."""
    job = None if isinstance(new.job, str) else new.job
    key, number = new.options["limit_key"], new.options["limit"]
    of_job = job_limit(job) if job is not None else None
    number = number if number is not None else of_job.number if of_job else None
    if number is None:
        if key is not None:
            raise ConfigurationError("; ".join(limit_problems(None, key)))
        return None
    if key is not None:
        return Limit(key, number)
    if of_job is not None:
        return Limit(of_job.key, number)
    return Limit(new.name_and_version[0], number)


def _check_options(new: NewTask) -> None:
    options = new.options
    run_at, max_retry, limit = options["run_at"], options["max_retry"], options["limit"]
    check(
        choice_problem("on_parent_failure", options["on_parent_failure"], OnParentFailure),
        seconds_problem("delay_s", options["delay_s"], least=-LONGEST_S),
        None if run_at is None else seconds_problem("run_at, in epoch seconds,", run_at, most=LATEST_DUE),
        None if max_retry is None else whole_problem("max_retry", max_retry, least=0, most=MOST_RETRIES),
        *limit_problems(limit, options["limit_key"] if limit is not None else None),
    )
    check_unique(options["unique_key"], options["unique_scope"])


def _ids(depends_on: Sequence[Task | str]) -> tuple[str, ...]:
    parents = [depends_on] if isinstance(depends_on, (str, Task)) else depends_on  # a text is a sequence of letters
    return tuple(dict.fromkeys(map(id_of, iterated("depends_on", parents))))


def id_of(task: str | Task) -> str:
    """The id of a task, given it or its id.

    Raises:
        ConfigurationError: it is neither.
    """
    name = task.task_id if isinstance(task, Task) else task
    if not isinstance(name, str) or not is_storable(name):
        check(f"{shown(task)} is no task: give its id as a text, or the Task")
    return name
