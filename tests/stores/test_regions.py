"""Tasks in two regions: what goes wrong without a grant, and what cannot go wrong with one, staged by hand."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.stands import eventually, seen
from thunderagent.agent.regions import gated
from thunderagent.agent.sweep import LostLeases
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import SharedClock
from thunderagent.model.errors import RegionPassive, StoreUnavailable
from thunderagent.model.task import Candidate, Lane, Lease, Status, Task, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.regions import writes as region_writes
from thunderagent.regions.arbiter import Arbiter, RegionPolicy
from thunderagent.regions.gate import AT_ONCE, Gate
from thunderagent.regions.grant import HOLDER_SHARE, TAKER_SHARE, Grant, Record, scope_id
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Beat, TaskStore, Wanted
from thunderagent.testing import FakeClock, GlobalTableSim
from thunderagent.testing.global_table.engine import RegionClock

HERE, THERE = "eu-central-1", "eu-west-1"
LEASE_S = 30.0
GRANT_S = 30.0
DRAIN_S = 30.0


def put(store: TaskStore, name: str = "a") -> Candidate:
    """A task that is due, and its entry in the index."""
    now = timestamp(store.clock.now())
    task = Task(task_id=name, status=Status.PENDING, created_at=now, submitted_at=now, job="test.job", max_retry=3)
    [answer] = store.enqueue([task])
    assert answer.created
    return seen(task)


def claim(store: TaskStore, entry: Candidate, owner: str) -> list[Lease]:
    return store.claim([Wanted(entry, LEASE_S)], owner=owner)


@dataclass
class Here:
    """One agent's store in a region, behind a gate whose grant the test gives."""

    table: GlobalTableSim
    region: str
    clock: FakeClock
    gate: Gate = field(init=False)
    store: TaskStore = field(init=False)

    def __post_init__(self) -> None:
        self.gate = Gate(self.region, monotonic=self.clock.monotonic)
        plain = TaskStore(self.table.engine(self.region), monotonic=self.clock.monotonic)
        self.store = gated(plain, self.gate)

    def grant(self, epoch: int, for_s: float = math.inf) -> None:
        self.gate.grant = Grant(epoch=epoch, valid_until=self.clock.monotonic() + for_s)

    def row(self, name: str = "a") -> dict[str, Any]:
        return self.table.engine(self.region).get([name])[name]

    def take_over(self, owner: str, name: str = "a") -> list[Lease]:
        """As a sweep does it: what is of an earlier epoch is lost."""
        return self.store.take_over([(task, LEASE_S) for task in self.lost()], owner=owner).leases

    def lost(self) -> list[Task]:
        """What a sweep finds."""
        lost = LostLeases(self.store, guard_s=2.0, epoch=lambda: self.gate.epoch)
        return lost.find([Lane()])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> Iterator[GlobalTableSim]:
    with GlobalTableSim([HERE, THERE], lag_s=1.0, clock=clock) as one:
        yield one


@pytest.fixture
def here(table: GlobalTableSim, clock: FakeClock) -> Here:
    return Here(table, HERE, clock)


@pytest.fixture
def there(table: GlobalTableSim, clock: FakeClock) -> Here:
    return Here(table, THERE, clock)


def on_sqlite(region: str, clock: SharedClock) -> Engine:
    return SqliteEngine(MEMORY, clock=clock)


@pytest.fixture(params=["sqlite", pytest.param("ministack", marks=pytest.mark.ministack)])
def open_engine(request: pytest.FixtureRequest) -> Callable[[str, SharedClock], Engine]:
    """The engine of each region."""
    if request.param == "sqlite":
        return on_sqlite
    endpoint, mark = request.getfixturevalue("ministack_endpoint"), uuid.uuid4().hex[:8]

    def on_dynamodb(region: str, clock: SharedClock) -> Engine:
        engine = DynamoEngine(f"TaskTable-{region}-{mark}", endpoint=endpoint)
        create_table(engine)
        return engine

    return on_dynamodb


# Without a grant


