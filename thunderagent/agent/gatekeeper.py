"""Lets an agent's loop follow the grant of its region: nothing starts without one, and all is given back in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, cast

from thunderagent.agent.in_flight import HURRY_S, InFlight
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.model import fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import AgentDraining
from thunderagent.regions.gate import Gate, GatedEngine
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import TaskStore

HOLD: Final = "region"
"""By whom the agent is held while its region may not claim."""


def gated(store: TaskStore, gate: Gate) -> TaskStore:
    """The store whose writes need a grant; the same one where there is one region."""
    if gate.region is None:
        return store
    return store.over(cast(Engine, GatedEngine(store.engine, gate)))


class Gatekeeper:
    """Called in each turn of the loop. Handlers whose grant is over the heartbeat's watch stops, not the loop.

    Args:
        gate: what holds.
        pauses: let nothing start.
        in_flight: what the agent holds.
        bus: told when a grant begins, is to go, and ends.
        drain_s: how long batch tasks may take to end before they are given back; streams are given back at once.
        monotonic: the clock of these seconds.
    """

    def __init__(
        self,
        gate: Gate,
        pauses: PauseWatcher,
        in_flight: InFlight,
        bus: EventBus,
        *,
        drain_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._gate = gate
        self._pauses = pauses
        self._in_flight = in_flight
        self._bus = bus
        self._drain_s = drain_s
        self._monotonic = monotonic
        self._was_open = False
        self._epoch = 0
        self._stop_all_at = math.inf

    def idle_s(self, longest_s: float) -> float:
        """Seconds until something is due, at most `longest_s`."""
        return max(0.0, min(longest_s, self._stop_all_at - self._monotonic()))

    def look(self) -> None:
        """Take in what the gate says now."""
        gate = self._gate
        if gate.region is None:
            return
        grant, is_open = gate.grant, gate.is_open
        self._pauses.hold(None if gate.may_claim else gate.why_closed, by=HOLD)
        if self._was_open and (not is_open or grant.epoch != self._epoch):
            self._bus.emit(fleet_events.GrantEnded(region=gate.region, epoch=self._epoch, reason=gate.why_closed))
            self._was_open = False
        if not is_open:  # claims that may have happened: whoever has the grant next takes them
            self._in_flight.doubts.forget()
            self._in_flight.admission.postpone(HURRY_S)  # nor does anybody come out of a line
        if is_open and not self._was_open:
            self._was_open, self._epoch, self._stop_all_at = True, grant.epoch, math.inf
            self._bus.emit(fleet_events.GrantBegan(region=gate.region, epoch=grant.epoch))
        if is_open and grant.is_draining:
            self._give_back(gate.region)
        else:
            self._stop_all_at, self._in_flight.is_hurried = math.inf, False

    def _give_back(self, region: str) -> None:
        now = self._monotonic()
        if self._stop_all_at == math.inf:
            self._stop_all_at = now + self._drain_s
            grant = self._gate.grant
            self._bus.emit(fleet_events.GrantDrains(region=region, epoch=grant.epoch, reason=grant.reason))
        is_over = now >= self._stop_all_at
        for running in list(self._in_flight.held.values()):
            if running.job.is_stream or is_over:
                running.context.stop(AgentDraining("the grant goes to another region"))
        if is_over:
            self._in_flight.is_hurried = True
            self._stop_all_at = now + HURRY_S  # nothing is claimed meanwhile: only a claim in doubt can have come
