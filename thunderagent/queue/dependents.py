"""Settles the tasks that wait for a task when it has ended, all the way down the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thunderagent.model import queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.dependencies import Verdict, reason, verdict
from thunderagent.model.errors import StoreRejected
from thunderagent.model.rows import Unreadable
from thunderagent.model.task import Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.unique import UniqueKeys
from thunderagent.stores.tasks import TaskStore

AT_ONCE = 99
"""Children read and written in one call to the store, together with the parent."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A task that has ended, and the tasks that wait for it."""

    task_id: str
    status: Status | None
    dependents: frozenset[str]


class Dependents:
    """Settles children after their parents. Every step may be repeated: the writes are conditional."""

    def __init__(self, store: TaskStore, bus: EventBus, *, keep_success_s: float, keep_failed_s: float) -> None:
        self._store = store
        self._bus = bus
        self._keys = UniqueKeys(store)
        self.keep_failed_s = keep_failed_s
        self._keep = {Status.DONE: keep_success_s, Status.FAILED: keep_failed_s}

    def rejected(self, write: Write, error: StoreRejected) -> None:
        """Report that the store refuses the write of one task; the others go on."""
        self._bus.emit(queue_events.WriteRejected(task_id=write.task_id, verb=write.verb, error=str(error)))

    def tell(self, ended: Sequence[Ended]) -> None:
        """Settle the children of tasks that have ended, and their children in turn.

        Children of a parent that was retried meanwhile wait for its next end.

        Raises:
            StoreError: the store did not answer. What is undone is found by the sweep.
        """
        open_ends = [one for one in ended if one.dependents]
        while open_ends:
            parent = open_ends.pop()
            ids = sorted(parent.dependents)
            for start in range(0, len(ids), AT_ONCE):
                rows = self._store.peek([parent.task_id, *ids[start : start + AT_ONCE]])
                now = rows.pop(parent.task_id, None)
                status = parent.status if now is None else now.status
                open_ends += self.judge(list(rows.values()), {parent.task_id: status})

    def ended(self, task: Task) -> None:
        """Follow the end of a task that no agent ran: keep its texts, settle its children, release its key."""
        self._store.large_texts.outlive_all([task], now=self._store.clock.now())
        self.tell([Ended(task.task_id, task.status, task.dependents)])
        self._keys.release([task])

    def judge(self, children: Sequence[Task], parents: Mapping[str, Status | None]) -> list[Ended]:
        """Settle children by the status of their parents, and return those that have ended by it."""
        done: list[tuple[Task, str]] = []
        doomed: list[tuple[Task, Status, str]] = []
        for child in children:
            if child.status is not Status.BLOCKED:
                continue
            for parent_id in sorted(child.waiting_for & parents.keys()):
                match verdict(parents[parent_id], child.on_parent_failure):
                    case Verdict.GO:
                        done.append((child, parent_id))
                    case Verdict.FAIL:
                        doomed.append((child, Status.FAILED, reason(parent_id, parents[parent_id])))
                        break
                    case Verdict.CANCEL:
                        doomed.append((child, Status.DONE, reason(parent_id, parents[parent_id])))
                        break
        self._go(done, [child for child in children if _is_ready(child)])
        return self._doom(doomed)

    def _go(self, done: Sequence[tuple[Task, str]], ready: Sequence[Task]) -> None:
        """Take parents off the lists; a child without any goes to its queue."""
        now = self._store.clock.now()
        batch = [writes.parent_done(child, parent_id) for child, parent_id in done]
        left = self._store.write_tasks(batch, rejected=self.rejected) if done else []
        last = {
            task.task_id: (task, parent_id)
            for task, (_, parent_id) in zip(left, done, strict=True)
            if task is not None and not task.waiting_for
        }
        last |= {task.task_id: (task, "") for task in ready if task.task_id not in last}
        if not last:
            return
        batch = [writes.unpark(task, now=now, due=task.created_at) for task, _ in last.values()]
        for task, (_, parent_id) in zip(
            self._store.write_tasks(batch, rejected=self.rejected), last.values(), strict=True
        ):
            if task is not None:
                self._bus.emit(queue_events.ChildUnparked(task_id=task.task_id, parent_id=parent_id, queue=task.queue))

    def _doom(self, doomed: Sequence[tuple[Task, Status, str]]) -> list[Ended]:
        if not doomed:
            return []
        now = self._store.clock.now()
        batch = [
            writes.doom(child, status=status, reason=why, now=now, expire_at=now + self._keep[status])
            for child, status, why in doomed
        ]
        ended = []
        tasks = self._store.write_tasks(batch, rejected=self.rejected)
        self._keys.release(task for task in tasks if task is not None)
        self._store.large_texts.outlive_all((task for task in tasks if task is not None), now=now)
        for task, (_, status, why) in zip(tasks, doomed, strict=True):
            if task is not None:
                self._bus.emit(queue_events.ChildDoomed(task_id=task.task_id, status=status, reason=why))
                ended.append(Ended(task.task_id, task.status, task.dependents))
        return ended


def statuses_of(names: Iterable[str], rows: Mapping[str, Task | Unreadable]) -> dict[str, Status | None]:
    """Status of each parent, None for a lost one. An unreadable parent is left out: children wait for it."""
    found = {name: rows.get(name) for name in names}
    return {name: None if one is None else one.status for name, one in found.items() if not isinstance(one, Unreadable)}


def _is_ready(child: Task) -> bool:
    """Whether it waits neither for a parent nor for a permit of its limit."""
    return child.status is Status.BLOCKED and not child.waiting_for and child.waitlist is None