def test_without_a_gate_both_regions_claim_the_same_task_and_one_of_them_finds_out_too_late(
    open_engine: Callable[[str, SharedClock], Engine],
) -> None:
    clock = FakeClock()
    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        stores = [TaskStore(table.engine(region)) for region in table.regions]
        entry = put(stores[0])
        table.settle()
        [first] = claim(stores[0], entry, "agent here")
        [second] = claim(stores[1], entry, "agent there")
        assert (first.fence, second.fence) == (1, 1), "each replica judged its own condition, and both handlers run"
        table.settle()
        assert [store.renew([Beat(lease)])[0].lost for store, lease in zip(stores, (first, second), strict=True)] == [
            True,
            False,
        ]
        assert [lost.region for lost in table.overwritten] == [HERE]


def test_with_strong_consistency_one_region_claims_the_task_also_without_a_gate(clock: FakeClock) -> None:
    with GlobalTableSim([HERE, THERE, "us-east-1"], mode="MRSC", lag_s=0.1, clock=clock) as table:
        stores = [TaskStore(table.engine(region)) for region in (HERE, THERE)]
        entry = put(stores[0])
        clock.advance(1.0)
        [lease] = claim(stores[0], entry, "agent here")
        with pytest.raises(StoreUnavailable, match="ReplicatedWriteConflict"):
            claim(stores[1], entry, "agent there")
        clock.advance(1.0)
        assert claim(stores[1], entry, "agent there") == []
        assert stores[0].renew([Beat(lease)])[0].lease


# With one


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["lag", "partition", "clock ahead", "clock behind"])
def test_with_a_gate_only_the_granted_region_claims(
    trouble: str, open_engine: Callable[[str, SharedClock], Engine]
) -> None:
    clock = FakeClock()
    with GlobalTableSim([HERE, THERE], clock=clock, open_engine=open_engine) as table:
        here, there = Here(table, HERE, clock), Here(table, THERE, clock)
        here.grant(1)
        entry = put(here.store)
        table.settle()
        if trouble == "partition":
            table.partition(HERE, THERE)
        elif trouble != "lag":
            table.skew(THERE, 3600.0 if trouble == "clock ahead" else -3600.0)
        with pytest.raises(RegionPassive, match=f"the region {THERE} holds no grant"):
            claim(there.store, entry, "agent there")
        assert there.row()["status"] == "PENDING"
        [lease] = claim(here.store, entry, "agent here")
        assert (lease.task.region_epoch, here.row()["regionEpoch"]) == (1, 1)
        table.heal()
        table.settle()
        assert there.row() == here.row()
        assert not table.overwritten


def test_a_region_that_takes_the_grant_goes_on_with_what_the_lost_one_held(
    table: GlobalTableSim, here: Here, there: Here, clock: FakeClock
) -> None:
    here.grant(1)
    [lease] = claim(here.store, put(here.store), "agent here")
    table.settle()
    table.isolate(HERE)
    clock.advance(GRANT_S * TAKER_SHARE)
    there.grant(2)
    [taken] = there.take_over("agent there")
    assert (taken.task.region_epoch, taken.fence, taken.task.crash_count) == (2, 2, 1)
    now = there.store.clock.now()
    [settled] = there.store.settle([writes.succeed(taken, now=now, expire_at=now + 1000.0)])
    assert settled.accepted
    table.rejoin(HERE)
    table.settle()
    assert here.row() == there.row()
    assert here.row()["status"] == "SUCCESS"
    here.grant(3)
    assert here.store.renew([Beat(lease)])[0].lost


