"""Queues in numbers, at a bounded price: where a counted entry is billed, counts stop at a cap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from thunderagent.model.task import Lane, Status
from thunderagent.queue.limits.waitlist import open_waitlists, waitlist_value
from thunderagent.stores.tasks import AgentInfo, TaskStore

NAMED: Final = 1000
"""Ready entries of a queue that are searched for jobs that no agent has."""

WAITLISTS_COUNTED: Final = 100
"""Waitlists that are counted where counts are capped: each takes a request for each lane."""

LATE_S: Final = 120.0
"""Age at which rows that should be deleted are reported: agents look for them every ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """A queue in numbers."""

    queue: str
    ready: int
    delayed: int
    running: int
    blocked: int
    """Tasks that wait for others, or on the waitlist of a limit."""
    failed: int
    oldest_ready_s: float | None
    agents: int
    """Live agents that serve the queue."""
    unknown_jobs: tuple[str, ...]
    """Jobs of ready tasks that no live agent of the queue has."""
    at_least: tuple[str, ...] = ()
    """Numbers whose count stopped at the cap: so many or more."""

    @property
    def is_capped(self) -> bool:
        return bool(self.at_least)

    def text(self, name: str) -> str:
        """One of the numbers for people, with a plus where the count stopped."""
        return f"{getattr(self, name)}{'+' if name in self.at_least else ''}"


def queue_stats(store: TaskStore) -> list[QueueStats]:
    """Every queue that ever held a task or has an agent.

    Exact on SQLite. On DynamoDB each number stops at 10,000, and tasks on the waitlists of 100 limits are counted.

    Raises:
        StoreError: the store did not answer.
    """
    agents = store.agents()
    lanes: dict[str, list[Lane]] = {}
    for lane in store.engine.lanes():
        lanes.setdefault(lane.queue, []).append(lane)
    for agent in agents:
        for queue in agent.info["queues"]:
            lanes.setdefault(queue, [Lane(queue)])
    most = store.engine.most_counted
    waitlists: list[str] = []
    for key in open_waitlists(store):
        if most is not None and len(waitlists) > WAITLISTS_COUNTED:
            break
        waitlists.append(key)
    return [_stats(store, queue, lanes[queue], agents, waitlists) for queue in sorted(lanes)]


def overdue_text(store: TaskStore) -> str | None:
    """A sentence on rows that should have been deleted; None while all is well.

    Raises:
        StoreError: the store did not answer.
    """
    overdue = store.engine.overdue(store.clock.now())
    if overdue is None or overdue.seconds < LATE_S:
        return None
    number = "1 row is" if overdue.rows == 1 else f"{overdue.rows:,} rows are"
    return f"{number} overdue to be deleted, the first for {overdue.seconds / 3600:.1f} h"


def count_all(store: TaskStore, values: Iterable[str], *, until: float | None = None, so_far: int = 0) -> int:
    """Entries of the index with one of these status values, plus `so_far`, up to the cap of the engine."""
    most, total = store.engine.most_counted, so_far
    for value in values:
        left = None if most is None else most - total
        if left is not None and left <= 0:
            break
        total += store.engine.count(value, until=until, most=left)
    return total


def _stats(
    store: TaskStore, queue: str, lanes: Sequence[Lane], agents: Sequence[AgentInfo], waitlists: Sequence[str]
) -> QueueStats:
    engine, now, most = store.engine, store.clock.now(), store.engine.most_counted
    serving = [agent for agent in agents if queue in agent.info["queues"]]
    jobs = {name for agent in serving for name in agent.info.get("jobs", ())}
    counts = {
        status: count_all(store, (lane.value(status) for lane in lanes))
        for status in (Status.PENDING, Status.RUNNING, Status.BLOCKED, Status.FAILED)
    }
    ready = count_all(store, (lane.value(Status.PENDING) for lane in lanes), until=now)
    keys = waitlists if most is None else waitlists[:WAITLISTS_COUNTED]
    on_waitlists = (waitlist_value(lane, key) for key in keys for lane in lanes)
    blocked = count_all(store, on_waitlists, so_far=counts[Status.BLOCKED])
    numbers = {
        "ready": ready,
        "delayed": counts[Status.PENDING],
        "running": counts[Status.RUNNING],
        "blocked": blocked,
        "failed": counts[Status.FAILED],
    }
    at_least = {name for name, number in numbers.items() if most is not None and number >= most}
    if most is not None and len(waitlists) > WAITLISTS_COUNTED:
        at_least.add("blocked")
    oldest: list[float] = []
    unknown: set[str] = set()
    for lane in lanes:
        page = engine.page(lane.value(Status.PENDING), limit=NAMED, until=now)
        oldest += [entry.created_at for entry in page.entries[:1]]
        unknown.update(entry.job for entry in page.entries if entry.job not in jobs)
    numbers["delayed"] = max(0, counts[Status.PENDING] - ready)
    return QueueStats(
        queue=queue,
        **numbers,
        oldest_ready_s=max(0.0, now - min(oldest)) if oldest else None,
        agents=len(serving),
        unknown_jobs=tuple(sorted(unknown)) if serving else (),
        at_least=tuple(name for name in numbers if name in at_least),
    )
