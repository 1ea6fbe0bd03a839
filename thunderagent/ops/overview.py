"""The fleet at one moment: queues, agents, streams and costs, from the rows of the agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunderagent.model.names import names_of
from thunderagent.model.rows import as_map, as_number
from thunderagent.queue.pauses import Pause, PauseKind, read_pauses
from thunderagent.queue.stats import QueueStats, queue_stats
from thunderagent.stores.tasks import AgentInfo, TaskStore
from thunderagent.streams.journal import Link, read_link
from thunderagent.telemetry.prices import store_dollars


@dataclass(frozen=True, slots=True)
class Slots:
    queue: str
    running: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """An agent, from its row."""

    name: str
    version: str
    since: float
    seen: float
    state: str
    """`ok`, `paused`, `passive` (its region has no grant), `draining` or `not well`."""
    reasons: tuple[str, ...]
    slots: tuple[Slots, ...]
    streams_held: int
    streams_most: int
    streams_connected: int
    streams_away: tuple[tuple[str, Link], ...] = ()
    """The first of its streams that are not connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Costs of the table that the living agents have caused since their start."""

    tasks: int
    """Runs that ended."""
    read_units: float
    write_units: float
    dollars: float

    @property
    def dollars_per_1000(self) -> float | None:
        """Dollars for a thousand tasks; None before the first."""
        return self.dollars / self.tasks * 1000 if self.tasks else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The fleet at the moment `at` of the shared clock."""

    at: float
    store: str
    queues: tuple[QueueStats, ...]
    paused: tuple[Pause, ...]
    agents: tuple[AgentView, ...]
    cost: Cost | None
    """None: no agent counts it, as with an embedded store."""


def overview(store: TaskStore) -> Overview:
    """Look at the fleet: the reads of `stats`, and the rows of the agents.

    Raises:
        StoreError: the store did not answer.
    """
    pauses = read_pauses(store)
    agents = store.agents()
    return Overview(
        at=store.clock.now(),
        store=store.engine.url,
        queues=tuple(queue_stats(store)),
        paused=tuple(pauses.values()),
        agents=tuple(_view(agent, pauses) for agent in agents),
        cost=_cost(agents),
    )


def state_of(agent: AgentInfo, pauses: Mapping[str, Pause]) -> tuple[str, tuple[str, ...]]:
    """The state of an agent and its reasons. An agent of an older version gives fewer."""
    health = as_map(agent.info.get("health"))
    fine = health.get("healthy", health.get("heartbeat_alive") and health.get("store_answers"))
    paused = health.get("paused") or any(f"{PauseKind.AGENT}:{name}" in pauses for name in names_of(agent.name))
    found = health.get("reasons")
    reasons = tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()
    if health.get("draining"):
        return "draining", reasons
    if not fine:
        return "not well", reasons
    if as_map(agent.info.get("region")).get("state") == "passive":
        return "passive", reasons
    return ("paused" if paused else "ok"), reasons


def _view(agent: AgentInfo, pauses: Mapping[str, Pause]) -> AgentView:
    info = agent.info
    streams = as_map(info.get("streams"))
    state, reasons = state_of(agent, pauses)
    return AgentView(
        name=agent.name,
        version=str(info.get("version", "")),
        since=agent.started_at,
        seen=agent.seen_at,
        state=state,
        reasons=reasons,
        slots=tuple(_slots(info)),
        streams_held=int(as_number(streams.get("held"))),
        streams_most=int(as_number(streams.get("max"))),
        streams_connected=int(as_number(streams.get("connections"))),
        streams_away=tuple(_away(streams.get("away"))),
    )


def _away(streams: Any) -> Iterator[tuple[str, Link]]:
    for one in streams if isinstance(streams, (list, tuple)) else ():
        if (link := read_link(one)) is not None:
            yield str(one.get("stream")), link


def _slots(info: Mapping[str, Any]) -> Iterator[Slots]:
    running = as_map(info.get("running"))
    for queue, number in sorted(as_map(info.get("queues")).items()):
        yield Slots(queue, int(as_number(running.get(queue))), int(as_number(number)))


def _cost(agents: Sequence[AgentInfo]) -> Cost | None:
    counted = [counts for agent in agents if "write_units" in (counts := as_map(agent.info.get("counts")))]
    if not counted:
        return None
    reads, writes = (sum(as_number(one.get(name)) for one in counted) for name in ("read_units", "write_units"))
    ended = sum(int(as_number(one.get(name))) for one in counted for name in ("succeeded", "failed", "closed"))
    dollars = store_dollars(read_units=reads, write_units=writes)
    return Cost(tasks=ended, read_units=reads, write_units=writes, dollars=dollars)