def test_a_late_write_of_a_lost_region_is_refused_where_the_later_epoch_is_known(
    table: GlobalTableSim, here: Here, there: Here, clock: FakeClock
) -> None:
    here.grant(1)
    [lease] = claim(here.store, put(here.store), "agent here")
    table.settle()
    clock.advance(GRANT_S * TAKER_SHARE)
    there.grant(2)
    [taken] = there.take_over("agent there")
    table.settle()
    before, now = here.row(), here.store.clock.now()
    late = [
        writes.renew(lease, now=now, until=now + LEASE_S),
        writes.succeed(lease, now=now, expire_at=now),
        writes.release(lease, now=now),
    ]
    answers = table.engine(HERE).apply([region_writes.in_region(write, 1) for write in late])
    assert [answer.won for answer in answers] == [False] * 3
    assert here.row() == before
    assert there.store.renew([Beat(taken)])[0].lease


@pytest.mark.parametrize("skew_s", [0.0, 4.0, -4.0])
def test_a_write_that_left_within_its_grant_is_older_than_what_the_other_region_does(
    skew_s: float, table: GlobalTableSim, here: Here, there: Here, clock: FakeClock
) -> None:
    """The last write of a holder leaves at 80 % of the grant and arrives within 6 s; the taker begins 5 s later."""
    table.skew(HERE, skew_s)
    here.grant(1, for_s=GRANT_S * HOLDER_SHARE)
    [lease] = claim(here.store, put(here.store), "agent here")
    table.settle()
    table.partition(HERE, THERE)
    clock.advance(GRANT_S * HOLDER_SHARE - 0.001)
    assert here.gate.is_open
    now = here.store.clock.now()
    last = region_writes.in_region(writes.retry(lease, due=now, error="late", now=now), here.gate.check())
    clock.advance(6.0)
    assert table.engine(HERE).apply([last])[0].won, "its own replica knows of nothing"
    clock.advance(GRANT_S * (TAKER_SHARE - HOLDER_SHARE) - 6.0)
    there.grant(2)
    [taken] = there.take_over("agent there")
    table.heal()
    table.settle()
    assert here.row() == there.row()
    assert (there.row()["leaseOwner"], there.row()["fence"]) == ("agent there", taken.fence)
    assert [(lost.region, lost.by) for lost in table.overwritten] == [(HERE, THERE)]


@pytest.mark.parametrize("verb", ["renew", "succeed", "retry", "release"])
@pytest.mark.parametrize("then", ["renew", "succeed"])
def test_the_holder_writes_its_task_again_over_a_write_of_an_agent_that_was_stopped_for_long(
    verb: str, then: str, table: GlobalTableSim, here: Here, there: Here, clock: FakeClock
) -> None:
    """Its agent looked at the grant, was stopped, and wrote to its own replica while the regions were apart."""
    here.grant(1)
    [lease] = claim(here.store, put(here.store), "agent here")
    table.settle()
    table.partition(HERE, THERE)
    clock.advance(60.0)
    there.grant(2)
    [taken] = there.take_over("agent there")
    clock.advance(5.0)
    now = here.store.clock.now()
    late = {
        "renew": writes.renew(lease, now=now, until=now + LEASE_S),
        "succeed": writes.succeed(lease, now=now, expire_at=now + 1000.0, result='"late"'),
        "retry": writes.retry(lease, due=now, error="late", now=now),
        "release": writes.release(lease, now=now),
    }[verb]
    assert table.engine(HERE).apply([region_writes.in_region(late, 1)])[0].won
    table.heal()
    table.settle()
    assert there.row()["regionEpoch"] == 1, "the last writer wins, whatever its epoch"
    if then == "renew":
        [renewal] = there.store.renew([Beat(taken)])
        assert renewal.lease
        assert {name: there.row().get(name) for name in ("status", "leaseOwner", "fence", "regionEpoch", "result")} == {
            "status": "RUNNING",
            "leaseOwner": "agent there",
            "fence": 2,
            "regionEpoch": 2,
            "result": None,
        }
        assert "expireAt" not in there.row()
        clock.advance(LEASE_S + 10.0)
        [lost] = there.lost()
        assert lost.lease_sec == pytest.approx(LEASE_S, abs=1.0), "should the holder die now, its lease ends as any"
    [settled] = there.store.settle([writes.succeed(taken, now=now, expire_at=now + 1000.0, result='"of the holder"')])
    assert settled.accepted
    table.settle()
    assert here.row() == there.row()
    assert (here.row()["status"], here.row()["result"]) == ("SUCCESS", '"of the holder"')
    assert "leaseOwner" not in here.row()


