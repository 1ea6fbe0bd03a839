"""What an agent does for its streams beside holding them: journals, the gauge, takeovers, balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from thunderagent.agent.in_flight import InFlight
from thunderagent.agent.stream_balance import OTHERS_S, Fleet
from thunderagent.agent.stream_handoff import HANDOFF_S
from thunderagent.agent.sweep import Rescuer
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import on_host
from thunderagent.model.errors import AgentDraining, StreamHandedOff
from thunderagent.model.task import Lane, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.context import StreamContext
from thunderagent.streams.journal import keep_journals

AWAY: Final = 3
"""Streams without a connection that the agent's row names."""
AWAY_BYTES: Final = 120

LOST_KEPT_S: Final = 3600.0
"""How long an agent remembers when it first saw a lost lease: longer than any lap of sweeps."""

Room = Callable[[Task], float | None]
"""Length of the lease that a lost agent's task gets here; None without its job or a free slot."""


class Streams:
    """The streams of one agent. Called in the agent's loop."""

    def __init__(
        self, store: TaskStore, settings: Settings, bus: EventBus, *, in_flight: InFlight, rescuer: Rescuer
    ) -> None:
        self._store = store
        self._settings = settings
        self._bus = bus
        self._in_flight = in_flight
        self._rescuer = rescuer
        self._lost_since: dict[tuple[str, int], float] = {}

    @property
    def fleet(self) -> Fleet:
        return self._in_flight.fleet

    @property
    def connections(self) -> int:
        """The gauge ActiveConnections: streams of this agent with an open connection."""
        return sum(context.is_connected for _, context in self._contexts())

    def entry(self) -> dict[str, Any]:
        """The entry in the agent's row, with the streams that have been without a connection for longest."""
        counts = {"held": self.fleet.held, "max": self.fleet.max_streams, "connections": self.connections}
        away = [
            (running.lease.task_id, link)
            for running, context in self._contexts()
            if (link := context.journal.link) is not None and not link.is_connected
        ]
        away = sorted(away, key=lambda one: one[1].since)[:AWAY]
        shown = [
            {"stream": name, **asdict(replace(link, reason=writes.cut(link.reason, AWAY_BYTES)))} for name, link in away
        ]
        return {**counts, **({"away": shown} if shown else {})}

    def gauge(self) -> None:
        self._bus.emit(events.ActiveConnections(connections=self.connections, streams=self.fleet.held))

    def keep_journals(self) -> None:
        """Write what has happened since the last call; after an error the next call writes it.

        Raises:
            StoreError: the store did not answer.
        """
        closed, self._in_flight.closed = self._in_flight.closed, []
        entries = [
            (context.journal, info)
            for context in (*(context for _, context in self._contexts()), *map(_context, closed))
            if context is not None
            and (info := context.journal.take(self._store.monotonic(), **context.counts)) is not None
        ]
        try:
            keep_journals(
                self._store,
                {journal.journal_id: info for journal, info in entries},
                keep_s=self._settings.keep_failed_days * 86400,
            )
        except BaseException:
            self._in_flight.closed += closed
            for journal, _ in entries:
                journal.keep()
            raise

    def take_lost(self, lanes: Sequence[Lane] | None, room: Room, others_s: Callable[[Task], float]) -> None:
        """Take the tasks of lost agents; those that are ours first.

        Args:
            lanes: where to look for leases that are new to us; None: only at known leases that should be over.
            room: see `Room`.
            others_s: how long a batch task is left to other agents.
        """
        now = self._store.monotonic()
        self._lost_since = {one: since for one, since in self._lost_since.items() if since > now - LOST_KEPT_S}

        def ours(task: Task) -> float | None:
            since = self._lost_since.setdefault((task.task_id, task.fence), now)
            if task.is_stream:
                self.fleet.lost(task.lease_owner or "", on_host(self._store.clock, task.lock_time or 0.0))
                left_s = 0.0 if self.fleet.is_ours(task.task_id) else OTHERS_S
            else:
                left_s = others_s(task)
            if now - since < left_s:
                return None
            return room(task)

        leases = self._rescuer.take_over(lanes, ours, self._in_flight.doubts.add)
        self._in_flight.begin_all(leases, how="taken over from a lost agent")

    def rebalance(self) -> None:
        """Hand streams off when this agent has many more than the others."""
        number = min(self.fleet.surplus(), self._settings.rebalance_streams)
        movable = [
            running
            for running, context in self._contexts()
            if context.is_connected
            and not (context.cancelled or context.is_on_hold or running.settling)
            # a paused stream goes on here, and could not go on elsewhere
            and not self._in_flight.pauses.is_paused(running.lease.task.queue, running.job.name)
        ]
        leaving = movable[-number:] if number > 0 else []
        for running in leaving:
            self.fleet.gave(running.lease.task_id)
        self._in_flight.handoffs.leave(leaving, StreamHandedOff())

    def leave(self, announce: Callable[[], object] | None) -> None:
        """Hand all streams off, as the agent stops.

        Args:
            announce: writes the agent's row, so that no other agent leaves our offers to us; None: the store does not
                answer, so all streams go with a break.
        """
        lasts_s = min(HANDOFF_S, max(2.0, self._settings.drain_s - 5.0)) if announce else 0.0
        why = AgentDraining("the agent is stopping")
        # the last one first: a stream that waits for another's turn to connect must not get that turn now
        held = [running for running, _ in reversed(self._contexts())]
        self._in_flight.handoffs.leave([one for one in held if one.job.exclusive], why)
        if announce:
            announce()
        self._in_flight.handoffs.leave([one for one in held if not one.job.exclusive], why, lasts_s=lasts_s)

    def _contexts(self) -> list[tuple[Running, StreamContext]]:
        return [
            (running, context)
            for running in list(self._in_flight.held.values())
            if (context := _context(running)) is not None
        ]


def _context(running: Running) -> StreamContext | None:
    context: Any = running.context
    return context if isinstance(context, StreamContext) else None
