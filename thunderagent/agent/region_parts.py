"""The thread that keeps an agent's gate as the arbiter says, for agents in several regions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from thunderagent.agent.threads import RepeatingThread
from thunderagent.agent.view import AgentView
from thunderagent.model.errors import ConfigurationError
from thunderagent.regions.arbiter import Arbiter, Authority, RegionPolicy, Wellness
from thunderagent.regions.gate import Gate
from thunderagent.regions.grant import REGION_HURRY_S, REGION_LOOK_S, Grant
from thunderagent.regions.sentinel import Sentinel, TableWellness
from thunderagent.stores import open_engine
from thunderagent.stores.engine import Engine

LOOKS_A_BEAT: Final = 2

_OF_AWS: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")


class RegionWatch(RepeatingThread):
    """The thread that asks the authority again and again, and opens and closes the gate.

    A thread that dies or hangs leaves the gate to close by itself when the grant is over.

    Args:
        gate: of the agent.
        authority: who says what holds.
        every_s: seconds between two looks.
        wake: lets the agent's loop take in what has changed.
        told: a place in the agent's row.
        is_well: how the region is, to be told there.
        last: done at the end.
    """

    def __init__(
        self,
        gate: Gate,
        authority: Authority,
        *,
        every_s: float,
        wake: Callable[[], None],
        told: dict[str, Any],
        is_well: Callable[[], bool] = lambda: True,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("region", every_s, self.look, last=last)
        self._gate = gate
        self._authority = authority
        self._wake = wake
        self._told = told
        self._is_well = is_well
        told["region"] = region_entry(gate, well=False)

    def look(self) -> None:
        """One step."""
        before = (self._gate.is_open, self._gate.may_claim, self._gate.epoch)
        self._gate.grant = self._authority.step()
        after = (self._gate.is_open, self._gate.may_claim, self._gate.epoch)
        self._told["region"] = region_entry(self._gate, well=self._is_well())
        if before != after:
            self._wake()


def region_entry(gate: Gate, *, well: bool = False) -> dict[str, Any]:
    """What an agent's row tells of its region."""
    state = "granted" if gate.may_claim else "draining" if gate.is_open else "passive"
    return {"name": gate.region, "state": state, "epoch": gate.epoch, "well": well}


def region_watch(
    agent: AgentView, well: Wellness | None = None, *, arbiter_engine: Engine | None = None
) -> list[RegionWatch]:
    """The thread of an agent whose settings name an arbiter; none for others.

    Args:
        agent: whose gate it is.
        well: how the region is; None: whether its table answers.
        arbiter_engine: the arbiter's table, closed at the end; None: opened by its URL in the settings.

    Raises:
        ConfigurationError: the URL of the arbiter cannot be understood, or the region is not that of the table.
    """
    settings = agent.settings
    if settings.region_arbiter is None or settings.region is None:
        return []
    place = region_of(settings.store)
    if place is not None and place != settings.region and _OF_AWS.fullmatch(settings.region):
        # Settings of another region, copied: both regions would have the same grant, and nobody would see it.
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
            told=agent.facts,
            is_well=lambda: (well or table).is_well,
            last=close,
        )
    ]


def region_of(url: str) -> str | None:
    """The region of a store's table in AWS; None for another store, a local engine, and where the URL names none."""
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