def test_a_task_that_had_ended_when_such_a_write_came_runs_again_and_ends(
    table: GlobalTableSim, here: Here, there: Here, clock: FakeClock
) -> None:
    """Nobody holds it who could write it again; an agent that is stopped may always make a task run twice."""
    here.grant(1)
    [lease] = claim(here.store, put(here.store), "agent here")
    table.settle()
    table.partition(HERE, THERE)
    clock.advance(60.0)
    there.grant(2)
    [taken] = there.take_over("agent there")
    now = there.store.clock.now()
    there.store.settle([writes.succeed(taken, now=now, expire_at=now + 1000.0)])
    clock.advance(5.0)
    late = writes.renew(lease, now=now, until=now + LEASE_S)
    assert table.engine(HERE).apply([region_writes.in_region(late, 1)])[0].won
    table.heal()
    table.settle()
    assert there.row()["status"] == "RUNNING"
    [again] = there.take_over("another agent there")
    assert there.store.settle([writes.succeed(again, now=now, expire_at=now + 1000.0)])[0].accepted


def test_what_leaves_under_one_look_at_the_grant_is_on_its_way_at_once() -> None:
    """Were there more writes than threads, the last would leave a call later, and a call may take 6 s."""
    engine = DynamoEngine("TaskTable", region="eu-central-1")
    assert engine.threads >= engine.sibling().threads >= AT_ONCE


# The grant itself


@dataclass
class Well:
    is_well: bool = True
    successes: int = 9


class Slow:
    """The arbiter as one agent reaches it: with a clock of its own, and a stop after a look."""

    def __init__(self, engine: Engine, *, skew_s: float = 0.0) -> None:
        self._engine, self._skew_s = engine, skew_s
        self.after_look: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def clock(self) -> SharedClock:
        return RegionClock(self._engine.clock, self._skew_s)

    def get(self, task_ids: list[str]) -> Any:
        rows = self._engine.get(task_ids)
        if self.after_look is not None:
            stopped, self.after_look = self.after_look, None
            stopped()
        return rows


