"""Commands on single tasks: look it up, cancel it, retry it."""

from __future__ import annotations

from typing import Final

from thunderagent.model.bus import EventBus
from thunderagent.model.errors import NotAllowed, TaskNotFound
from thunderagent.model.task import Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.enqueue import Enqueuer, id_of
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore

TRIES: Final = 5
"""Attempts of a command on a task that changes meanwhile."""


class Commands:
    """Commands on tasks: `Client` has these, and an agent cancels with them.

    Args:
        store: where the tasks are.
        settings: defaults of new tasks.
        sender: notifies the agents.
    """

    def __init__(self, store: TaskStore, settings: Settings, sender: DoorbellSender) -> None:
        self.store = store
        self.settings = settings
        self._sender = sender
        bus = EventBus()
        bus.subscribe(sender.on_event)
        self._dependents = Dependents(
            store,
            bus,
            keep_success_s=settings.keep_success_days * 86400,
            keep_failed_s=settings.keep_failed_days * 86400,
        )
        self._enqueuer = Enqueuer(store, settings, self._dependents)

    def get(self, task_id: str | Task) -> Task:
        """The task as it is now.

        Raises:
            TaskNotFound: there is none, or it has expired.
            TaskUnreadable: this version cannot read its row.
        """
        return current(self.store, task_id)

    def cancel(self, task_id: str | Task) -> Task:
        """Close a waiting task as DONE, on purpose, with its children; ask the agent of a running one to stop it.

        A doorbell reaches the agent at once, else the next heartbeat does; see `ctx.check()`. Cancelling twice is
        harmless.

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
                    self._dependents.ended(after)
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
        after = self._enqueuer.revive(task)
        if after is None:
            raise NotAllowed(f"the task {task.task_id!r} has changed meanwhile: look again")
        self._sender.tasks([after])
        return after


def current(store: TaskStore, task_id: str | Task) -> Task:
    """The task as it is now; errors are those of `Commands.get`."""
    name = id_of(task_id)
    row = store.engine.get([name]).get(name, {})
    [task] = store.large_texts.inflate([Task.from_row(row)]) if "job" in row else [None]
    if task is None or (task.expire_at is not None and task.expire_at < store.clock.earliest()):
        raise TaskNotFound(f"there is no task {name!r} in {store.engine.url}")
    return task
