"""Orders of a person about the grant of regions: look, move, go back, freeze."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from typing import Final

from thunderagent.model.conditions import Write
from thunderagent.model.errors import ConfigurationError, NotAllowed, StoreError
from thunderagent.regions import writes as region_writes
from thunderagent.regions.grant import REGION_HURRY_S, Record, RegionState, scope_id
from thunderagent.settings import Settings
from thunderagent.stores import open_engine
from thunderagent.stores.engine import Engine

TRIES: Final = 20
"""Attempts of an order while the holder renews the row."""

LONGEST_REASON: Final = 200


class Regions:
    """Orders to the arbiter of one scope.

    Args:
        engine: of the arbiter's table.
        scope: name of the row.
        by: the person or host, kept in the row.
    """

    def __init__(self, engine: Engine, scope: str, *, by: str | None = None) -> None:
        self.engine = engine
        self.scope = scope
        self.by = by or f"{getpass.getuser()}@{socket.gethostname()}"

    @classmethod
    def from_settings(cls, settings: Settings, *, by: str | None = None) -> Regions:
        """The orders for the settings.

        Raises:
            ConfigurationError: the settings name no arbiter.
        """
        if settings.region_arbiter is None:
            raise ConfigurationError(
                "there is one region: no arbiter is set; name its table in THUNDERAGENT_REGION_ARBITER or --arbiter, "
                "for example dynamodb://ThunderAgentArbiter?region=eu-north-1 (infra/control.yaml makes it)"
            )
        return cls(open_engine(settings.region_arbiter), settings.region_scope, by=by)

    def status(self) -> Record | None:
        """The row as it is; None: no region has had the grant.

        Raises:
            StoreError: the arbiter did not answer.
        """
        row = self.engine.get([scope_id(self.scope)]).get(scope_id(self.scope))
        return None if row is None else Record.from_row(row)

    def failover(self, to: str, *, drain_s: float, reason: str) -> Record:
        """Move the grant in good order: the holder gives back what it holds, and hands over after 80 s or so.

        Args:
            to: the region that gets it.
            drain_s: how long an agent of the holder may take to end batch tasks.
            reason: kept in the row.

        Raises:
            NotAllowed: the region has the grant, or the grant is on its way elsewhere.
        """
        _check(to, reason)

        def order(seen: Record) -> Write:
            if seen.holder == to and seen.state is RegionState.VACANT:
                raise NotAllowed(f"the region {to} had the grant last{_going(seen)}")
            if seen.holder == to:
                raise NotAllowed(f"the region {to} has the grant, epoch {seen.epoch}{_going(seen)}")
            if seen.state is not RegionState.ACTIVE:
                raise NotAllowed(f"the grant is {seen.state} on its way to {seen.to}; use --force, or wait")
            now, longest_s = self.engine.clock.now(), drain_s + REGION_HURRY_S
            return region_writes.drain(seen, to, drain_s=longest_s, by=self.by, reason=reason, now=now)

        return self._order(order)

    def force(self, to: str, *, reason: str) -> Record:
        """Move the grant without its holder: agents that read the order stop at once, and `to` begins when every grant
        is over.

        Raises:
            NotAllowed: the region has the grant.
        """
        _check(to, reason)

        def order(seen: Record) -> Write:
            if seen.holder == to and seen.state is not RegionState.VACANT:
                raise NotAllowed(f"the region {to} has the grant, epoch {seen.epoch}{_going(seen)}")
            return region_writes.vacate(seen, to, by=self.by, reason=reason, now=self.engine.clock.now())

        return self._order(order)

    def stay(self, *, reason: str) -> Record:
        """Take back an order to move in good order.

        Raises:
            NotAllowed: there is none.
        """
        _check(None, reason)

        def order(seen: Record) -> Write:
            if seen.state is RegionState.VACANT:
                raise NotAllowed(f"nobody has the grant any more{_going(seen)}")
            if seen.state is not RegionState.DRAINING:
                raise NotAllowed(f"the region {seen.holder} is {seen.state}: there is no move to take back")
            return region_writes.stay(seen, by=self.by, reason=reason, now=self.engine.clock.now())

        return self._order(order)

    def freeze(self, reason: str) -> Record:
        """Let no region take the grant by itself."""
        _check(None, reason)
        return self._order(lambda seen: region_writes.freeze(seen, reason, by=self.by, now=self.engine.clock.now()))

    def thaw(self) -> Record:
        return self._order(lambda seen: region_writes.freeze(seen, None, by=self.by, now=self.engine.clock.now()))

    def _order(self, order: Callable[[Record], Write]) -> Record:
        for _ in range(TRIES):
            seen = self.status()
            if seen is None:
                raise NotAllowed(f"no region was granted anything in the scope {self.scope!r} yet: start agents first")
            write = order(seen)
            [answer] = self.engine.apply([write])
            if answer.error:
                raise answer.error
            if answer.row is not None and (answer.won or write.landed_on(answer.row)):
                return Record.from_row(answer.row)
        raise StoreError(f"the row of the arbiter changed {TRIES} times under this order; try again")


def _going(seen: Record) -> str:
    if seen.to is None:
        return ""
    back = f"failover --to {seen.holder} --force" if seen.state is RegionState.VACANT else "stay"
    return f", it is on its way to {seen.to}; take that back with: thunderagent region {back}"


def _check(to: str | None, reason: str) -> None:
    if to is not None and (not to or len(to) > 64 or to != to.strip()):
        raise ConfigurationError(f"--to is {to!r:.80}; write the name of a region, such as eu-west-1")
    if len(reason) > LONGEST_REASON:
        raise ConfigurationError(f"the reason has {len(reason)} letters; use {LONGEST_REASON} at most")
