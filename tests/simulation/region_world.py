"""Two regions of agents over one arbiter and one global table, in one thread, and everything that can happen to them.

Authorities, gates, stores and sweeps are the real ones; time is set by hand. Every call of an agent to the arbiter or
to its table takes time in which the others go on, and in which the agent may be stopped as by SIGSTOP, or its machine
sleeps: also between the look at the grant and the moment when a write leaves. What is stopped in the middle of a call
goes on only after those that were stopped in the middle of theirs meanwhile.

A newer version writes rows that these agents cannot read, in the table and at the arbiter. The store refuses writes for
good. Large payloads are kept apart from their rows and arrive in the other region by themselves. A sweep reads three
entries of a lane instead of ten thousand, and lanes are longer than that. A fork is left out: the grant of a child is a
copy that nobody renews, so it ends as that of an agent which is stopped, and `test_queue_machine.py` forks the store.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.agent.admission import Admission
from thunderagent.agent.regions import gated
from thunderagent.agent.settle import Policy, settle
from thunderagent.agent.sweep import LostLeases, Rescuer
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import Outcome, Undecided
from thunderagent.jobs.registry import Registry
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import SharedClock
from thunderagent.model.conditions import Is, Write
from thunderagent.model.errors import RegionPassive, StoreError, StoreRejected, StoreUnavailable
from thunderagent.model.task import Lane, Lease, Row, Status, Task, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents
from thunderagent.regions import writes as region_writes
from thunderagent.regions.arbiter import Arbiter, RegionPolicy
from thunderagent.regions.gate import Gate
from thunderagent.regions.grant import HOLDER_SHARE, TAKER_SHARE, Grant, Record, scope_id
from thunderagent.settings import LEASE_MARGIN, Settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.engine import Applied, Engine, KeptText
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Beat, Doubt, Exchanged, TaskStore, Wanted
from thunderagent.testing import FakeClock, GlobalTableSim
from thunderagent.testing.global_table.engine import RegionClock

REGIONS: Final = ("eu-central-1", "eu-west-1")
SCOPE: Final = "default"
AGENTS: Final = 3

GRANT_S: Final = 30.0
BEAT_S: Final = 10.0
DRAIN_S: Final = 8.0
LEASE_S: Final = 30.0
GUARD_S: Final = 2.0
SLOTS: Final = 5
CALL_S: Final = 6.0
"""No call of an agent that is not stopped takes longer, from before it is sent to after it is done."""
FOREVER_S: Final = 30 * 86400.0
DEPTH: Final = 3
"""Calls that may be in the middle at once, each inside of another."""

CLOCK_ERROR_S: Final = GRANT_S * (TAKER_SHARE - HOLDER_SHARE) - CALL_S
"""The clocks by which the regions' tables order writes may differ by less than this."""

LANE: Final = Lane()

NEWER: Final[dict[str, Any]] = {"kind": "oracle", "desiredState": "PAUSED", "handoffState": "HALF", "errors": "none"}
"""What a newer version may write into the row of a task, by attribute."""
HALTED: Final = "HALTED"
"""A state of a grant that only newer versions know."""
MOST_NEWER: Final = 12

POLICY: Final = Policy(
    backoff=Settings().backoff, max_retry=1_000_000, keep_success_s=FOREVER_S, keep_failed_s=FOREVER_S
)


@job("test.job")
def region_job(ctx: Context, payload: Any) -> None:
    """Never called: the world says when handlers end, and how."""


class Broken(AssertionError):
    """A rule of the regions does not hold."""


@dataclass
class Held:
    """A task in a slot: when its handler ends, and how."""

    lease: Lease
    ends_at: float
    outcome: str
    decided: Write | None = None
    is_bare: bool = False
    """The store did not take its outcome: all that is left to write is that it failed."""


@dataclass
class Wellness:
    """The canary of a region, as the world sets it."""

    is_well: bool = True
    successes: int = 10


@dataclass(frozen=True)
class Faults:
    """What may happen to calls, each as a chance; none at the end."""

    slow: float = 0.05
    lost_reply: float = 0.05
    lost_request: float = 0.05
    stopped: float = 0.015
    refused: float = 0.002


