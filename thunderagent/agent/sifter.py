"""What an agent does not even claim: tasks on the ready page for which no slot of their limit is free.

One write puts such a task into its line, where a claim, a refusal and a step back would take three. Only of what is
sure: the limit of a job, of which this agent has just seen that all slots are taken, or has them itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from thunderagent.jobs.job import Limit
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import StoreRejected
from thunderagent.model.pacing import LINE_TRIED_S
from thunderagent.model.task import Candidate, Task, read_task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import limit_id
from thunderagent.queue.limits.lines import keep_line_open
from thunderagent.queue.limits.slots import Slots, job_limit
from thunderagent.stores.tasks import TaskStore, Wanted, passed_over

REMEMBERED: Final = 2000
"""Tasks of which is remembered that they were put into a line, or have another limit than their job."""


class Sifter:
    """Sifts the candidates of one agent. Called in the agent's loop."""

    def __init__(self, store: TaskStore, jobs: Registry, slots: Slots, bus: EventBus) -> None:
        self._store = store
        self._bus = bus
        self._slots = slots
        self._limits = {name: limit for name, job in jobs.by_value.items() if (limit := job_limit(job)) is not None}
        self._gone: dict[tuple[str, float], float] = {}
        self._others: dict[str, None] = {}
        self.moved: list[tuple[Limit, Task]] = []
        """Tasks that came to stand in line since somebody last looked."""

    def sift(self, found: Sequence[Wanted]) -> tuple[list[Wanted], bool]:
        """Of the candidates of one look those to claim, and whether others wait for the next look.

        Raises:
            StoreError: the store did not answer.
        """
        if not self._limits:
            return list(found), False
        edge = self._store.monotonic() - LINE_TRIED_S
        kept, waiting = list[Wanted](), list[tuple[Limit, Candidate]]()
        promised, left = Counter[str](), False
        for one in found:
            task_id, limit = one.candidate.task_id, self._limits.get(one.candidate.job)
            if limit is None or task_id in self._others:
                kept.append(one)
            elif self._gone.get((task_id, one.candidate.created_at), edge) > edge:
                continue  # the index shows it for a while
            elif self._slots.is_full(limit):
                waiting.append((limit, one.candidate))
            elif promised[limit.key] < limit.number:
                promised[limit.key] += 1
                kept.append(one)
            else:
                left = True  # whether there is a slot for it shows in a moment
        if waiting:
            self._move(waiting)
        return kept, left or bool(waiting)

    def _move(self, waiting: Sequence[tuple[Limit, Candidate]]) -> None:
        """Put tasks into their lines."""
        closed = set[Limit]()
        for limit in dict.fromkeys(limit for limit, _ in waiting):
            try:
                keep_line_open(self._store, limit, self._slots.seen(limit.key))
            except StoreRejected as error:  # its tasks stay where they are, for a while
                closed.add(limit)
                self._bus.emit(events.WriteRejected(task_id=limit_id(limit.key), verb="open line", error=str(error)))
        for limit, one in waiting:
            if limit in closed:
                self._leave_alone(one)
        waiting = [(limit, one) for limit, one in waiting if limit not in closed]
        now = self._store.clock.now()
        batch = [writes.join_line(one, limit_key=limit.key, now=now) for limit, one in waiting]
        for (limit, one), (won, row) in zip(waiting, self._store.write_rows(batch, rejected=passed_over), strict=True):
            if won and row is not None:
                task = read_task(row)
                if isinstance(task, Task):
                    self.moved.append((limit, task))
                    self._bus.emit(_limited(task, limit))
            if row is not None and row.get("limitKey", limit.key) != limit.key:
                self._others[one.task_id] = None
            else:
                self._leave_alone(one)
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        while len(self._others) > REMEMBERED:
            del self._others[next(iter(self._others))]

    def _leave_alone(self, one: Candidate) -> None:
        """Pass the entry over for a while."""
        self._gone.pop((one.task_id, one.created_at), None)
        self._gone[one.task_id, one.created_at] = self._store.monotonic()


def _limited(task: Task, limit: Limit) -> events.TaskLimited:
    return events.TaskLimited(
        task_id=task.task_id,
        job=task.job,
        queue=task.queue,
        fence=task.fence,
        attempt=task.attempt,
        limit_key=limit.key,
        limit=limit.number,
    )
