"""Decides whether this agent's region has the grant, together with the agents of all regions, through one row.

There is no leader. Every agent reads the row. Any agent of the holder's region may renew it while it is well, and any
agent of another region that is well takes it when the beat has stood still. Clocks of regions are never compared: each
side counts on its own monotonic clock, the holder from before its request, the others from after they have seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.conditions import Write
from thunderagent.model.errors import ThunderAgentError
from thunderagent.model.events import StoreFailed, StoreRecovered
from thunderagent.model.fleet_events import GrantAsked, RegionsFrozen
from thunderagent.model.pacing import jittered
from thunderagent.model.task import Row
from thunderagent.regions import writes as region_writes
from thunderagent.regions.grant import (
    HOLDER_SHARE,
    REGION_LOOK_S,
    TAKER_SHARE,
    Grant,
    Record,
    RegionState,
    no_grant,
    scope_id,
)
from thunderagent.stores.engine import Engine

ASKING: Final = "asking the arbiter"

MOST_SWITCHES: Final = 2
SWITCHES_S: Final = 3600.0
"""Regions that take the grant by themselves more than twice in this time leave it to a person."""

BEATS_A_LEASE: Final = 3
"""Least beats in the length of a grant, which another region with other settings may have chosen."""

BACK_SUCCESSES: Final = 5
"""Good canaries in a row before a region takes its place back by itself."""

BACK_DWELL_S: Final = 600.0
"""How long the other region keeps the grant before one goes back by itself."""

BACK_FRESH: Final = 5
"""Looks in a row that find the holder's sign here in time."""

BACK_LAG_S: Final = 5.0
"""Signs younger than this are in time."""


class Authority(Protocol):
    """Says what the agents of a region may do."""

    def step(self) -> Grant:
        """Look, do what is due, and say what holds now. Never raises for an arbiter that does not answer."""


class Wellness(Protocol):
    """How the region is, seen from this agent: the canary, or else whether its table answers."""

    @property
    def is_well(self) -> bool:
        """Whether the region may have the grant."""

    @property
    def successes(self) -> int:
        """Good looks in a row."""


class Signs(Protocol):
    """The signs of regions in the table of this agent's region, and the epochs that it knows."""

    def write(self) -> None:
        """Give a sign of this region."""

    def age_s(self, record: Record) -> float | None:
        """Seconds since the newest sign of the holder; None: there is none."""

    def newest_epoch(self) -> int:
        """The latest epoch that the table knows, 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPolicy:
    """Who an agent is, and what its region may do by itself."""

    region: str
    owner: str
    """Name of the agent."""
    scope: str = "default"
    """Name of the arbiter's row."""
    lease_s: float
    """Length of a grant."""
    beat_s: float
    """Time between two beats of a region."""
    preferred: str | None = None
    """The region that should have the grant; it alone makes the row."""
    goes_back: bool = False
    """The preferred region takes its place back by itself."""
    drain_s: float = 30.0
    """How long each agent of the other region may take then to give back what it holds."""


