"""Commands on single tasks: look it up, cancel it, retry it, stop and start a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from thunderagent.model.arguments import check, is_storable, seconds_problem, shown, whole_problem
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.dependencies import OnParentFailure
from thunderagent.model.errors import NotAllowed, TaskNotFound, TextGone
from thunderagent.model.pacing import wait_delays
from thunderagent.model.rows import Unreadable
from thunderagent.model.task import Desired, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents, Ended, statuses_of
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.enqueue import Enqueuer
from thunderagent.queue.unique import UniqueKeys
from thunderagent.settings import Settings
from thunderagent.stores.large_texts import LEFT_S
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.journal import Run, read_journals

MOST_RUNS: Final = 10_000
"""Runs of a stream that are asked for at once."""

TRIES: Final = 5
"""How often a command is tried on a task that changes under it."""


class Commands:
    """What changes the fate of a task. `Client` has these beside enqueue and wait."""

    def __init__(
        self,
        store: TaskStore,
        settings: Settings,
        *,
        on_enqueue: Callable[[], None] | None = None,
        doorbell: Doorbell | None = None,
    ) -> None:
        """Make a client.

        Args:
            store: where the tasks are.
            settings: defaults of new tasks.
            on_enqueue: called after each enqueue, for example `agent.wake` of an agent in the same process.
            doorbell: tells agents in other processes; `close` closes it.
        """
        self.store = store
        self.settings = settings
        self._on_enqueue = on_enqueue
        self._sender = DoorbellSender(doorbell)
        bus = EventBus()
        bus.subscribe(self._sender.on_event)
        self._dependents = Dependents(
            store,
            bus,
            keep_success_s=settings.keep_success_days * 86400,
            keep_failed_s=settings.keep_failed_days * 86400,
        )
        self._enqueuer = Enqueuer(store, settings, self._dependents)
        self._keys = UniqueKeys(store)

    def get(self, task_id: str | Task) -> Task:
        """The task as it is now.

        Raises:
            TaskNotFound: there is none, or its time to live is over.
            TaskUnreadable: this version cannot read its row.
        """
        name = id_of(task_id)
        row = self.store.engine.get([name]).get(name, {})
        [task] = self.store.large_texts.inflate([Task.from_row(row)]) if "job" in row else [None]
        if task is None or (task.expire_at is not None and task.expire_at < self.store.clock.earliest()):
            raise TaskNotFound(f"there is no task {name!r} in {self.store.engine.url}")
        return task

    def cancel(self, task_id: str | Task) -> Task:
        """Close a task that waits as DONE, with its children; ask the agent of a running one to stop it.

        A running handler is told at once where a doorbell reaches its agent, else with the next heartbeat, see
        `ctx.check()`. Cancelling twice is harmless.

        Raises:
            NotAllowed: it has ended already.
            TaskNotFound: there is none.
        """
        for _ in range(TRIES):
            task, now = self.get(task_id), self.store.clock.now()
            if task.status is Status.DONE or (task.status is Status.RUNNING and task.cancel_requested):
                self._sender.beat(task)
                return task
            if task.status.is_terminal:
                raise NotAllowed(f"the task {task.task_id!r} has ended as {task.status}: nothing is left to cancel")
            if task.status is Status.RUNNING:
                write = writes.request_cancel(task, now=now)
            else:
                expire_at = now + self.settings.keep_success_days * 86400
                write = writes.cancel_waiting(task, reason="cancelled", now=now, expire_at=expire_at)
            [after] = self.store.write_tasks([write])
            if after is not None:
                if after.status.is_terminal:
                    self._ended(after)
                self._sender.beat(after)
                return after
        raise NotAllowed(f"the task {id_of(task_id)!r} changes all the time: try again")

    def retry(self, task_id: str | Task) -> Task:
        """Put a FAILED or DONE task back into its queue with fresh retries; its history of errors stays.

        A task whose parents have not all succeeded waits for those that are open.

        Raises:
            NotAllowed: its status is another, a parent has not succeeded (retry that first), another task has its
                unique key, or its payload is gone (enqueue it once more with the same id and payload first).
            TaskNotFound: there is none.
        """
        task = self.get(task_id)
        if task.status not in (Status.FAILED, Status.DONE):
            raise NotAllowed(f"the task {task.task_id!r} is {task.status}: only FAILED and DONE can be retried")
        after = self._revive(task)
        if after is None:
            raise NotAllowed(f"the task {task.task_id!r} was changed by somebody else: look again")
        return after

    def _revive(self, task: Task) -> Task | None:
        if isinstance(task.payload_error, TextGone):
            raise NotAllowed(f"the task {task.task_id!r} cannot be retried now: {task.payload_error}")
        waiting_for = self._open_parents(task)
        now = self.store.clock.now()
        self.store.large_texts.outlive(task, now + LEFT_S, now=now)
        self._keys.retake(task)
        [after] = self.store.write_tasks([writes.revive(task, now=self.store.clock.now(), waiting_for=waiting_for)])
        if after is not None:
            after = self._enqueuer.introduce([after])[0] if after.status is Status.BLOCKED else after
            self._enqueued(after)
        return after

    # Streams

    def stop(self, task_id: str | Task) -> Task:
        """Stop a stream: its agent is told with the next heartbeat, saves the cursor and closes it as DONE.

        Stopping twice is harmless. A stopped stream is kept as long as a FAILED task, and goes on where it stopped.

        Raises:
            NotAllowed: it has ended otherwise, or is no stream.
            TaskNotFound: there is none.
        """
        for _ in range(TRIES):
            task, now = self.get(task_id), self.store.clock.now()
            if task.desired_state == Desired.STOPPED and task.status in (Status.RUNNING, Status.DONE):
                self._sender.beat(task)
                return task
            if not task.is_stream and task.status is not Status.PENDING:
                raise NotAllowed(f"the task {task.task_id!r} is no stream: cancel it")
            if task.status.is_terminal:
                raise NotAllowed(f"the stream {task.task_id!r} has ended as {task.status}: nothing is left to stop")
            if task.status is Status.RUNNING:
                write: Write = writes.request_stop(task, now=now)
            else:
                expire_at = now + self.settings.keep_failed_days * 86400
                write = writes.stop_waiting(task, now=now, expire_at=expire_at)
            [after] = self.store.write_tasks([write])
            if after is not None:
                if after.status.is_terminal:
                    self._ended(after)
                self._sender.beat(after)
                return after
        raise NotAllowed(f"the task {id_of(task_id)!r} changes all the time: try again")

    def start(self, task_id: str | Task, *, timeout_s: float = 30.0) -> Task:
        """Start a stream that was stopped, or has failed, where its cursor is.

        A stream that its agent is about to stop is waited for; one that runs or is queued is left as it is.

        Raises:
            NotAllowed: it is no stream, or its agent has not stopped it within the time.
            TaskNotFound: there is none.
        """
        check(seconds_problem("timeout_s", timeout_s))
        until = time.monotonic() + timeout_s
        for delay in wait_delays():
            task = self.get(task_id)
            if not task.is_stream and task.desired_state is None:
                raise NotAllowed(f"the task {task.task_id!r} is no stream: use retry")
            after: Task | None = task
            if task.status in (Status.FAILED, Status.DONE):
                after = self._revive(task)
            elif task.cancel_requested:
                after = None  # its agent is about to close it
            elif task.desired_state == Desired.STOPPED:
                write = writes.request_start(task, now=self.store.clock.now())
                [after] = self.store.write_tasks([write]) if task.status is not Status.RUNNING else [None]
                self._enqueued(*(one for one in (after,) if one is not None))
            if after is not None:
                return after
            if time.monotonic() >= until:
                break
            time.sleep(delay)
        raise NotAllowed(
            f"the stream {task.task_id!r} was told to stop and still runs after {timeout_s:g} s: try again"
        )

    def runs(self, task_id: str | Task, *, number: int = 10) -> Sequence[Run]:
        """What happened to a stream: its last runs, oldest first, each with its moves and its gaps.

        Raises:
            TaskNotFound: there is none.
        """
        check(whole_problem("number", number, least=0, most=MOST_RUNS))
        return read_journals(self.store, self.get(task_id), runs=number)

    # Inside

    def _ended(self, task: Task) -> None:
        self.store.large_texts.outlive_all([task], now=self.store.clock.now())
        self._dependents.tell([Ended(task.task_id, task.status, task.dependents)])
        self._keys.release([task])

    def _enqueued(self, *tasks: Task) -> None:
        if self._on_enqueue:
            self._on_enqueue()
        self._sender.tasks(tasks)

    def _open_parents(self, task: Task) -> frozenset[str]:
        if not task.depends_on:
            return frozenset()
        parents = self.store.read(task.depends_on)
        statuses = statuses_of(task.depends_on, parents)
        for name in task.depends_on if task.on_parent_failure != OnParentFailure.RUN else ():
            status = statuses.get(name, Status.BLOCKED)  # one that cannot be read is waited for
            if status is None or status in (Status.FAILED, Status.DONE):
                what = f"is {status}" if status else "no longer exists"
                raise NotAllowed(f"the task {task.task_id!r} depends on {name!r}, which {what}: retry that first")
        return frozenset(
            name for name, one in parents.items() if isinstance(one, Unreadable) or not one.status.is_terminal
        )


def id_of(task: str | Task) -> str:
    """The id of a task, given it or its id.

    Raises:
        ConfigurationError: it is neither.
    """
    name = task.task_id if isinstance(task, Task) else task
    if not isinstance(name, str) or not is_storable(name):
        check(f"{shown(task)} is no task: give its id as a text, or the Task")
    return name