NO_FAULTS: Final = Faults(0.0, 0.0, 0.0, 0.0, 0.0)


class Rows(SqliteEngine):
    """The rows of a region, and beside them the texts that are too large for a row, as DynamoDB keeps them."""

    inline_bytes = DynamoEngine.inline_bytes

    def __init__(self, clock: SharedClock) -> None:
        super().__init__(MEMORY, clock=clock)
        self._texts: dict[str, KeptText] = {}

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        self._texts |= {key: KeptText(text, expire_at) for key, text in texts.items()}

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        return {key: self._texts[key] for key in keys if key in self._texts}


class Road:
    """A way of one agent to an engine: it takes time, and things happen on it."""

    def __init__(self, engine: Engine, agent: Agent, *, is_arbiter: bool) -> None:
        self._engine = engine
        self._agent = agent
        self._is_arbiter = is_arbiter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def clock(self) -> SharedClock:
        """What the agent takes for the time at the arbiter may be wrong by minutes: no rule of the grant needs it."""
        return RegionClock(self._engine.clock, self._agent.skew_s if self._is_arbiter else 0.0)

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        rows: dict[str, Row] = self._travel("get", lambda: self._engine.get(task_ids))
        return rows

    def page(self, status_value: str, **options: Any) -> Any:
        return self._travel("page", lambda: self._engine.page(status_value, **options))

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        texts: dict[str, KeptText] = self._travel("get_texts", lambda: self._read_texts(keys))
        return texts

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return self._write([row["taskId"] for row in rows], lambda: self._engine.put(rows, fresh=fresh), ())

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._write([write.task_id for write in batch], lambda: self._take(batch), batch)

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        raise Broken("no agent of this world deletes a row")

    def sibling(self) -> Road:
        return self

    def _read_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        if self._agent.region in self._agent.world.without_texts:
            raise StoreUnavailable(f"no text can be read in {self._agent.region}")
        return self._engine.get_texts(keys)

    def _take(self, batch: Sequence[Write]) -> list[Applied]:
        """Do what the store takes."""
        refused = [self._agent.world.refuses(write) for write in batch]
        answers = iter(
            self._engine.apply([one for one, is_refused in zip(batch, refused, strict=True) if not is_refused])
        )
        no = Applied(won=False, error=StoreRejected("the row would be too large"))
        return [no if is_refused else next(answers) for is_refused in refused]

    def _write(self, names: list[str], do: Callable[[], list[Applied]], batch: Sequence[Write]) -> list[Applied]:
        if self._is_arbiter:

            def arrive() -> list[Applied]:
                answers = do()
                self._agent.world.check_arbiter()
                return answers

            return self._answers(names, lambda: self._travel("write", arrive))

        agent, world = self._agent, self._agent.world
        world.check_gate(agent, names)
        grant = agent.gate.grant

        def leave() -> list[Applied]:
            world.note_ghosts(agent, grant, names)
            before = world.rows(agent.region, names)
            answers = do()
            world.note_writes(agent, grant.epoch, batch, before, answers)
            return answers

        return self._answers(names, lambda: self._travel("write", leave))

    def _answers(self, names: list[str], travel: Callable[[], list[Applied]]) -> list[Applied]:
        try:
            return travel()
        except StoreUnavailable as error:
            return [Applied(won=False, error=error)] * len(names)

    def _travel(self, name: str, do: Callable[[], Any]) -> Any:
        agent, world = self._agent, self._agent.world
        faults, dice = world.faults, world.dice
        world.wait(agent, CALL_S / 2 * dice.random() if dice.random() < faults.slow else 0.01)
        self._perhaps_stopped()
        is_lost = dice.random() < faults.lost_request
        if is_lost or (self._is_arbiter and agent.region in world.cut_from_arbiter):
            world.seen["lost request"] += is_lost
            world.wait(agent, 1.0)
            raise StoreUnavailable(f"{name} of {agent.name} did not arrive")
        answer = do()
        self._perhaps_stopped()
        if dice.random() < faults.lost_reply:
            world.seen["lost reply"] += 1
            world.wait(agent, 1.0)
            raise StoreUnavailable(f"the answer to {name} did not come to {agent.name}")
        world.wait(agent, CALL_S / 2 * dice.random() if dice.random() < faults.slow else 0.01)
        return answer

    def _perhaps_stopped(self) -> None:
        world = self._agent.world
        if world.dice.random() < world.faults.stopped:
            seconds = world.dice.choice([15.0, 40.0, 90.0])
            if world.dice.random() < 0.5:
                world.seen["asleep in a call"] += 1
                self._agent.sleep(seconds)
            else:
                world.seen["stopped in a call"] += 1
            world.wait(self._agent, seconds)


