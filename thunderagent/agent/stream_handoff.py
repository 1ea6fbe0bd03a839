"""Hands live streams to other agents, with a break or without.

With a break (`exclusive=True`): the handler is asked to end, its connection is closed, and one write releases the
stream with its cursor. Without a break, where two connections are fine:

1. We offer: the task goes back to its queue, and we handle its messages under our old fence for a bounded time.
2. The successor claims it, connects, subscribes from the saved cursor and buffers; then it writes that it is ready.
3. We see that, handle what we have read, stop, and write the cursor.
4. The successor handles what comes after that cursor.

Calls of handlers never overlap. Ours stop before our write, at the latest at the end of our time; the successor waits
for either, on the shared clock. If the successor dies, its stream is taken over like that of any lost agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from thunderagent.agent.core import Core
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.stream_balance import Fleet
from thunderagent.jobs.outcome import about
from thunderagent.jobs.running import Running
from thunderagent.model import events, queue_events
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError, StoreRejected, StreamFailed, TaskStopped
from thunderagent.model.task import Handoff, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.settings import LEASE_MARGIN
from thunderagent.streams.context import StreamContext
from thunderagent.streams.journal import read_cursor

HANDOFF_S: Final = 15.0
"""How long we handle a stream after it was offered, while a successor connects."""


class Handoffs:
    """Streams that go from this agent to others, and those that come. Called in the agent's loop.

    Args:
        on_offered: called with a stream that is in its queue again, and still handled here.
        call: runs a function in the thread of the event loop.
    """

    def __init__(
        self,
        core: Core,
        *,
        held: dict[str, Running],
        heartbeat: Heartbeat,
        fleet: Fleet,
        on_offered: Callable[[Running], None],
        call: Callable[[Callable[[], object]], None],
    ) -> None:
        self._store = core.store
        self._bus = core.bus
        self._owner = core.name
        self._held = held
        self._heartbeat = heartbeat
        self._fleet = fleet
        self._guard_s = core.settings.clock_guard_s
        self._on_offered = on_offered
        self._call = call
        self._deadlines: dict[str, float] = {}
        self._ended: list[Running] = []
        self.offered: dict[str, Running] = {}
        """Streams that we still handle, though they are in their queue or with another agent."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is offered and nothing waits for its former holder."""
        return not self.offered and not any(self._waiting())

    # From us

    def leave(self, leaving: Sequence[Running], why: TaskStopped, *, lasts_s: float = HANDOFF_S) -> None:
        """Hand streams to other agents, all at once. Those with a break need no answer of the store.

        Args:
            leaving: streams that we hold.
            why: the reason for handlers with a break.
            lasts_s: longest time for which we handle a stream without a break; 0: all with a break.
        """
        overlapping: list[Running] = []
        for running in leaving:
            if lasts_s > 0 and _can_overlap(running):
                overlapping.append(running)
            else:
                self._break(running, why)
        if overlapping and self._has_others():
            self._offer(overlapping, why, lasts_s)
        else:
            for running in overlapping:
                self._break(running, why)

    def _has_others(self) -> bool:
        """Whether another agent could take an offer; in a deploy the next one has often just begun."""
        try:
            if self._fleet.size == 1:
                self._fleet.learn(self._store.agents())
        except StoreError:
            return False
        return self._fleet.size > 1

    def _break(self, running: Running, why: TaskStopped) -> None:
        if running.settling or running.context.cancelled:
            return
        self._bus.emit(events.StreamHandedOff(**about(running.lease), reason=str(why), overlap=False))
        running.context.stop(why)

    def _offer(self, offering: Sequence[Running], why: TaskStopped, lasts_s: float) -> None:
        clock, sent = self._store.clock, self._store.monotonic()
        now, until = clock.now(), clock.leases.latest() + lasts_s
        deadline = sent + lasts_s * (1.0 - LEASE_MARGIN)
        cursors = [one.context.unsaved_cursor() for one in offering]
        batch = [
            writes.with_cursor(writes.offer(one.lease, now=now, until=until), cursor)
            for one, cursor in zip(offering, cursors, strict=True)
        ]
        for running in offering:
            self._heartbeat.forget(running)  # a refused beat that is under way is no lost lease
        answers = self._store.settle(batch)
        if error := next((answer.error for answer in answers if answer.error), None):
            self._bus.emit(events.StoreFailed(during="handoff", error=str(error), next_try_s=0.0))
        for running, cursor, answer in zip(offering, cursors, answers, strict=True):
            if answer.accepted:
                running.context.cursor_saved(cursor)
                self._heartbeat.watch_until(running, deadline)
                self._deadlines[running.lease.task_id] = deadline
                self.offered[running.lease.task_id] = running
                self._on_offered(running)
                self._bus.emit(events.StreamHandedOff(**about(running.lease), reason=str(why), overlap=True))
                continue
            if answer.error:  # perhaps it was written: end before a successor would begin
                if deadline < running.deadline:
                    self._heartbeat.watch_until(running, deadline)
                self._break(running, why)
            self._heartbeat.watch(running)  # the next beat tells what has become of the lease

    def ended(self, running: Running) -> bool:
        """The handler of a stream has ended; the answer is whether we had offered it."""
        if self.offered.get(running.lease.task_id) is not running:
            return False
        self._heartbeat.forget(running)
        self._ended.append(running)
        return True

    def finish(self) -> None:
        """Stop handling everything that we have offered."""
        for running in self.offered.values():
            self._flush(running)

    def abandon(self) -> None:
        """Forget those that have ended: without a grant of the region nothing can be written."""
        ended, self._ended = self._ended, []
        for running in ended:
            self.offered.pop(running.lease.task_id, None)
            self._deadlines.pop(running.lease.task_id, None)

    # To us

    def _waiting(self) -> list[Running]:
        return [
            one
            for one in list(self._held.values())
            if isinstance(one.context, StreamContext) and one.context.is_on_hold and not one.settling
        ]

    # Both

    def look(self) -> None:
        """Take the next step of each handoff.

        Raises:
            StoreError: the store did not answer; nothing is lost, as every wait has an end of its own.
        """
        now = self._store.monotonic()
        for task_id, running in self.offered.items():
            if now >= self._deadlines[task_id] - 1.0:
                self._flush(running)
        self._write_ended()
        waiting = self._waiting()
        names = [*self.offered, *(one.lease.task_id for one in waiting)]
        rows = self._store.peek(names) if names else {}
        for task_id, running in self.offered.items():
            task = rows.get(task_id)
            if task is None or task.status.is_terminal or task.handoff_state != Handoff.OFFERED:
                self._flush(running)
        self._go_on([(one, task) for one in waiting if (task := _row_of(one, rows)) is not None])

    def _go_on(self, waiting: Sequence[tuple[Running, Task]]) -> None:
        """Write which successors are ready, and release those whose predecessors have stopped."""
        now, over = self._store.clock.now(), self._store.clock.leases.earliest() - self._guard_s
        asked: list[tuple[Running, Write]] = []
        for running, task in waiting:
            context = running.context
            if not is_open(task, self._owner):
                self._release(running, task)
            elif (task.handoff_until or 0.0) <= over:
                asked.append((running, writes.end_handoff(running.lease, now=now)))
            elif task.handoff_state == Handoff.OFFERED and isinstance(context, StreamContext) and context.is_ready:
                asked.append((running, writes.ready(running.lease, now=now)))
        after = self._store.write_tasks([write for _, write in asked], rejected=self._rejected)
        for (running, _), left in zip(asked, after, strict=True):
            if left is not None and not is_open(left, self._owner):
                self._release(running, left)

    def _release(self, running: Running, task: Task) -> None:
        context = running.context
        if isinstance(context, StreamContext):
            try:
                cursor = read_cursor(task)
            except StreamFailed:
                cursor = None  # go on from our own
            self._call(lambda: context.release(cursor))

    def _rejected(self, write: Write, error: StoreRejected) -> None:
        self._bus.emit(queue_events.WriteRejected(task_id=write.task_id, verb=write.verb, error=str(error)))

    def _flush(self, running: Running) -> None:
        context = running.context
        if isinstance(context, StreamContext):
            self._call(context.flush)

    def _write_ended(self) -> None:
        ended, self._ended = self._ended, []
        if not ended:
            return
        now = self._store.clock.now()
        batch = [
            writes.hand_over(one.lease.task_id, owner=self._owner, last_seq=_last(one.context), now=now)
            for one in ended
        ]
        try:
            self._store.write_tasks(batch, rejected=self._rejected)
        except StoreError:
            self._ended += ended
            raise
        for running in ended:
            self.offered.pop(running.lease.task_id, None)
            self._deadlines.pop(running.lease.task_id, None)
            cursor = str(_last(running.context) or "none")
            self._bus.emit(events.StreamHandedOver(**about(running.lease), cursor=cursor))


def is_open(task: Task, owner: str) -> bool:
    """Whether another agent may still handle the messages of this stream."""
    return task.handoff_state in (Handoff.OFFERED, Handoff.READY) and task.handoff_owner != owner


def _can_overlap(running: Running) -> bool:
    context = running.context
    return (
        not running.job.exclusive
        and isinstance(context, StreamContext)
        and context.is_connected
        and not context.is_on_hold
        and not (running.settling or running.lost or context.cancelled)
    )


def _row_of(running: Running, rows: Mapping[str, Task]) -> Task | None:
    task = rows.get(running.lease.task_id)
    return task if task is not None and task.fence == running.lease.fence else None


def _last(context: object) -> dict[str, object] | None:
    cursor = context.cursor if isinstance(context, StreamContext) else None
    return None if cursor is None else cursor.to_map()
