"""Queues in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from thunderagent.lines import line_value, open_lines
from thunderagent.store import AgentInfo, TaskStore
from thunderagent.task import Lane, Status

NAMED: Final = 1000
"""Ready entries of a queue that `stats` looks through for jobs that no agent has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """A queue in numbers."""

    queue: str
    ready: int
    delayed: int
    running: int
    blocked: int
    """Tasks that wait for others, or stand in the line of a limit."""
    failed: int
    oldest_ready_s: float | None
    agents: int
    """Live agents that serve the queue."""
    unknown_jobs: tuple[str, ...]
    """Jobs of ready tasks that no live agent of the queue has."""


def queue_stats(store: TaskStore) -> list[QueueStats]:
    """Every queue that ever held a task or has an agent. Reads the index entries of all open and failed tasks."""
    agents = store.agents()
    lanes: dict[str, list[Lane]] = {}
    for lane in store.engine.lanes():
        lanes.setdefault(lane.queue, []).append(lane)
    for agent in agents:
        for queue in agent.info["queues"]:
            lanes.setdefault(queue, [Lane(queue)])
    lines = list(open_lines(store))
    return [_stats(store, queue, lanes[queue], agents, lines) for queue in sorted(lanes)]


def _stats(
    store: TaskStore, queue: str, lanes: Sequence[Lane], agents: Sequence[AgentInfo], lines: Sequence[str]
) -> QueueStats:
    engine, now = store.engine, store.clock.now()
    serving = [agent for agent in agents if queue in agent.info["queues"]]
    jobs = {name for agent in serving for name in agent.info.get("jobs", ())}
    counts = {
        status: sum(engine.count(lane.value(status)) for lane in lanes)
        for status in (Status.PENDING, Status.RUNNING, Status.BLOCKED, Status.FAILED)
    }
    ready = sum(engine.count(lane.value(Status.PENDING), until=now) for lane in lanes)
    oldest: list[float] = []
    unknown: set[str] = set()
    for lane in lanes:
        page = engine.page(lane.value(Status.PENDING), limit=NAMED, until=now)
        oldest += [entry.created_at for entry in page.entries[:1]]
        unknown.update(entry.job for entry in page.entries if entry.job not in jobs)
    return QueueStats(
        queue=queue,
        ready=ready,
        delayed=max(0, counts[Status.PENDING] - ready),
        running=counts[Status.RUNNING],
        blocked=counts[Status.BLOCKED] + sum(engine.count(line_value(lane, key)) for key in lines for lane in lanes),
        failed=counts[Status.FAILED],
        oldest_ready_s=max(0.0, now - min(oldest)) if oldest else None,
        agents=len(serving),
        unknown_jobs=tuple(sorted(unknown)) if serving else (),
    )