class Replicated:
    """Signs of the other region as old as what the table replicates."""

    def __init__(self, table: GlobalTableSim, region: str) -> None:
        self._table = table
        self._region = region

    def write(self) -> None:
        """Nothing: the table knows how far it is behind."""

    def age_s(self, record: Record) -> float | None:
        return 0.0 if record.holder == self._region else self._table.replication_lag(record.holder, self._region)

    def newest_epoch(self) -> int:
        return 0


class Agent:
    """One process on a machine of its own: its clocks run a little wrong, and a crash forgets everything."""

    def __init__(self, world: World, region: str, number: int) -> None:
        self.world, self.region = world, region
        self.name = f"{region}:{number}"
        self.rate = 1.0 + world.dice.uniform(-0.03, 0.03)
        self.skew_s = world.dice.choice([0.0, 0.3, -0.3, -600.0, 600.0])
        self._zero = world.dice.uniform(0.0, 1e6)
        self._slept_s = 0.0
        self._wakes_at = -math.inf
        self.monotonic = self._since_boot if world.counts_sleep else self._awake
        self.is_busy = self.is_dead = False
        self.stopped_until = 0.0
        self.gate = Gate(region, monotonic=self.monotonic)
        bus = EventBus()
        self.store = gated(
            TaskStore(Road(world.table.engine(region), self, is_arbiter=False), monotonic=self.monotonic),
            self.gate,
        )
        self.arbiter = Arbiter(
            Road(world.arbiter, self, is_arbiter=True),
            RegionPolicy(
                region=region,
                owner=self.name,
                scope=SCOPE,
                lease_s=GRANT_S,
                beat_s=BEAT_S,
                preferred=REGIONS[0],
                goes_back=world.goes_back,
                drain_s=DRAIN_S,
            ),
            well=world.wellness[region],
            bus=bus,
            signs=Replicated(world.table, region),
            monotonic=self.monotonic,
            rng=world.dice,
        )
        keep = {"keep_success_s": FOREVER_S, "keep_failed_s": FOREVER_S}
        self.rescuer = Rescuer(
            self.store,
            bus,
            Dependents(self.store, bus, **keep),
            LostLeases(
                self.store,
                owner=self.name,
                guard_s=GUARD_S,
                is_held=lambda name: name in self.held,
                epoch=lambda: self.gate.epoch,
                most=3,
            ),
            owner=self.name,
            max_crashes=1000,
            sweep_s=15.0,
        )
        settings = Settings(region=region, region_arbiter=f"sqlite://{MEMORY}")
        self.admission = Admission(self.store, Registry(region_job), settings, bus, rng=world.dice)
        self.held: dict[str, Held] = {}
        self.doubts: list[Doubt] = []

    def _since_boot(self) -> float:
        return self._zero + self.rate * self.world.clock.monotonic()

    def _awake(self) -> float:
        """What `time.monotonic` says: it stands still while the machine sleeps."""
        asleep_s = self._slept_s - max(0.0, self._wakes_at - self.world.clock.monotonic())
        return self._since_boot() - self.rate * asleep_s

    def sleep(self, seconds: float) -> None:
        """The machine is suspended; no thread of the agent does anything meanwhile."""
        now = self.world.clock.monotonic()
        self._slept_s += max(0.0, now + seconds - max(now, self._wakes_at))
        self._wakes_at = max(self._wakes_at, now + seconds)

    # What its threads do

    def look(self) -> None:
        """The thread that asks the authority."""
        try:
            self.gate.grant = self.arbiter.step()
        except StoreError as error:
            raise Broken(f"{self.name} does not know what it may do: {error!r}") from error
        self.world.note_grant(self)

    def work(self) -> None:
        """One turn of the loop, and of the watch over handlers."""
        self.drop_what_is_over()
        settlements = {name: write for name, one in self.held.items() if (write := self._settlement(one)) is not None}
        room = SLOTS - len(self.held)
        wanted: list[Wanted] = []
        if self.gate.may_claim and room > 0:
            page = self.store.ready(LANE, limit=2 * MOST_NEWER)
            entries = list(filter(self.store.may_try, page.entries))
            self.world.dice.shuffle(entries)
            wanted = [Wanted(entry, LEASE_S) for entry in entries[:room] if entry.task_id not in self.held]
        if settlements or (wanted and self.gate.may_claim):
            self._take_in(settlements, self.store.exchange(list(settlements.values()), wanted, owner=self.name))
        if self.doubts and self.gate.is_open:
            self._hold(self.store.resolve(self.doubts, owner=self.name))
            self.doubts = []

    def beat(self) -> None:
        """The heartbeat of all it holds."""
        leases = [one.lease for one in self.held.values()]
        for lease, renewal in zip(leases, self.store.renew([Beat(one) for one in leases]), strict=True):
            if (one := self.held.get(lease.task_id)) is None or one.lease.fence != lease.fence:
                continue
            if renewal.lease is not None:
                one.lease = renewal.lease
            elif renewal.lost:
                del self.held[lease.task_id]
        self.drop_what_is_over()

    def sweep(self) -> None:
        """Take what agents have lost."""
        if self.gate.may_claim:

            def wanted(task: Task) -> float | None:
                return LEASE_S if len(self.held) < SLOTS else None

            self._hold(self.rescuer.take_over([LANE], wanted, self.doubts.extend))

    def drop_what_is_over(self) -> None:
        """Handlers whose lease or whose region's grant is over are stopped."""
        now = self.monotonic()
        for name, one in list(self.held.items()):
            if not self.gate.is_open or now >= one.lease.deadline(LEASE_MARGIN):
                del self.held[name]

    def _settlement(self, one: Held) -> Write | None:
        now = self.store.clock.now()
        if one.decided is None:
            if self.gate.grant.is_draining:
                one.decided = writes.release(one.lease, now=now)
            elif self.world.clock.monotonic() >= one.ends_at:
                if one.outcome == "retry":
                    one.decided = writes.retry(one.lease, due=now + 5.0, error="boom", now=now)
                else:
                    one.decided = writes.succeed(one.lease, now=now, expire_at=now + FOREVER_S, result=f'"{self.name}"')
        return one.decided

    def _take_in(self, settlements: dict[str, Write], exchanged: Exchanged) -> None:
        for name, settled in zip(settlements, exchanged.settled, strict=True):
            if settled.is_rejected:
                self._fall_back(name)
            elif settled.error is None:
                self.held.pop(name, None)
        self._hold(exchanged.leases)
        self.doubts += exchanged.doubts

    def _fall_back(self, name: str) -> None:
        """What is refused for good becomes a bare failure; what is refused then too is let go."""
        if (one := self.held.get(name)) is None:
            return
        if one.is_bare:
            del self.held[name]
            return
        now = self.store.clock.now()
        one.is_bare = True
        one.decided = writes.bare(writes.fail(one.lease, error="never", now=now, expire_at=now + FOREVER_S))

    def _refuse(self, lease: Lease, outcome: Outcome) -> Write | None:
        """A payload that could not be read: it is there, or on its way, so it is read later."""
        if not isinstance(outcome, Undecided):
            raise Broken(f"{self.name} gives {lease.task_id} up, whose payload is not lost: {outcome}")
        self.world.seen["unreadable text"] += 1
        settlement = settle(
            lease,
            region_job,
            outcome,
            policy=POLICY,
            now=self.store.clock.now(),
            seconds=0.0,
            rng=self.world.dice,
            keep=lambda key, text, expire_at: None,
        )
        return None if settlement is None else settlement.write

    def _hold(self, leases: Sequence[Lease]) -> None:
        refused = self.admission.refusals(leases)
        for lease in leases:
            seconds = self.world.dice.choice([0.5, 2.0, 8.0, 50.0]) if self.world.faults != NO_FAULTS else 1.0
            outcome = self.world.dice.choice(["success", "success", "success", "retry"])
            decided = self._refuse(lease, refused[lease.task_id]) if lease.task_id in refused else None
            self.held[lease.task_id] = Held(lease, self.world.clock.monotonic() + seconds, outcome, decided)


