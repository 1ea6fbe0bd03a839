"""Counts the queues for the whole fleet: one agent at a time, each minute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import StoreError
from thunderagent.model.fleet_events import BacklogMeasured, QueueMeasured
from thunderagent.model.task import Lane, Status
from thunderagent.regions.gate import Gate
from thunderagent.stores.tasks import TaskStore
from thunderagent.telemetry.metrics import MOST_LABELS

MEASURE_S: Final = 60.0
TURN_S: Final = 55.0
"""Length of one agent's turn, which ends before the agent looks again."""
CAP: Final = 10_000
"""Most ready tasks of a queue that are counted."""


class QueueMeasure:
    """The work of the thread `measure`."""

    def __init__(self, store: TaskStore, bus: EventBus, *, owner: str, gate: Gate | None = None) -> None:
        self._gate = gate or Gate()
        self._store = store
        self._bus = bus
        self._owner = owner

    def look(self) -> None:
        try:
            if self._store.take_turn(self._gate.measure_turn, owner=self._owner, lasts_s=TURN_S):
                ready = 0
                for measured in measure(self._store):
                    self._bus.emit(measured)
                    ready += measured.ready
                # 0 is emitted too, or no machine is ever given back. A region without a grant needs no machines.
                self._bus.emit(BacklogMeasured(ready=ready if self._gate.may_claim else 0))
        except StoreError as error:
            self._bus.emit(events.StoreFailed(during="measuring the queues", error=str(error), next_try_s=MEASURE_S))


def measure(store: TaskStore) -> Iterator[QueueMeasured]:
    """Each queue that ever held a task, by name; no more than metrics tell apart.

    Raises:
        StoreError: the store did not answer.
    """
    queues: dict[str, list[Lane]] = {}
    for lane in store.engine.lanes():
        queues.setdefault(lane.queue, []).append(lane)
    for queue in sorted(queues)[:MOST_LABELS]:
        yield _measure(store, queue, queues[queue])


def _measure(store: TaskStore, queue: str, lanes: list[Lane]) -> QueueMeasured:
    now, ready, oldest = store.clock.now(), 0, None
    for lane in lanes:
        value = lane.value(Status.PENDING)
        found = store.engine.count(value, until=now, most=CAP - ready) if ready < CAP else 0
        ready += found
        if found or ready >= CAP:  # an empty lane needs no second look
            first = [entry.created_at for entry in store.engine.page(value, limit=1, until=now).entries]
            oldest = min([*first, now if oldest is None else oldest])
    return QueueMeasured(
        queue=queue,
        ready=ready,
        oldest_ready_s=max(0.0, now - oldest) if oldest is not None else 0.0,
        is_capped=ready >= CAP,
    )
