"""Who rings: what a client tells the agents after it has changed something in the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from thunderagent.model import events
from thunderagent.model.events import Event
from thunderagent.model.task import Status, Task
from thunderagent.queue.doorbell.message import MAX_RINGS, Ring
from thunderagent.queue.doorbell.port import Doorbell

A_LOOK: Final = 10
"""Tasks for each agent that is asked to look into a queue."""


class Ringer:
    """Rings at a doorbell, if there is one. Safe in threads; never raises."""

    def __init__(self, bell: Doorbell | None) -> None:
        self._bell = bell

    def tasks(self, tasks: Iterable[Task]) -> None:
        """Tell of tasks that wait in their queues: of a few by id, of many that there is something to look for."""
        if self._bell is None:
            return
        waiting = [task for task in tasks if task.status is Status.PENDING]
        if len(waiting) <= MAX_RINGS:
            self._ring([Ring.task(task) for task in waiting])
            return
        due: defaultdict[str, list[float]] = defaultdict(list)
        for task in waiting:
            due[task.queue].append(task.created_at)
        rings = []
        for queue, moments in due.items():
            agents = 1 if self._bell.is_local else min(MAX_RINGS, len(moments) // A_LOOK)
            rings += [Ring.look(queue, min(moments))] * agents
        self._ring(rings)

    def looks(self, queues: Iterable[str]) -> None:
        """Ask agents to look into queues."""
        self._ring([Ring.look(queue) for queue in queues])

    def beat(self, task: Task) -> None:
        """Let the agent that runs a task learn at once what its row says."""
        if task.status is Status.RUNNING and task.lease_owner:
            self._ring([Ring.beat(task.task_id, task.lease_owner)])

    def listen(self, event: Event) -> None:
        """Tell of a task that has left BLOCKED for its queue."""
        if isinstance(event, events.ChildUnparked) and event.queue:
            self.looks([event.queue])

    def close(self) -> None:
        """Let go of the doorbell."""
        if self._bell is not None:
            self._bell.close()

    def _ring(self, rings: list[Ring]) -> None:
        if self._bell is not None and rings:
            self._bell.ring(rings)
