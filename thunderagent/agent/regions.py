"""Agents in several regions: a thread keeps the gate as the arbiter grants it, and the loop follows the grant.

Without a grant nothing starts, and all that is held is given back in time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import parse_qs, urlsplit

from thunderagent.agent.core import Core
from thunderagent.agent.in_flight import HURRY_S, InFlight
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.agent.threads import RepeatingThread
from thunderagent.agent.view import AgentView
from thunderagent.model import fleet_events
from thunderagent.model.errors import AgentDraining, ConfigurationError
from thunderagent.regions.arbiter import Arbiter, Authority, RegionPolicy, Wellness
from thunderagent.regions.gate import Gate, GatedEngine
from thunderagent.regions.grant import REGION_HURRY_S, REGION_LOOK_S, Grant
from thunderagent.regions.sentinel import Sentinel, TableWellness
from thunderagent.stores import open_engine
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import TaskStore

LOOKS_A_BEAT: Final = 2

_OF_AWS: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")


class RegionWatch(RepeatingThread):
    """The thread that asks the authority, and opens and closes the gate.

    If the thread dies or hangs, the gate closes by itself at the end of the grant.

    Args:
        authority: gives the grant.
        facts: further facts of the agent's row.
        is_well: whether the region is well, for the row.
    """

    def __init__(
        self,
        gate: Gate,
        authority: Authority,
        *,
        every_s: float,
        wake: Callable[[], None],
        facts: dict[str, Any],
        is_well: Callable[[], bool] = lambda: True,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("region", every_s, self.look, last=last)
        self._gate = gate
        self._authority = authority
        self._wake = wake
        self._facts = facts
        self._is_well = is_well
        facts["region"] = region_entry(gate, well=False)

    def look(self) -> None:
        before = (self._gate.is_open, self._gate.may_claim, self._gate.epoch)
        self._gate.grant = self._authority.step()
        after = (self._gate.is_open, self._gate.may_claim, self._gate.epoch)
        self._facts["region"] = region_entry(self._gate, well=self._is_well())
        if before != after:
            self._wake()


def region_entry(gate: Gate, *, well: bool = False) -> dict[str, Any]:
    """The entry of an agent's row for its region."""
    state = "granted" if gate.may_claim else "draining" if gate.is_open else "passive"
    return {"name": gate.region, "state": state, "epoch": gate.epoch, "well": well}


def region_watch(
    agent: AgentView, well: Wellness | None = None, *, arbiter_engine: Engine | None = None
) -> list[RegionWatch]:
    """The thread for an agent whose settings name an arbiter; none for others.

    Args:
        well: whether the region is well; None: whether its table answers.
        arbiter_engine: the arbiter's table, closed at the end; None: opened by its URL in the settings.

    Raises:
        ConfigurationError: the URL of the arbiter cannot be understood, or the region is not that of the table.
    """
    settings = agent.settings
    if settings.region_arbiter is None or settings.region is None:
        return []
    place = region_of(settings.store)
    if place is not None and place != settings.region and _OF_AWS.fullmatch(settings.region):
        # Settings copied from another region: both regions would have the same grant.
        raise ConfigurationError(
            f"THUNDERAGENT_REGION is {settings.region}, and the table of THUNDERAGENT_STORE is in {place}: agents use "
            "the copy of their own region, and have its name"
        )
    store = agent.store.sibling()
    arbiter_engine = arbiter_engine or open_engine(settings.region_arbiter, hasty=True)
    table = TableWellness(store, settings.region)
    arbiter = Arbiter(
        arbiter_engine,
        RegionPolicy(
            region=settings.region,
            owner=agent.name,
            scope=settings.region_scope,
            lease_s=settings.region_lease_s,
            beat_s=settings.region_beat_s,
            preferred=settings.region_preferred,
            goes_back=settings.region_failback == "auto",
            drain_s=settings.drain_s + REGION_HURRY_S,
        ),
        well=well or table,
        bus=agent.bus,
        signs=Sentinel(store, settings.region),
        monotonic=agent.store.monotonic,
    )

    def close() -> None:
        arbiter_engine.close()
        if store.engine is not agent.store.engine:
            store.engine.close()

    every_s = min(REGION_LOOK_S, settings.region_beat_s / LOOKS_A_BEAT)
    authority: Authority = arbiter if well is not None else _Looking(table, arbiter)
    return [
        RegionWatch(
            agent.gate,
            authority,
            every_s=every_s,
            wake=agent.wake,
            facts=agent.facts,
            is_well=lambda: (well or table).is_well,
            last=close,
        )
    ]


def region_of(url: str) -> str | None:
    """The region of a store's table in AWS, if the URL names it; None for a local engine."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    return None if parts.scheme != "dynamodb" or "endpoint" in query else next(iter(query.get("region", [])), None)


class _Looking:
    """Asks the table before the arbiter."""

    def __init__(self, table: TableWellness, authority: Authority) -> None:
        self._table = table
        self._authority = authority

    def step(self) -> Grant:
        self._table.look()
        return self._authority.step()


HOLD: Final = "region"
"""The holder of the agent while its region may not claim."""


def gated(store: TaskStore, gate: Gate) -> TaskStore:
    """The store whose writes need a grant; the same store where there is one region."""
    if gate.region is None:
        return store
    return store.over(cast(Engine, GatedEngine(store.engine, gate)))


class Gatekeeper:
    """Lets the agent follow its grant, in each turn of the loop. The heartbeat stops handlers whose grant has ended.

    A grant that goes releases streams at once, and batch tasks after `drain_s`.
    """

    def __init__(self, core: Core, pauses: PauseWatcher, in_flight: InFlight) -> None:
        self._gate = core.gate
        self._pauses = pauses
        self._in_flight = in_flight
        self._bus = core.bus
        self._drain_s = core.settings.drain_s
        self._monotonic = core.store.monotonic
        self._was_open = False
        self._epoch = 0
        self._stop_all_at = math.inf

    def idle_s(self, longest_s: float) -> float:
        """Seconds until something is due, at most `longest_s`."""
        return max(0.0, min(longest_s, self._stop_all_at - self._monotonic()))

    def look(self) -> None:
        gate = self._gate
        if gate.region is None:
            return
        grant, is_open = gate.grant, gate.is_open
        self._pauses.hold(None if gate.may_claim else gate.why_closed, by=HOLD)
        if self._was_open and (not is_open or grant.epoch != self._epoch):
            self._bus.emit(fleet_events.GrantEnded(region=gate.region, epoch=self._epoch, reason=gate.why_closed))
            self._was_open = False
        if not is_open:  # the next region takes claims of ours that may have happened
            self._in_flight.doubts.forget()
            self._in_flight.admission.postpone(HURRY_S)  # nothing is claimed from a waitlist either
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
            self._stop_all_at = now + HURRY_S  # only a claim in doubt can come meanwhile
