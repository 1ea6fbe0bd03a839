"""The loss of a region, and the way back: a story in three acts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from drills.crowd import Crowd, crowd, people
from drills.findings import Found
from drills.names import Names, Switch
from drills.pace import Pace
from drills.timeline import Timeline
from drills.workloads import FOLLOW, Load
from drills.world import AGENTS, OTHER, PRIMARY, SCOPE, World, rows_of
from thunderagent.model.fleet_events import CanaryDown, CanaryUp, GrantAsked, GrantBegan, GrantDrains, GrantEnded
from thunderagent.model.task import Status
from thunderagent.regions.commands import Regions
from thunderagent.websocket_api.records import state_id

LOOK_S: Final = 0.02
STEADY_S: Final = 60.0
"""How long all goes well before, in seconds of the story."""
STALE_S: Final = 5.0
"""Replication stands still so long before the region is lost: it does not die in one moment."""
STAY_S: Final = 30.0
"""How long the other region works before the lost one comes back."""
CALM_S: Final = 30.0
"""How long rows may take to be right again after late writes."""
LEASE_S: Final = 300.0
"""Of a task: one whose agent lost it may wait so long for another run."""
SHARES: Final = {"clients half": 0.5, "clients 99": 0.99, "clients all": 1.0}


class DrillFailed(Exception):
    """The drill could not be played."""


@dataclass(slots=True, kw_only=True)
class Cast:
    """Who takes part."""

    world: World
    load: Load
    names: Names
    crowd: Crowd


@dataclass(slots=True)
class RegionLoss:
    """The drill.

    Args:
        pace: how fast time runs.
        clients, streams: how many.
        folder: for what is written.
        console: where it is told.
        without: the mechanism that is left out: `gate` or `resubmit`.
        goes_back: play the way back too.
    """

    pace: Pace
    clients: int
    streams: int
    folder: Path
    console: Console
    without: str | None = None
    goes_back: bool = True
    loss: Timeline = field(init=False)
    back: Timeline = field(init=False)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loss = Timeline(f"{PRIMARY} is lost", self.pace, self.console)
        self.back = Timeline(f"{PRIMARY} is back", self.pace, self.console)
        self.ids = [f"stream-{number}" for number in range(self.streams)]

    def play(self) -> Found:
        """All acts, and what was found.

        Raises:
            DrillFailed: it did not come to the loss, or a part of the drill died.
            CrowdFailed: the process of the clients died.
        """
        world = World(self.pace, self.folder, has_gate=self.without != "gate")
        with ExitStack() as ends:
            ends.enter_context(world.running())
            urls = {name: region.gateway.url for name, region in world.regions.items()}
            names = Names(urls, world.token_from, self.pace, self._switched)
            names.start()
            ends.callback(names.close)
            together = ends.enter_context(crowd())
            devices = people(self.clients)
            feed = together.begin(
                {
                    "scale": self.pace.scale,
                    "names_port": names.port,
                    "people": devices,
                    "tokens": {user: world.issuer.token(user) for user, _ in devices},
                    "resubmit": self.without != "resubmit",
                }
            )
            load = Load({name: region.client for name, region in world.regions.items()}, self.pace)
            ends.callback(load.stop)
            self._cast = Cast(world=world, load=load, names=names, crowd=together)
            self._before(feed)
            self._lose()
            if self.goes_back:
                self._return()
                self._go_back()
            return self._after()

    _cast: Cast = field(init=False, repr=False)
    _acts: int = field(default=0, init=False)

    # The acts

    def _before(self, feed: str) -> None:
        """All is well: the primary works, streams and clients are there."""
        world = self._cast.world
        for task_id in self.ids:
            world.primary.client.enqueue(FOLLOW, {"url": feed}, task_id=task_id)
        self._cast.load.start()
        begun = time.monotonic()
        self._must("the first grant", lambda: len(world.of(GrantBegan, PRIMARY)) >= AGENTS, 60.0, 10.0)
        self._must("streams", lambda: len(world.ledger.live_in(PRIMARY, 1)) >= self.streams, 60.0, 20.0)
        self._must("clients", lambda: self._cast.crowd.live.get(PRIMARY, 0) >= self.clients, 60.0, 20.0)
        self._wait(lambda: False, STEADY_S)
        self.console.print(
            f"{PRIMARY} works, {OTHER} waits: {AGENTS} agents in each, {self.streams} streams, {self.clients} clients, "
            f"{len(self._cast.load.put)} orders so far ({time.monotonic() - begun:.1f} s)"
        )

    def _lose(self) -> None:
        cast, pace = self._cast, self.pace
        cast.world.part()
        time.sleep(pace.s(STALE_S))
        self._acts = 1
        self.loss.begin()
        cast.load.regions = (OTHER,)
        cast.world.lose()
        self.loss.mark("lost", f"{PRIMARY} is cut off; its agents go on, and write to their own table", self.loss.begun)
        self._wait(lambda: self.loss.has("taken"), 90.0, 2.0, self._see_loss)
        self._wait(lambda: self.loss.has("stopped"), 30.0, 1.0, self._see_loss)
        self._wait(lambda: self.loss.has("streams"), 240.0, 5.0, self._see_loss)
        if self.clients:
            self._wait(lambda: self.loss.has("switched"), 240.0, 1.0, self._see_loss)
            self._wait(lambda: self.loss.has("clients all"), 480.0, 10.0, self._see_loss)
        self._wait(lambda: False, STAY_S, see=self._see_loss)

    def _return(self) -> None:
        """The lost region comes back, with what it wrote when nobody saw it."""
        world = self._cast.world
        self._acts = 2
        self.back.begin()
        late = self._late = world.give_back()
        self.back.mark(
            "back", f"{PRIMARY} is there again; {late} writes that left it in time arrive only now", self.back.begun
        )
        self._must("replication", lambda: not world.tasks.pending() or self._caught_up(), 60.0, 10.0)
        self.back.mark("caught up", "what both regions wrote meanwhile is replicated")
        self._wait(lambda: not self._stale_rows(), CALM_S, 2.0)
        self._stale = self._stale_rows()
        self.back.mark("calm", f"{self._reasserted()} late writes written over, {len(self._stale)} stayed")
        self._cast.load.regions = (PRIMARY, OTHER)
        self._must("healthy region", lambda: self._is_well(), 300.0, 10.0)
        self.back.mark("well", f"the canaries of the agents in {PRIMARY} see five good looks in a row")
        if self.clients:
            self._wait(lambda: self.back.has("switched"), 480.0, 2.0)

    def _go_back(self) -> None:
        """The order to go back, in good order."""
        world, crowd = self._cast.world, self._cast.crowd
        self._ordered = time.monotonic()
        regions = Regions(world.arbiter, SCOPE, by="the drill")
        regions.failover(PRIMARY, drain_s=self.pace.s(30.0), reason="the drill goes back")
        self.back.mark("ordered", f"thunderagent region failback --to {PRIMARY}", self._ordered)
        self._wait(lambda: self.back.has("streams"), 300.0, 5.0, self._see_back)
        if self.clients:
            world.other.gateway.rotate()
            self.back.mark("rotated", f"{OTHER} closes its connections, as each is after two hours at the latest")
            self._wait(lambda: crowd.live.get(PRIMARY, 0) >= self.clients and not crowd.live.get(OTHER), 300.0, 10.0)
            if crowd.live.get(PRIMARY, 0) >= self.clients:
                self.back.mark("clients all", f"all {self.clients} clients are in {PRIMARY}")
        self._wait(lambda: False, STAY_S, see=self._see_back)

    def _after(self) -> Found:
        """Let all come to its end, and look."""
        cast, world = self._cast, self._cast.world
        cast.crowd.rest()
        cast.load.stop()
        holder = world.primary if self.goes_back else world.other
        ids = [one for one, region in cast.load.put.items() if self.goes_back or region == OTHER or self._has(one)]
        self._wait(lambda: not self._open(holder.name, ids), LEASE_S + 120.0, 10.0)
        report = cast.crowd.report()
        record = Regions(world.arbiter, SCOPE, by="the drill").status()
        epoch = record.epoch if record else 0
        messages, runs = world.ledger.messages(), world.ledger.runs
        if self.goes_back:
            self._wait(lambda: not self._different(ids), 60.0, 3.0)
        if failure := next((one for one in (*world.failures, cast.load.failure) if one is not None), None):
            raise DrillFailed(f"a part of the drill died: {failure!r}") from failure
        return Found(
            pace=self.pace,
            loss=self.loss,
            back=self.back if self.goes_back else None,
            lost_region=PRIMARY,
            other_region=OTHER,
            streams=self.streams,
            clients=self.clients,
            epoch=epoch,
            runs=runs,
            messages=messages,
            open_tasks=self._open(holder.name, ids),
            tasks=len(ids),
            stale=self._stale,
            late=self._late,
            reasserted=self._reasserted(),
            overwritten=sum(one.region == PRIMARY for one in world.tasks.overwritten),
            report=report,
            states=self._states(holder.name),
            differences=self._different(ids) if self.goes_back else (),
        )

    _late: int = field(default=0, init=False)
    _stale: list[str] = field(default_factory=list, init=False)
    _ordered: float = field(default=0.0, init=False)

    # What is seen

    def _switched(self, switch: Switch) -> None:
        if self._acts == 1:
            self.loss.mark("switched", f"the name leads to {switch.region}: {switch.reason}")
        elif self._acts == 2:
            self.back.mark("switched", f"the name leads to {switch.region}: {switch.reason}")

    def _see_loss(self) -> None:
        world, loss, begun = self._cast.world, self.loss, self.loss.begun
        down = [one for one in world.of(CanaryDown, PRIMARY, begun) if getattr(one.event, "target", "") == PRIMARY]
        if down:
            loss.mark("canary", f"the canary of an agent in {PRIMARY} sees two failures in a row", down[0].at)
        ended = world.of(GrantEnded, PRIMARY, begun)
        if len({one.agent for one in ended}) >= AGENTS:
            loss.mark("grant ended", f"the grant is over for all agents in {PRIMARY}", ended[-1].at)
        if loss.has("grant ended") and not world.ledger.open_in(PRIMARY):
            last = max((run.ended or 0.0 for run in world.ledger.runs if run.region == PRIMARY), default=begun)
            loss.mark("stopped", f"no handler runs in {PRIMARY} any more", max(last, begun))
        self._see_taken(loss, OTHER, 2, begun)
        live = self._cast.crowd.live.get(OTHER, 0)
        for name, share in SHARES.items():
            if self.clients and live >= share * self.clients:
                loss.mark(name, f"{live} of {self.clients} clients are live in {OTHER}")
        self._check()

    def _see_back(self) -> None:
        world, back = self._cast.world, self.back
        drains = world.of(GrantDrains, OTHER, self._ordered)
        if drains:
            back.mark("drains", f"the agents in {OTHER} give back what they hold", drains[0].at)
        self._see_taken(back, PRIMARY, 3, self._ordered)
        if back.has("streams"):
            stopped = [run.ended or 0.0 for run in world.ledger.runs if run.region == OTHER]
            back.mark("stopped", f"the last handler in {OTHER} had ended", max(stopped))
        self._check()

    def _see_taken(self, timeline: Timeline, region: str, epoch: int, after: float) -> None:
        """The grant goes to a region, and its agents begin."""
        world = self._cast.world
        took = [
            one
            for name in (PRIMARY, OTHER)
            for one in world.of(GrantAsked, name, after)
            if getattr(one.event, "won", False) and getattr(one.event, "verb", "") in ("take", "hand over")
        ]
        if took:
            timeline.mark("taken", f"{region} has the grant, epoch {epoch}", took[0].at)
        began = world.of(GrantBegan, region, after)
        if len({one.agent for one in began}) >= AGENTS:
            timeline.mark("agents active", f"all agents in {region} work", began[-1].at)
        first = next((run for run in world.ledger.runs if run.region == region and run.epoch == epoch), None)
        if first:
            timeline.mark("first task", f"the first handler runs in {region}: {first.task_id}", first.begun)
        live = world.ledger.live_in(region, epoch)
        if len(live) >= self.streams and timeline.has("agents active"):
            timeline.mark(
                "streams", f"all {self.streams} streams are live in {region}", max(live.values(), default=None)
            )

    # What is looked up

    def _reasserted(self) -> int:
        return self._cast.world.other.tasks.won["reassert"]

    def _stale_rows(self) -> list[str]:
        rows = rows_of(self._cast.world.tasks, OTHER, self.ids)
        return [name for name in self.ids if rows.get(name, {}).get("regionEpoch", 0) < 2]

    def _is_well(self) -> bool:
        """No agent of the region that is back takes it for down: before that, an order to go back comes too early."""
        world, begun = self._cast.world, self.loss.begun
        downs, ups = (
            {one.agent: one.at for one in world.of(kind, PRIMARY, begun) if getattr(one.event, "target", "") == PRIMARY}
            for kind in (CanaryDown, CanaryUp)
        )
        return all(ups.get(agent, 0.0) > at for agent, at in downs.items())

    def _caught_up(self) -> bool:
        tables = (self._cast.world.tasks, self._cast.world.states)
        return all(
            table.replication_lag(one, other) < self.pace.s(5.0)
            for table in tables
            for one, other in ((PRIMARY, OTHER), (OTHER, PRIMARY))
        )

    def _has(self, task_id: str) -> bool:
        return task_id in rows_of(self._cast.world.tasks, OTHER, [task_id])

    def _open(self, region: str, ids: Sequence[str]) -> dict[str, str]:
        rows = rows_of(self._cast.world.tasks, region, ids)
        statuses = {name: str(rows.get(name, {}).get("status", "nowhere")) for name in ids}
        return {name: status for name, status in statuses.items() if status != Status.SUCCESS}

    def _different(self, ids: Sequence[str]) -> list[str]:
        one, other = (rows_of(self._cast.world.tasks, region, ids) for region in (PRIMARY, OTHER))
        users = [state_id(user) for user, _ in people(self.clients)]
        here, there = (rows_of(self._cast.world.states, region, users) for region in (PRIMARY, OTHER))
        return [name for name in ids if one.get(name) != other.get(name)] + [
            name for name in users if here.get(name) != there.get(name)
        ]

    def _states(self, region: str) -> dict[str, dict[str, Any]]:
        users = {state_id(user): user for user, _ in people(self.clients)}
        rows = rows_of(self._cast.world.states, region, list(users))
        return {users[name]: json.loads(row["payload"]) for name, row in rows.items()}

    # Waiting

    def _wait(
        self, holds: Callable[[], bool], story_s: float, more_s: float = 0.0, see: Callable[[], None] | None = None
    ) -> bool:
        """Until something holds, at most so many seconds of the story and real ones beside; what it is at the end."""
        until = time.monotonic() + self.pace.s(story_s) + more_s
        while time.monotonic() < until:
            (see or self._check)()
            if holds():
                return True
            time.sleep(LOOK_S)
        return holds()

    def _must(self, what: str, holds: Callable[[], bool], story_s: float, more_s: float) -> None:
        if not self._wait(holds, story_s, more_s):
            raise DrillFailed(f"no {what} within {self.pace.s(story_s) + more_s:.1f} s: use a smaller --scale")

    def _check(self) -> None:
        self._cast.crowd.check()
        failures = [*self._cast.world.failures, self._cast.load.failure, self._cast.names.failure]
        if failure := next((one for one in failures if one is not None), None):
            raise DrillFailed(f"a part of the drill died: {failure!r}")