class Arbiter:
    """The grant of one agent's region, from the row of an arbiter that is reached through any engine.

    Args:
        engine: of the arbiter's table, which is lost with neither region.
        policy: who the agent is, and what its region may do.
        well: how the region is.
        bus: for what is asked for.
        signs: written after each beat, read before the preferred region goes back; None: not looked at.
        monotonic: this agent's clock.
        rng: jitter, so that the agents of a region do not renew at once.
    """

    def __init__(
        self,
        engine: Engine,
        policy: RegionPolicy,
        *,
        well: Wellness,
        bus: EventBus,
        signs: Signs | None = None,
        monotonic: Callable[[], float] = since_boot,
        rng: random.Random | None = None,
    ) -> None:
        self.policy = policy
        self._engine = engine
        self._well = well
        self._bus = bus
        self._signs = signs
        self._monotonic = monotonic
        self._rng = rng or random.Random()
        self.record: Record | None = None
        """The row as last seen."""
        self.error: ThunderAgentError | None = None
        self._failing_since = math.inf
        self._sent = -math.inf  # before the last look that had an answer
        self._still_since = math.inf  # after the first look that saw the present state
        self._valid_from = -math.inf
        self._gone: Record | None = None  # the row that was there before it was deleted
        self._drain_seen = self._drained_at = math.inf
        self._beat_due = -math.inf
        self._fresh = 0

    def step(self) -> Grant:
        """Look at the row and do what is due."""
        try:
            self._look()
            self._act()
        except ThunderAgentError as error:  # whatever it is: the grant expires, and the arbiter is asked again
            self._failed(error)
        else:
            self._answered()
        return self.grant()

    def _failed(self, error: ThunderAgentError) -> None:
        """Emitted once: a region that waits and does not reach the arbiter will not take the grant when it is
        needed."""
        if self.error is None:
            self._failing_since = self._monotonic()
        if self.error is None or type(self.error) is not type(error):
            next_try_s = min(REGION_LOOK_S, self.policy.beat_s)
            self._bus.emit(StoreFailed(during=ASKING, error=str(error), next_try_s=next_try_s))
        self.error = error

    def _answered(self) -> None:
        if self.error is not None:
            self._bus.emit(StoreRecovered(during=ASKING, seconds=self._monotonic() - self._failing_since))
        self.error = None

    def grant(self) -> Grant:
        """What holds as far as this agent knows."""
        record = self.record
        if record is None:
            return no_grant(str(self.error) if self.error else "no region was granted anything yet")
        if record.holder != self.policy.region:
            away = f" as far as is known: the arbiter does not answer: {self.error}" if self.error else ""
            return no_grant(f"the region {record.holder} has the grant, epoch {record.epoch}{away}", record.epoch)
        if record.state is RegionState.VACANT:
            return no_grant(f"{record.by} gives the grant to {record.to}: {record.reason}", record.epoch)
        until = min(self._valid_from + record.lease_s * HOLDER_SHARE, self._drained_at)
        return Grant(
            epoch=record.epoch,
            valid_until=until,
            is_draining=record.state is RegionState.DRAINING,
            reason=self._why(record),
        )

    def _why(self, record: Record) -> str:
        if self.error is not None:
            return f"the arbiter does not answer: {self.error}"
        if record.state is RegionState.DRAINING:
            return f"the grant goes to {record.to}: {record.reason}"
        if self._well.is_well:
            return ""
        return (
            f"the region {self.policy.region} is not well: its canary fails, or without one its table does not answer"
        )

    def _look(self) -> None:
        sent = self._monotonic()
        row = self._engine.get([scope_id(self.policy.scope)]).get(scope_id(self.policy.scope))
        if row is None:
            if self.record is not None:
                self._gone, self._still_since = self.record, self._monotonic()
            self.record, self._sent = None, sent
        else:
            self._learn(row, sent)

    def _learn(self, row: Row, sent: float, *, ours: bool = False) -> None:
        """Take what the row says. `sent`: before the request; `ours`: this agent has written it with that call."""
        record, before, now = Record.from_row(row), self.record, self._monotonic()
        had = self.grant().is_valid(now) if before is not None else False
        if before is None or before.standing != record.standing:
            self._still_since = now
            if ours:
                self._valid_from = sent
            elif before is not None and (before.epoch, before.beat) != (record.epoch, record.beat):
                self._valid_from = self._sent  # an agent of our region wrote it after our previous look
            if ours or before is not None:
                self._beat_due = now + jittered(min(self.policy.beat_s, record.lease_s / BEATS_A_LEASE), self._rng)
        elif sent - self._sent > record.lease_s * HOLDER_SHARE:
            self._still_since = now  # the arbiter seems to have answered nobody: the holder comes before those who wait
        if record.state is not RegionState.DRAINING:
            self._drain_seen = self._drained_at = math.inf
        elif before is None or (before.state, before.epoch, before.ordered) != (
            record.state,
            record.epoch,
            record.ordered,
        ):
            self._drain_seen = now
            # An agent without a grant at the order to drain gets none any more.
            self._drained_at = now + record.drain_s if had and before is not None else -math.inf
        self.record, self._sent = record, sent

    def _act(self) -> None:
        record, now = self.record, self._monotonic()
        if record is None:
            self._begin(now)
        elif record.holder == self.policy.region and record.state is not RegionState.VACANT:
            self._hold(record, now)
        else:
            self._wait(record, now)

    def _begin(self, now: float) -> None:
        """No region has had the grant: the preferred region begins, or the first that is well.

        Or a person has deleted the row: then a region may have the grant that it had.
        """
        gone = self._gone
        if gone is not None and now - self._still_since < gone.lease_s * TAKER_SHARE:
            return
        if self.policy.preferred in (None, self.policy.region) and self._well.is_well:
            known = self._signs.newest_epoch() if self._signs else 0
            epoch = max(known, gone.epoch if gone is not None else 0) + 1
            row = region_writes.first_row(
                self.policy.scope,
                self.policy.region,
                lease_s=self.policy.lease_s,
                by=self.policy.owner,
                now=self._engine.clock.now(),
                epoch=epoch,
            )
            [answer] = self._engine.put([row])
            if answer.error:
                raise answer.error
            self._learn(answer.row or row, now, ours=answer.won or answer.row == row)

    def _hold(self, record: Record, now: float) -> None:
        """Renew the grant, or hand it over once no agent of the region can have one any more.

        An agent that has not seen the order lives on the grant that it had before; one that has ends after `drain_s`.
        Its last
        writes have as long to arrive as where a grant is taken.
        """
        wait_s = record.lease_s * TAKER_SHARE + record.drain_s
        clock_now = self._engine.clock.now()
        if now - self._drain_seen >= wait_s:
            self._write(
                region_writes.hand_over(record, lease_s=record.lease_s, by=self.policy.owner, now=clock_now), now
            )
        elif (
            now >= self._beat_due
            and self._well.is_well
            and self._write(region_writes.beat(record, now=clock_now), now)
            and self._signs
        ):
            self._signs.write()

    def _wait(self, record: Record, now: float) -> None:
        still_s = now - self._still_since
        is_next = record.to in (None, self.policy.region)
        may_take = record.frozen is None or record.state is RegionState.VACANT
        if still_s >= record.lease_s * TAKER_SHARE:
            if is_next and may_take and self._well.is_well:
                self._take(record, now)
        elif self._may_go_back(record):
            write = region_writes.drain(
                record,
                self.policy.region,
                drain_s=self.policy.drain_s,
                by=self.policy.owner,
                reason=f"{self.policy.region} is preferred and well again",
                now=self._engine.clock.now(),
            )
            self._write(write, now)

    def _take(self, record: Record, now: float) -> None:
        clock_now = self._engine.clock.now()
        recent = [at for at in record.switches if at > clock_now - SWITCHES_S]
        if record.state is not RegionState.VACANT and len(recent) >= MOST_SWITCHES:
            why = f"{len(recent)} regions took the grant by themselves within an hour"
            if self._write(region_writes.freeze(record, why, by=self.policy.owner, now=clock_now), now):
                self._bus.emit(RegionsFrozen(region=self.policy.region, reason=why))
            return
        lease_s, by = self.policy.lease_s, self.policy.owner
        self._write(region_writes.take(record, self.policy.region, lease_s=lease_s, by=by, now=clock_now), now)

    def _may_go_back(self, record: Record) -> bool:
        if not (
            self.policy.goes_back
            and self.policy.preferred == self.policy.region
            and record.state is RegionState.ACTIVE
            and record.frozen is None
        ):
            return False
        lag_s = self._signs.age_s(record) if self._signs else None
        self._fresh = self._fresh + 1 if lag_s is not None and lag_s < BACK_LAG_S else 0
        return (
            self._fresh >= BACK_FRESH
            and self._well.successes >= BACK_SUCCESSES
            and self._engine.clock.now() - record.since >= BACK_DWELL_S
        )

    def _write(self, write: Write, sent: float) -> bool:
        """Do a write and learn what the row says then."""
        [answer] = self._engine.apply([write])
        if answer.error:
            raise answer.error
        # Beats of two agents whose clocks are behind may look alike: then nobody knows whose was done, and when.
        is_telling = write.verb != "beat" and answer.row is not None
        won = answer.won or (is_telling and write.landed_on(answer.row or {}))
        if write.verb != "beat":
            self._bus.emit(GrantAsked(region=self.policy.region, verb=write.verb, won=won))
        if answer.row is not None:
            self._learn(answer.row, sent, ours=won and write.verb != "freeze")
        return won
