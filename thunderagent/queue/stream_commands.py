"""Commands on streams: stop one, start it again, see its runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from thunderagent.model.arguments import check, seconds_problem, whole_problem
from thunderagent.model.conditions import Write
from thunderagent.model.errors import NotAllowed
from thunderagent.model.pacing import wait_delays
from thunderagent.model.task import Desired, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.commands import TRIES, current
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.enqueue import Enqueuer, id_of
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.journal import Run, read_journals

MOST_RUNS: Final = 10_000
"""Most runs of a stream in one call."""


class StreamCommands:
    """What `client.streams` does."""

    def __init__(
        self, store: TaskStore, settings: Settings, enqueuer: Enqueuer, dependents: Dependents, sender: DoorbellSender
    ) -> None:
        self._store = store
        self._settings = settings
        self._enqueuer = enqueuer
        self._dependents = dependents
        self._sender = sender

    def stop(self, task_id: str | Task) -> Task:
        """Stop a stream: with the next heartbeat its agent saves the cursor and closes it as DONE, on purpose.

        Stopping twice is harmless. A stopped stream is kept as long as a FAILED task; `start` continues it.

        Raises:
            NotAllowed: it has ended otherwise, or is no stream.
            TaskNotFound: there is none.
        """
        for _ in range(TRIES):
            task, now = current(self._store, task_id), self._store.clock.now()
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
                expire_at = now + self._settings.keep_failed_days * 86400
                write = writes.stop_waiting(task, now=now, expire_at=expire_at)
            [after] = self._store.write_tasks([write])
            if after is not None:
                if after.status.is_terminal:
                    self._dependents.ended(after)
                self._sender.beat(after)
                return after
        raise NotAllowed(f"the task {id_of(task_id)!r} changes all the time: try again")

    def start(self, task_id: str | Task, *, timeout_s: float = 30.0) -> Task:
        """Start a stopped or FAILED stream at its cursor.

        The call waits while its agent is stopping it, and leaves a running or queued stream as it is.

        Raises:
            NotAllowed: it is no stream, or its agent has not stopped it within the time.
            TaskNotFound: there is none.
        """
        check(seconds_problem("timeout_s", timeout_s))
        until = time.monotonic() + timeout_s
        for delay in wait_delays():
            task = current(self._store, task_id)
            if not task.is_stream and task.desired_state is None:
                raise NotAllowed(f"the task {task.task_id!r} is no stream: use retry")
            after: Task | None = task
            if task.status in (Status.FAILED, Status.DONE):
                after = self._enqueuer.revive(task)
            elif task.cancel_requested:
                after = None  # its agent is about to close it
            elif task.desired_state == Desired.STOPPED:
                write = writes.request_start(task, now=self._store.clock.now())
                [after] = self._store.write_tasks([write]) if task.status is not Status.RUNNING else [None]
            if after is not None:
                if after is not task:
                    self._sender.tasks([after])
                return after
            if time.monotonic() >= until:
                break
            time.sleep(delay)
        raise NotAllowed(
            f"the stream {task.task_id!r} was asked to stop and still runs after {timeout_s:g} s: try again"
        )

    def runs(self, task_id: str | Task, *, number: int = 10) -> Sequence[Run]:
        """The last runs of a stream, oldest first, each with its moves and its gaps.

        Raises:
            TaskNotFound: there is none.
        """
        check(whole_problem("number", number, least=0, most=MOST_RUNS))
        return read_journals(self._store, current(self._store, task_id), runs=number)