@dataclass(order=True)
class Event:
    """Something that is due."""

    due: float
    number: int
    agent: Agent | None = field(compare=False)
    do: Callable[[], None] = field(compare=False)
    every_s: float = field(compare=False, default=0.0)


class World:
    """All of it, from a seed."""

    def __init__(
        self, seed: int, *, goes_back: bool = False, skew_s: float = 0.9 * CLOCK_ERROR_S, counts_sleep: bool = True
    ) -> None:
        self.dice = random.Random(seed)
        self.clock = FakeClock()
        self.goes_back = goes_back
        self.counts_sleep = counts_sleep
        """Whether agents count on a clock that goes on while their machines sleep."""
        self.faults = Faults()
        self.table = GlobalTableSim(
            REGIONS,
            lag_s=lambda *link: self.dice.choice([0.2, 0.5, 1.0, 3.0]),
            clock=self.clock,
            open_engine=lambda region, clock: Rows(clock),
        )
        for region in REGIONS:
            self.table.skew(region, self.dice.uniform(-skew_s / 2, skew_s / 2))
        self.arbiter = SqliteEngine(MEMORY, clock=self.clock)
        self.wellness = {region: Wellness() for region in REGIONS}
        self.cut_from_arbiter: set[str] = set()
        self.without_texts: set[str] = set()
        """Regions in which no large text can be read."""
        self.full: set[str] = set()
        """Tasks whose rows the store lets grow no more."""
        self.refused: set[str] = set()
        """Tasks of which the store has refused a write for good."""
        self.newer: dict[str, Row] = {}
        """Rows of a newer version."""
        self.halted: Row | None = None
        """The row of the arbiter before a newer version gave it a state that these agents do not know."""
        self.seen: Counter[str] = Counter()
        self.steps = 0
        self.depth = 0
        self._events: list[Event] = []
        self._numbers = itertools.count()
        self.ghosts: set[str] = set()
        """Tasks for which a write left after the grant was over, as its agent was stopped right after its look."""
        self.ends: dict[tuple[str, int, int], str] = {}
        self.holder_of: dict[int, str] = {}
        self.epoch = 0
        self.names: list[str] = []
        self.agents: list[Agent] = []
        for region in REGIONS:
            for _ in range(AGENTS):
                self.start(region)
        self._every(1.0, self._deliver)

    def close(self) -> None:
        self.table.close()
        self.arbiter.close()

    # Time

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.clock.monotonic() + seconds
        while self._events and self._events[0].due <= until:
            event = heapq.heappop(self._events)
            if event.due > self.clock.monotonic():
                self.clock.advance(event.due - self.clock.monotonic())
            self._happen(event)
        if until > self.clock.monotonic():
            self.clock.advance(until - self.clock.monotonic())
        self.check()

    def _happen(self, event: Event) -> None:
        agent, now = event.agent, self.clock.monotonic()
        if agent is not None and agent.is_dead:
            return
        if agent is not None and (agent.is_busy or agent.stopped_until > now):
            event.due = max(now + 0.3, agent.stopped_until)
            heapq.heappush(self._events, event)
            return
        self.steps += 1
        if agent is not None:
            agent.is_busy = True
        try:
            event.do()
        except StoreError:
            self.seen["a piece failed"] += 1
        except _Killed:
            return
        finally:
            if agent is not None:
                agent.is_busy = False
        self.check()
        if event.every_s:
            event.due = max(self.clock.monotonic(), event.due) + event.every_s * self.dice.uniform(0.8, 1.2)
            heapq.heappush(self._events, event)

    def wait(self, agent: Agent, seconds: float) -> None:
        """An agent is in the middle of a call: the others go on."""
        if self.depth < DEPTH or seconds < 0.1:
            self.depth += 1
            try:
                if self.depth <= DEPTH:
                    self.run(seconds)
            finally:
                self.depth -= 1
        if agent.is_dead:
            raise _Killed

    def _every(self, seconds: float, do: Callable[[], None], agent: Agent | None = None) -> None:
        due = self.clock.monotonic() + seconds * self.dice.random()
        heapq.heappush(self._events, Event(due, next(self._numbers), agent, do, seconds))

    def _deliver(self) -> None:
        before = len(self.table.overwritten)
        self.table.deliver()
        for lost in list(self.table.overwritten)[before:]:
            self._check_overwritten(lost)

    # Who is there

    def start(self, region: str) -> None:
        agent = Agent(self, region, next(self._numbers))
        self.agents.append(agent)
        for seconds, do in ((5.0, agent.look), (3.0, agent.work), (8.0, agent.beat), (12.0, agent.sweep)):
            self._every(seconds, do, agent)

    def kill(self, agent: Agent) -> None:
        agent.is_dead = True
        self.agents.remove(agent)

    def stop_for_a_while(self, agent: Agent, seconds: float) -> None:
        """As SIGSTOP and SIGCONT do, between two calls."""
        agent.stopped_until = self.clock.monotonic() + seconds

    def suspend(self, agent: Agent, seconds: float) -> None:
        """Its machine sleeps, between two calls."""
        self.stop_for_a_while(agent, seconds)
        agent.sleep(seconds)

    def enqueue(self, region: str) -> None:
        name, engine = f"t{len(self.names)}", self.table.engine(region)
        now = timestamp(engine.clock.now())
        task = Task(
            task_id=name,
            status=Status.PENDING,
            created_at=now,
            submitted_at=now,
            job=region_job.name,
            max_retry=1_000_000,
            payload_text='""' if self.dice.random() < 0.8 else f'"{"x" * 2 * Rows.inline_bytes}"',
        )
        [answer] = TaskStore(engine).enqueue([task])
        if answer.error is None:
            self.names.append(name)

    def write_newer(self, region: str) -> None:
        """A newer version puts a task that this one cannot read, at the front of its lane."""
        if len(self.newer) >= MOST_NEWER:
            return
        engine, name = self.table.engine(region), f"newer{len(self.newer)}"
        status, attribute = self.dice.choice(["RUNNING", "RUNNING", "PENDING", "SLEEPING"]), self.dice.choice([*NEWER])
        at = timestamp(engine.clock.now() - 10 * LEASE_S)
        row: Row = {"taskId": name, "status": status, "createdAt": at, "submittedAt": at, "job": region_job.name}
        row |= {"kind": "batch", "payload": "{}", "fence": 1, "maxRetry": 1, attribute: NEWER[attribute]}
        if status == "RUNNING":
            row |= {"lockTime": at, "leaseOwner": "newer", "leaseSec": LEASE_S, "hb": 1}
        [answer] = engine.put([row])
        if answer.won:
            self.newer[name] = row

    def halt(self) -> None:
        """A newer version gives the grant a state that these agents do not know, or takes it back."""
        row = self.arbiter_row()
        if row is None:
            return
        before, self.halted = self.halted, None
        state = HALTED if before is None else before["handoffState"]
        at = row["updatedAt"] + region_writes.JUST_LATER_S
        changes = {"handoffState": state, "updatedAt": at, "info": {**row["info"], "newer": "kept"}}
        [answer] = self.arbiter.apply(
            [Write(verb="newer", task_id=row["taskId"], set=changes, require=(Is("fence", row["fence"]),))]
        )
        if before is None:
            self.halted = {**row, **changes, "handoffState": row["handoffState"]}
            self.seen["halted"] += answer.won

    def refuses(self, write: Write) -> bool:
        """Whether the store never takes this write."""
        is_larger = write.task_id in self.full and not write.set.keys().isdisjoint(("errors", "result"))
        if is_larger or self.dice.random() < self.faults.refused:
            self.seen["refused"] += 1
            self.refused.add(write.task_id)
            return True
        return False

    def order(self, what: str, to: str) -> None:
        """A command of a person to the arbiter."""
        row = self.arbiter_row()
        if row is None or self.halted is not None:
            return
        seen, now = Record.from_row(row), self.arbiter.clock.now()
        if what in ("drain", "vacate") and to == seen.holder:
            return
        write = {
            "drain": lambda: region_writes.drain(seen, to, drain_s=DRAIN_S, by="ada", reason="move", now=now),
            "vacate": lambda: region_writes.vacate(seen, to, by="ada", reason="lost", now=now),
            "stay": lambda: region_writes.stay(seen, by="ada", reason="stay", now=now),
            "freeze": lambda: region_writes.freeze(seen, "careful", by="ada", now=now),
            "thaw": lambda: region_writes.freeze(seen, None, by="ada", now=now),
        }[what]()
        self.seen[f"{what} ordered"] += self.arbiter.apply([write])[0].won
        self.check_arbiter()

    # The rules

    def check(self) -> None:
        """What must hold at every moment: at most one region may act."""
        open_in = {agent.region for agent in self.agents if agent.gate.is_open}
        if len(open_in) > 1:
            raise Broken(f"both regions have a valid grant: {[(a.name, a.gate.grant) for a in self.agents]}")

    def check_arbiter(self) -> None:
        """What must hold after each write of the arbiter's row: an epoch is of one region, and never comes back."""
        row = self.arbiter_row()
        if row is not None:
            if self.halted is not None and row != {**self.halted, "handoffState": HALTED}:
                raise Broken(f"a grant of a newer version was changed: {row}")
            if self.seen["halted"] and "newer" not in row["info"]:
                raise Broken(f"what a newer version keeps with the grant is gone: {row}")
            epoch, holder = row["fence"], row["leaseOwner"]
            if epoch < self.epoch:
                raise Broken(f"the epoch went back from {self.epoch} to {epoch}")
            if self.holder_of.setdefault(epoch, holder) != holder:
                raise Broken(f"the epoch {epoch} is of {self.holder_of[epoch]} and of {holder}")
            if epoch > self.epoch:
                self.seen[f"grant of {holder}"] += 1
            self.epoch = epoch

    def note_grant(self, agent: Agent) -> None:
        self.check()
        if agent.gate.is_open:
            self.seen[f"open in {agent.region}"] += 1
            if self.holder_of.get(agent.gate.epoch) != agent.region:
                raise Broken(f"{agent.name} has a grant of the epoch {agent.gate.epoch}, which is not of its region")

    def check_gate(self, agent: Agent, names: Sequence[str]) -> None:
        """No write leaves without a valid grant; the look at it was a moment ago."""
        if not agent.gate.is_open:
            raise Broken(f"{agent.name} writes {names} without a grant")

    def note_ghosts(self, agent: Agent, grant: Grant, names: Sequence[str]) -> None:
        """A write arrives: after a later grant has begun, or so late that its table may date it behind what is written
        under the next, if its agent was stopped in between. That grant may be one of its own region, which has not
        heard yet of all that was done meanwhile."""
        is_late = agent.monotonic() > grant.valid_until + CALL_S
        if is_late or any(one.gate.is_open and one.gate.epoch > grant.epoch for one in self.agents):
            self.ghosts.update(names)
            self.seen["ghost"] += 1

    def rows(self, region: str, names: Sequence[str]) -> dict[str, Row]:
        """The tasks as the region has them; none while it answers nobody."""
        try:
            return self.table.engine(region).get(names)
        except StoreUnavailable:
            return {}

    def note_writes(
        self, agent: Agent, epoch: int, batch: Sequence[Write], before: dict[str, Row], answers: Sequence[Applied]
    ) -> None:
        for write, answer in zip(batch, answers, strict=True):
            if not answer.won or answer.row is None or "job" not in answer.row:
                continue
            name, row = write.task_id, answer.row
            if name in self.newer and self.newer[name]["status"] != "PENDING":
                raise Broken(f"{agent.name} changed a row of a newer version: {write}")
            if before.get(name, {}).get("regionEpoch", 0) > epoch:
                raise Broken(f"{agent.name} of epoch {epoch} changed {name} of a later one: {write}")
            if write.verb in ("claim", "take over"):
                self.seen[write.verb] += 1
                if row["regionEpoch"] != epoch:
                    raise Broken(f"{name} was claimed under the epoch {epoch} and says {row['regionEpoch']}")
            if write.verb == "reassert":
                self.seen["reassert"] += 1
            if "leaseOwner" in write.remove and name not in self.ghosts:
                lease = name, row["regionEpoch"], row["fence"]
                if lease in self.ends:
                    raise Broken(f"{lease} ended twice: for {self.ends[lease]} and for {agent.name}")
                self.ends[lease] = agent.name
                self.seen[f"end by {write.verb}"] += 1

    def _check_overwritten(self, lost: Any) -> None:
        now = self.table.engine(lost.by).get([lost.item_id]).get(lost.item_id, {})
        before = lost.row or {}
        self.seen["overwritten"] += 1
        if lost.item_id in self.ghosts or "regionEpoch" not in before:
            return
        if now.get("regionEpoch", 0) < before["regionEpoch"]:
            raise Broken(f"a late write of a region that was lost changed a task: {lost} by {now}")

    # The end

    def mend(self) -> None:
        """Everything that lasts is over."""
        self.table.heal()
        for region in REGIONS:
            self.table.rejoin(region)
            self.wellness[region].is_well, self.wellness[region].successes = True, 10
        self.cut_from_arbiter.clear()
        self.without_texts.clear()
        if self.halted is not None:
            self.halt()
        self.order("thaw", REGIONS[0])
        for agent in self.agents:
            agent.stopped_until = 0.0
        for region in REGIONS:
            while sum(agent.region == region for agent in self.agents) < AGENTS:
                self.start(region)

    def is_done(self) -> bool:
        """Every task has ended, and both regions say the same."""
        if self.table.pending():
            return False
        here, there = (self.table.engine(region).get(self.names) for region in REGIONS)
        return here == there and all(Task.from_row(row).status.is_terminal for row in here.values())

    def finish(self, within_s: float) -> None:
        """After the faults everything comes to its end."""
        self.faults = NO_FAULTS
        self.mend()
        until = self.clock.monotonic() + within_s
        while not self.is_done():
            if self.clock.monotonic() > until:
                rows = self.table.engine(REGIONS[0]).get(self.names).values()
                left = [(row["taskId"], row["status"]) for row in rows if not Task.from_row(row).status.is_terminal]
                raise Broken(f"after {within_s} s without faults these are open: {left}, {self.arbiter_row()}")
            self.run(5.0)
        here = self.table.engine(REGIONS[0]).get(self.names)
        if len(here) != len(self.names):
            raise Broken(f"tasks are gone: {set(self.names) - set(here)}")
        if wrong := [name for name, row in here.items() if row["status"] == Status.FAILED and name not in self.refused]:
            raise Broken(f"these failed, and the store took all that was written of them: {wrong}")
        for name, row in self.table.engine(REGIONS[0]).get(list(self.newer)).items():
            before = self.newer[name]
            own = {attribute: value for attribute, value in row.items() if attribute in NEWER}
            kept = row == before if before["status"] != "PENDING" else own.items() >= (before.items() & own.items())
            if not kept:
                raise Broken(f"a row of a newer version was changed from {before} to {row}")

    def arbiter_row(self) -> Row | None:
        """The row of the arbiter as it is."""
        return self.arbiter.get([scope_id(SCOPE)]).get(scope_id(SCOPE))


class _Killed(BaseException):
    """The process was killed in the middle of a call."""


__all__ = ("REGIONS", "Broken", "RegionPassive", "World")