class Regions:
    """An arbiter and agents of two regions."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.engine = SqliteEngine(MEMORY, clock=clock)
        self.agents: list[tuple[str, Arbiter]] = []

    def agent(self, region: str, engine: Any = None) -> Arbiter:
        arbiter = Arbiter(
            engine or self.engine,
            RegionPolicy(
                region=region, owner=f"agent {len(self.agents)}", lease_s=GRANT_S, beat_s=10.0, drain_s=DRAIN_S
            ),
            well=Well(),
            bus=EventBus(),
            monotonic=self.clock.monotonic,
            rng=random.Random(len(self.agents)),
        )
        self.agents.append((region, arbiter))
        return arbiter

    def record(self) -> Record:
        return Record.from_row(self.engine.get([scope_id("default")])[scope_id("default")])

    def order(self, make: Callable[..., Any], *to: str, **said: Any) -> None:
        [answer] = self.engine.apply(
            [make(self.record(), *to, by="ada", reason="a person wants it", now=self.clock.now(), **said)]
        )
        assert answer.won

    def freeze(self, why: str | None) -> None:
        [answer] = self.engine.apply([region_writes.freeze(self.record(), why, by="ada", now=self.clock.now())])
        assert answer.won

    def valid(self) -> set[str]:
        now = self.clock.monotonic()
        return {region for region, agent in self.agents if agent.grant().is_valid(now)}

    def go(self, for_s: float, *agents: Arbiter) -> None:
        """Let time pass in which these agents look each second; two regions never have a valid grant at once."""
        for _ in range(round(for_s)):
            self.clock.advance(1.0)
            for agent in agents:
                agent.step()
                assert len(self.valid()) < 2


@pytest.fixture
def regions(clock: FakeClock) -> Iterator[Regions]:
    one = Regions(clock)
    yield one
    one.engine.close()


def test_a_beat_that_looks_like_that_of_another_agent_begins_no_grant(regions: Regions, clock: FakeClock) -> None:
    """The row is dated in the future, so both agents make the same beat of what they saw; one was stopped meanwhile."""
    far = regions.agent(THERE, Slow(regions.engine, skew_s=3600.0))
    regions.go(12, far)
    regions.order(region_writes.vacate, HERE)
    slow = Slow(regions.engine)
    one, stopped, taker = regions.agent(HERE), regions.agent(HERE, slow), regions.agent(THERE)
    regions.go(45, one, stopped, taker)
    assert regions.valid() == {HERE}
    beat = regions.record().beat

    def the_other_beats_meanwhile() -> None:
        while regions.record().beat == beat:
            regions.go(1, one, taker)
        regions.go(20, taker)

    slow.after_look = the_other_beats_meanwhile
    stopped._beat_due = 0.0
    stopped.step()
    regions.go(40, taker)
    assert regions.valid() == {THERE}


def test_an_order_to_drain_that_was_taken_back_does_not_count_for_the_next(regions: Regions, clock: FakeClock) -> None:
    stopped, other, taker = regions.agent(HERE), regions.agent(HERE), regions.agent(THERE)
    regions.go(15, stopped, other, taker)
    regions.order(region_writes.drain, THERE, drain_s=DRAIN_S)
    regions.go(2, stopped, other, taker)
    regions.order(region_writes.stay)
    regions.go(80, other, taker)
    regions.order(region_writes.drain, THERE, drain_s=DRAIN_S)
    stopped.step()
    assert regions.record().holder == HERE
    taker.step()
    assert regions.valid() == {HERE}
    regions.go(GRANT_S * TAKER_SHARE + DRAIN_S + 2, stopped, other, taker)
    assert regions.valid() == {THERE}


@pytest.mark.parametrize("why", ["careful", None])
def test_to_freeze_or_thaw_the_grant_while_it_drains_changes_nothing_of_that(why: str | None, regions: Regions) -> None:
    one, unreached, taker = regions.agent(HERE), regions.agent(HERE), regions.agent(THERE)
    regions.go(15, one, unreached, taker)
    regions.order(region_writes.drain, THERE, drain_s=DRAIN_S)
    regions.go(20, one, unreached, taker)
    before = regions.record()
    regions.freeze(why)
    assert (regions.record().drain_s, regions.record().ordered) == (before.drain_s, before.ordered)
    regions.go(GRANT_S * TAKER_SHARE + DRAIN_S - 21, one, taker)
    assert regions.record().holder == HERE
    regions.go(3, one, taker)
    assert regions.valid() == {THERE}


def test_a_grant_is_handed_over_only_when_the_last_write_of_a_late_agent_has_arrived(
    regions: Regions, clock: FakeClock
) -> None:
    one, late, taker = regions.agent(HERE), regions.agent(HERE), regions.agent(THERE)
    regions.go(15, one, late, taker)
    regions.order(region_writes.drain, THERE, drain_s=DRAIN_S)
    last_valid = handed_over = 0.0
    for second in range(100):
        clock.advance(1.0)
        one.step()
        if second >= 22:  # it did not reach the arbiter before
            late.step()
        if late.grant().is_valid(clock.monotonic()):
            last_valid = clock.monotonic()
        taker.step()
        assert len(regions.valid()) < 2
        if regions.record().holder == THERE:
            handed_over = clock.monotonic()
            break
    assert handed_over - last_valid >= 10.0, "calls end within 6 s"


def test_a_real_thread_brings_what_one_region_has_put_to_the_other() -> None:
    with GlobalTableSim([HERE, THERE], lag_s=0.01).start() as table:
        put(TaskStore(table.engine(HERE)))
        there = TaskStore(table.engine(THERE))
        assert eventually(lambda: there.ready(Lane(), limit=1).entries)[0].task_id == "a"
