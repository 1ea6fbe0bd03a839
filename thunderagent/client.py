"""The client: applications enqueue tasks with it and look after them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, cast, overload

from thunderagent.jobs.job import Job
from thunderagent.model.arguments import check, choice_problem, iterated, seconds_problem, shown, whole_problem
from thunderagent.model.errors import NotAllowed, WaitTimeout
from thunderagent.model.pacing import wait_delays
from thunderagent.model.task import TERMINAL, Candidate, Lane, Status, Task
from thunderagent.model.writes.unique import KEY_SETTLES_S
from thunderagent.queue.commands import Commands
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.enqueue import BulkOptions, EnqueueOptions, NewTask, check_names
from thunderagent.queue.limits.waitlist import open_waitlists, waitlist_value
from thunderagent.queue.stats import QueueStats, queue_stats
from thunderagent.queue.unique import UniqueKeys
from thunderagent.settings import Settings, load_settings
from thunderagent.stores import open_store
from thunderagent.stores.tasks import Enqueued, TaskStore
from thunderagent.telemetry.traces import enqueuing

if TYPE_CHECKING:  # a client that only enqueues begins sooner without
    from thunderagent.queue.pause_commands import AgentCommands, PauseCommands
    from thunderagent.queue.schedules.commands import ScheduleCommands
    from thunderagent.queue.stream_commands import StreamCommands

P = TypeVar("P")

BULK: Final = 500
"""Tasks that `enqueue_many` puts in one call."""


class Client(Commands):
    """Enqueues tasks, looks them up and changes them. Safe in threads.

    Commands on schedules, pauses, agents and streams are at `schedules`, `pauses`, `agents` and `streams`.

    Args:
        store: where the tasks are.
        settings: defaults of new tasks.
        on_enqueue: called after each enqueue, and after each batch of many, such as `agent.wake` of an agent in the
            same process; it must not raise.
        doorbell: notifies agents in other processes; `close` closes it.
    """

    def __init__(
        self,
        store: TaskStore,
        settings: Settings,
        *,
        on_enqueue: Callable[[], None] | None = None,
        doorbell: Doorbell | None = None,
    ) -> None:
        super().__init__(store, settings, DoorbellSender(doorbell, on_enqueue))

    @cached_property
    def schedules(self) -> ScheduleCommands:
        """Schedules of periodic jobs: list them, run one now, pause and resume."""
        from thunderagent.queue.schedules.commands import ScheduleCommands

        return ScheduleCommands(self.store, self.settings, self._sender, self.cancel)

    @cached_property
    def pauses(self) -> PauseCommands:
        """Pauses of queues, jobs and agents."""
        from thunderagent.queue.pause_commands import PauseCommands

        return PauseCommands(self.store, self._sender)

    @cached_property
    def agents(self) -> AgentCommands:
        """The agents: list them, have one drain."""
        from thunderagent.queue.pause_commands import AgentCommands

        return AgentCommands(self.store, self._sender)

    @cached_property
    def streams(self) -> StreamCommands:
        """Streams: stop one, start it again, see its runs."""
        from thunderagent.queue.stream_commands import StreamCommands

        return StreamCommands(self.store, self.settings, self._enqueuer, self._dependents, self._sender)

    @classmethod
    def from_settings(cls, **overrides: Any) -> Client:
        """A client with the settings of the environment and these overrides.

        Raises:
            ConfigurationError: the settings cannot work.
        """
        settings = load_settings(**overrides)
        store = open_store(settings)
        if settings.region_arbiter is not None:
            from thunderagent.regions.client_gate import behind_client_gate

            store = behind_client_gate(store, settings)
        return cls(store, settings, doorbell=open_doorbell(settings))

    def close(self) -> None:
        """Close the connections of the store and the doorbell."""
        self._sender.close()
        self.store.engine.close()

    # Enqueue

    @overload
    def enqueue(self, job: Job[P], payload: P, **options: Unpack[EnqueueOptions[Task | str]]) -> Task: ...

    @overload
    def enqueue(
        self, job: str, payload: Mapping[str, Any] | None = None, **options: Unpack[EnqueueOptions[Task | str]]
    ) -> Task: ...

    def enqueue(self, job: Job[Any] | str, payload: Any = None, **options: Unpack[EnqueueOptions[Task | str]]) -> Task:
        """Put a task into its queue.

        Args:
            job: a job, whose payload type is checked here; or a name, where the code of the job is elsewhere.
            payload: the input of the handler.
            task_id: idempotency id: the same id, job and payload twice are one task.
            depends_on: parents: existing tasks that must succeed first.
            on_parent_failure: what happens when a parent does not succeed: "fail", "cancel" or "run".
            delay_s: seconds until the task may run.
            run_at: epoch seconds at which the task may run, instead of a delay.
            max_retry: retries after errors of the handler, instead of the job's.
            queue: name of the queue, instead of the job's.
            unique_key: at most one task of this job with this key is open. An open one is returned, whatever the
                payload.
            unique_scope: how long the key is held: "until_done", or "until_start": the next task may be enqueued
                while this one runs.
            limit_key: tasks with this key share `limit`; None: the job's key, else its name.
            limit: how many of them run at once in the whole fleet, instead of the job's.

        Returns:
            the task in the store: the new one, or the one that already has the id or the unique key.

        Raises:
            PayloadInvalid: the payload does not fit the job, or is not JSON data.
            PayloadTooLarge: the payload is over 350 KB and there is no bucket for it.
            DuplicateTask: a task with another job or payload has the id.
            ParentNotFound: a parent does not exist.
            TooManyDependents: too many tasks wait for one parent, or this task waits for too many.
            NotAllowed: the task with the unique key was asked to stop and has not ended: wait for its end.
            ConfigurationError: an option does not exist, or its value is invalid.
            StoreError: the store did not take it.
        """
        check_names("enqueue", options, EnqueueOptions.__annotations__)
        new = NewTask.of(job, **options)
        with enqueuing(new.name, traces=self.settings.traces) as span:
            task = self._enqueuer.put(new, payload)
            span.attributes["messaging.message.id"] = task.id
        self._sender.tasks([task])
        return task

    def enqueue_many(
        self,
        job: Job[P] | str,
        payloads: Iterable[P] | Iterable[Mapping[str, Any]],
        *,
        task_ids: Iterable[str] | None = None,
        on_progress: Callable[[int], None] | None = None,
        **options: Unpack[BulkOptions[Task | str]],
    ) -> list[Enqueued]:
        """Put many tasks of one job into its queue, in batches.

        Args:
            job: as for `enqueue`.
            payloads: one for each task; read as needed.
            task_ids: an idempotency id for each; None: random ids, which are faster.
            on_progress: called after each batch with the number of tasks so far.
            options: as for `enqueue`, the same for all tasks: depends_on, on_parent_failure, delay_s, run_at,
                max_retry, queue, limit_key and limit.

        Returns:
            one outcome for each payload, in order; an `error` concerns that task alone.
        """
        check_names("enqueue_many", options, BulkOptions.__annotations__)
        new = NewTask.of(job, **options)
        if on_progress is not None and not callable(on_progress):
            check(f"on_progress is {shown(on_progress)}; use a function that takes the number of tasks")
        pairs = _pairs(payloads, task_ids)
        outcomes: list[Enqueued] = []
        while batch := list(itertools.islice(pairs, BULK)):
            with enqueuing(new.name, traces=self.settings.traces, number=len(batch)):
                put = self._enqueuer.put_many(new, batch, fresh=task_ids is None)
            outcomes += put
            self._sender.tasks(one.task for one in put if one.error is None)
            if on_progress:
                on_progress(len(outcomes))
        return outcomes

    # Look

    def wait(self, task_id: str | Task, *, timeout_s: float = 300.0) -> Task:
        """Wait until a task has ended: SUCCESS, FAILED, or DONE, which is closed on purpose.

        Raises:
            WaitTimeout: it has not ended in time, and goes on.
            TaskNotFound: there is none.
        """
        check(seconds_problem("timeout_s", timeout_s, most=math.inf))
        until = time.monotonic() + timeout_s
        for delay in wait_delays():
            task = self.get(task_id)
            left = until - time.monotonic()
            if task.status.is_terminal:
                return task
            if left <= 0:
                break
            time.sleep(min(delay, left))
        raise _late(task, timeout_s)

    async def wait_async(self, task_id: str | Task, *, timeout_s: float = 300.0) -> Task:
        """As `wait`, for coroutines; the store is read in a thread."""
        check(seconds_problem("timeout_s", timeout_s, most=math.inf))
        until = time.monotonic() + timeout_s
        for delay in wait_delays():
            task = await asyncio.to_thread(self.get, task_id)
            left = until - time.monotonic()
            if task.status.is_terminal:
                return task
            if left <= 0:
                break
            await asyncio.sleep(min(delay, left))
        raise _late(task, timeout_s)

    def list(
        self,
        *,
        status: Status | str | None = None,
        queue: str | None = None,
        newest_first: bool = True,
        limit: int | None = 100,
    ) -> Iterator[Task]:
        """Tasks in the order of `created_at`, read page by page as they are asked for.

        Args:
            status: only this one; None: all. DONE tasks were closed on purpose.
            queue: only this one; None: all.
            newest_first: or oldest first.
            limit: most tasks; None: all.

        Raises:
            ConfigurationError: an argument is invalid.
        """
        _check_listing(status, queue, limit)
        wanted = list(Status) if status is None else [Status(status)]
        lanes = [lane for lane in self.store.engine.lanes() if queue is None or lane.queue == queue]
        values = [lane.value(one) for one in wanted for lane in lanes]
        if Status.BLOCKED in wanted:
            values += [waitlist_value(lane, key) for key in open_waitlists(self.store) for lane in lanes]
        streams = [self._entries(value, newest_first) for value in values]
        merged = heapq.merge(*streams, key=lambda entry: entry.created_at, reverse=newest_first)
        return itertools.islice(self._whole(merged, min(limit or 100, 100)), limit)

    def stats(self) -> Sequence[QueueStats]:
        """Every queue in numbers: exact on SQLite, up to 10,000 on DynamoDB; see `QueueStats.at_least`."""
        return queue_stats(self.store)

    # Change

    def purge(
        self, status: Status | str, *, queue: str | None = None, older_than_s: float = 0.0, limit: int | None = None
    ) -> int:
        """Delete ended tasks of a status, with their texts and the rows of their unique keys.

        Tasks with a unique key stay for a minute after their end: a task with the same id may be on its way.

        Args:
            status: SUCCESS, FAILED, or DONE (closed on purpose).
            queue: only of this queue.
            older_than_s: least seconds since their end.
            limit: most tasks.

        Returns:
            the number of deleted tasks.

        Raises:
            NotAllowed: tasks of this status have not ended.
            ConfigurationError: an argument is invalid.
        """
        _check_listing(status, queue, limit)
        check(choice_problem("status", status, Status), seconds_problem("older_than_s", older_than_s))
        if Status(status) not in TERMINAL:
            raise NotAllowed(f"{status} tasks have not ended: cancel them first")
        now = self.store.clock.now()
        before = now - older_than_s
        deleted = 0
        tasks = (
            task
            for task in self.list(status=status, queue=queue, newest_first=False, limit=None)
            if (task.finished_at or 0.0) <= (before if task.unique_key is None else min(before, now - KEY_SETTLES_S))
        )
        while limit is None or deleted < limit:
            size = 100 if limit is None else min(100, limit - deleted)
            batch = list(itertools.islice(tasks, size))
            if not batch:
                break
            before = self.store.clock.leases.now()
            gone = self.store.engine.delete([task.to_row() for task in batch])
            UniqueKeys(self.store).forget(
                (task for task, is_gone in zip(batch, gone, strict=True) if is_gone), now=before
            )
            deleted += sum(gone)
        return deleted

    # Inside

    def _entries(self, status_value: str, newest_first: bool) -> Iterator[Candidate]:
        after = None
        while True:
            page = self.store.engine.page(status_value, limit=100, after=after, newest_first=newest_first)
            yield from page.entries
            after = page.after
            if after is None:
                return

    def _whole(self, entries: Iterator[Candidate], size: int) -> Iterator[Task]:
        while batch := list(itertools.islice(entries, size)):
            tasks = self.store.get(entry.task_id for entry in batch)
            for entry in batch:
                task = tasks.get(entry.task_id)
                if task is not None and task.status_value == entry.status_value:
                    yield task


def _pairs(payloads: Any, task_ids: Any) -> Iterator[tuple[Any, str | None]]:
    """Each payload with its id."""
    values = iterated("payloads", payloads)
    if task_ids is None:
        return ((one, None) for one in values)
    return _zipped(values, iterated("task_ids", task_ids))


def _zipped(payloads: Iterable[Any], task_ids: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    missing = object()
    for number, (payload, task_id) in enumerate(itertools.zip_longest(payloads, task_ids, fillvalue=missing)):
        if payload is missing or task_id is missing:
            fewer = "payloads" if payload is missing else "task_ids"
            check(f"{fewer} has only {number} members: give one id for each payload; those before it may be put")
        yield payload, "" if task_id is None else task_id  # with a random id the caller would not find the task again


def _check_listing(status: object, queue: object, limit: object) -> None:
    check(
        None if status is None else choice_problem("status", status, Status),
        None if limit is None else whole_problem("limit", limit, least=0, most=sys.maxsize),
    )
    if queue is not None:
        Lane(cast(str, queue))


def _late(task: Task, timeout_s: float) -> WaitTimeout:
    return WaitTimeout(f"the task {task.task_id!r} is still {task.status} after {timeout_s:g} s; it goes on")
