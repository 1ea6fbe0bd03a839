"""What a client sends to the agents after it has changed something in the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from thunderagent.model import queue_events
from thunderagent.model.bus import Event
from thunderagent.model.task import Status, Task
from thunderagent.queue.doorbell.message import MOST_MESSAGES, DoorbellMessage
from thunderagent.queue.doorbell.port import Doorbell

TASKS_A_LOOK: Final = 10
"""New tasks for which one agent is asked to look into their queue."""


class DoorbellSender:
    """Sends through the doorbell, if there is one. Safe in threads; raises nothing of its own.

    Args:
        bell: reaches agents in other processes.
        wake: called beside it, for an agent in this process.
    """

    def __init__(self, bell: Doorbell | None, wake: Callable[[], None] | None = None) -> None:
        self._bell = bell
        self._wake = wake

    def tasks(self, tasks: Iterable[Task]) -> None:
        """Announce tasks that wait in their queues: a few by id, many by asking for a look into each queue."""
        self.wake()
        if self._bell is None:
            return
        waiting = [task for task in tasks if task.status is Status.PENDING]
        if len(waiting) <= MOST_MESSAGES:
            self._send([DoorbellMessage.task(task) for task in waiting])
            return
        due: defaultdict[str, list[float]] = defaultdict(list)
        for task in waiting:
            due[task.queue].append(task.created_at)
        looks = list[DoorbellMessage]()
        for queue, moments in due.items():
            agents = 1 if self._bell.is_local else min(MOST_MESSAGES, len(moments) // TASKS_A_LOOK)
            looks += [DoorbellMessage.look(queue, min(moments))] * agents
        self._send(looks)

    def wake(self) -> None:
        """Wake the agent in this process, if there is one."""
        if self._wake is not None:
            self._wake()

    def looks(self, queues: Iterable[str]) -> None:
        self._send([DoorbellMessage.look(queue) for queue in queues])

    def beat(self, task: Task) -> None:
        """Have the agent that runs a task renew its lease, and so read its row, at once."""
        if task.status is Status.RUNNING and task.lease_owner:
            self._send([DoorbellMessage.beat(task.task_id, task.lease_owner)])

    def on_event(self, event: Event) -> None:
        """Announce a task that has left BLOCKED for its queue."""
        if isinstance(event, queue_events.ChildUnparked) and event.queue:
            self.looks([event.queue])

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()

    def _send(self, messages: list[DoorbellMessage]) -> None:
        if self._bell is not None and messages:
            self._bell.ring(messages)
