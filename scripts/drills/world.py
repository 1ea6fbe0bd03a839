"""Two regions on one machine: tables that replicate, an arbiter in a third, a gateway and agents in each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from drills.fabric import Counted, Link
from drills.ledger import Ledger
from drills.pace import LAG_S, Pace
from drills.workloads import make_jobs
from thunderagent.agent.loop import Agent
from thunderagent.agent.regions import region_watch
from thunderagent.agent.threads import BackgroundThread
from thunderagent.agent.view import AgentView
from thunderagent.client import Client
from thunderagent.model import fleet_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.errors import StoreError
from thunderagent.regions.gate import Gate
from thunderagent.settings import Settings, load_settings
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing.global_table.table import GlobalTableSim
from thunderagent.websocket_api.canary.making import make_watch
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.gateway import Gateway, in_thread
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.server.throttle import CONNECT_RATE, USER_RATE

PRIMARY: Final = "eu-central-1"
OTHER: Final = "eu-west-1"
SCOPE: Final = "default"
AGENTS: Final = 2
"""In each region."""
JOIN_S: Final = 15.0
_KEPT: Final = (
    fleet_events.GrantBegan,
    fleet_events.GrantEnded,
    fleet_events.GrantDrains,
    fleet_events.GrantAsked,
    fleet_events.CanaryDown,
    fleet_events.CanaryUp,
)


class OpenGate(Gate):
    """A gate that nothing closes once it was open: what a drill looks like without the mechanism."""

    _was_open = False

    @property
    def is_open(self) -> bool:
        """Whether there ever was a grant."""
        self._was_open = self._was_open or self.grant.is_valid(time.monotonic())
        return self._was_open

    def check(self) -> int:
        """Whatever was granted last."""
        return self.grant.epoch if self.is_open else super().check()


@dataclass(slots=True)
class Region:
    """One region."""

    name: str
    gateway: Gateway
    tasks: Counted
    client: Client
    """Of the applications there."""
    agents: list[Agent] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seen:
    """An event of an agent."""

    at: float
    region: str
    agent: str
    event: Event


class World:
    """Everything that is in a region, and between regions."""

    def __init__(self, pace: Pace, folder: Path, *, has_gate: bool = True) -> None:
        self.pace = pace
        self.folder = folder
        self.has_gate = has_gate
        self.ledger = Ledger()
        self.tasks = GlobalTableSim([PRIMARY, OTHER], lag_s=pace.s(LAG_S))
        self.states = GlobalTableSim([PRIMARY, OTHER], lag_s=pace.s(LAG_S))
        self.arbiter = cast(Engine, SqliteEngine(MEMORY))
        self.issuer = Issuer()
        self.token_from = f"file://{folder / 'canary.jwt'}"
        (folder / "canary.jwt").write_text(self.issuer.token("canary"), encoding="utf-8")
        self.regions: dict[str, Region] = {}
        self.seen: list[Seen] = []
        self.failures: list[BaseException] = []
        self._guard = threading.Lock()

    @property
    def primary(self) -> Region:
        """The one that is lost."""
        return self.regions[PRIMARY]

    @property
    def other(self) -> Region:
        """The one that goes on."""
        return self.regions[OTHER]

    def of(self, kind: type[Event], region: str, after: float = 0.0) -> list[Seen]:
        """Events of a kind of the agents of a region, after a moment."""
        with self._guard:
            return [
                one for one in self.seen if isinstance(one.event, kind) and one.region == region and one.at >= after
            ]

    # Faults

    def part(self) -> None:
        """Nothing is replicated any more."""
        self.tasks.partition(PRIMARY, OTHER)
        self.states.partition(PRIMARY, OTHER)

    def lose(self) -> None:
        """Nobody reaches the primary, and who is in it reaches nobody; it goes on by itself."""
        self.primary.gateway.cut()
        for link in self.primary.links:
            link.outage()

    def give_back(self) -> int:
        """The primary is there again, with all that it has, and with writes that left its agents in time and reach its
        table only now: the last renewals of its streams. They go ahead of all else that is to be replicated, as nobody
        promises an order. How many of them the table takes.
        """
        renewals = [write for name, write in self.primary.tasks.renewals.items() if name.startswith("stream-")]
        lag_s, self.tasks.lag_s = self.tasks.lag_s, lambda source, target: -1e9
        late = sum(answer.won for answer in self.primary.tasks.behind.apply(renewals))
        self.tasks.lag_s = lag_s
        for link in self.primary.links:
            link.outage(down=False)
        self.tasks.heal()
        self.states.heal()
        self.primary.gateway.mend()
        return late

    # Building

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start everything; all of it has ended at the end of the block."""
        with ExitStack() as ends:
            for table in (self.tasks, self.states):
                ends.callback(_closed, table)
                table.start()
            ends.callback(self.arbiter.close)
            for name in (PRIMARY, OTHER):
                connections = SqliteEngine(MEMORY)
                ends.callback(connections.close)
                gateway = Gateway(
                    cast(Engine, self.states.engine(name)),
                    connections,
                    region=name,
                    authorizer=self.issuer.authorizer(),
                    limits=Limits(
                        rotate_after_s=self.pace.s(7200.0),
                        idle_s=self.pace.s(600.0),
                        connects_per_s=500.0,
                        user_rate=USER_RATE / self.pace.s(1.0),
                        connect_rate=CONNECT_RATE / self.pace.s(1.0),
                    ),
                )
                counted = Counted(cast(Engine, self.tasks.engine(name)))
                store = TaskStore(cast(Engine, self.tasks.engine(name)))
                self.regions[name] = Region(
                    name, gateway, counted, Client(store, load_settings(store="sqlite://:memory:"))
                )
            ends.enter_context(in_thread(*(one.gateway for one in self.regions.values())))
            ends.callback(self._join)
            for region in self.regions.values():
                for _ in range(AGENTS):
                    self._start_agent(region)
            yield

    def _start_agent(self, region: Region) -> None:
        settings, bus, link = self._settings(region.name), EventBus(), Link(self.arbiter)
        region.links.append(link)

        def threads(agent: AgentView) -> Sequence[BackgroundThread]:
            canary = make_watch(
                settings,
                bus,
                who=agent.name,
                facts=agent.facts,
                now=agent.store.clock.now,
                monotonic=agent.store.monotonic,
            )
            return [*region_watch(agent, canary, arbiter_engine=cast(Engine, link)), canary]

        jobs = make_jobs(region.name, self.ledger, self.pace)
        store = TaskStore(cast(Engine, region.tasks))
        agent = Agent(store, jobs, settings, bus=bus, threads=threads)
        if not self.has_gate and region.name == PRIMARY:
            agent.gate.__class__ = OpenGate
        bus.subscribe(lambda event: self._saw(region.name, agent.name, event))
        region.agents.append(agent)
        thread = threading.Thread(target=self._run, args=(agent,), name=f"agent of {region.name}", daemon=True)
        region.threads.append(thread)
        thread.start()

    def _settings(self, region: str) -> Settings:
        s = self.pace.s
        return load_settings(
            store="sqlite://:memory:",
            region=region,
            region_arbiter="sqlite:///the-arbiter-of-a-third-region.db",
            region_scope=SCOPE,
            region_lease_s=s(30.0),
            region_beat_s=s(10.0),
            region_preferred=PRIMARY,
            canary_targets={name: one.gateway.url for name, one in self.regions.items()},
            canary_token_from=self.token_from,
            canary_s=s(30.0),
            slots=20,
            lease_s=s(300.0),
            heartbeat_s=s(60.0),
            poll_min_s=s(1.0),
            poll_max_s=s(5.0),
            poll_idle_s=s(10.0),
            sweep_s=max(0.1, s(15.0)),
            rebalance_streams=0,  # what moves is to move by the loss alone
            clock_guard_s=s(2.0),
            drain_s=s(30.0),
            connect_rate=min(10_000.0, 40.0 * self.pace.scale),
            backoff_base_s=s(2.0),
            backoff_cap_s=s(300.0),
        )

    def _saw(self, region: str, agent: str, event: Event) -> None:
        if isinstance(event, _KEPT):
            with self._guard:
                self.seen.append(Seen(time.monotonic(), region, agent, event))

    def _run(self, agent: Agent) -> None:
        try:
            agent.run()
        except BaseException as error:
            self.failures.append(error)

    def _join(self) -> None:
        agents = [agent for region in self.regions.values() for agent in region.agents]
        for agent in agents:
            agent.stop()
            agent.stop()  # hurry: what there was to see was seen
        until = time.monotonic() + JOIN_S
        for region in self.regions.values():
            for thread in region.threads:
                thread.join(max(0.0, until - time.monotonic()))


def _closed(table: GlobalTableSim) -> None:
    with suppress(StoreError):
        table.close()


def rows_of(table: GlobalTableSim, region: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows as a region has them."""
    return dict(table.engine(region).get(list(ids)))
